"""The door of a process's host memory for other hosts: it serves blocks to them, and copies their blocks here.

    owner's host                                        reader's host
    Set -> block           -> server threads  ==TCP==>  the first reader: block -> its tensors
        -> readers of its own host                      all other readers:  "   -> their tensors

The owner copies nothing: it serves the block that it has set for readers of its own host (``server.py``). The
reader receives straight into a block of its host (``fetch.py``), compares the digests and publishes the block
(``copies.py``); from then on the version is read as any other one of shared memory. A fetch that fails leaves
the destination, and the older version on this host, as they were.
"""

import asyncio
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...core.threads import wait_ended
from ..errors import TransportClosed
from ..handle import ShmSource, StateHandle, TcpSource
from ..host_memory.block import Block
from ..memory import ReadRequest
from ..select import Place
from ..statistics import NetworkStatistics
from ..workers import INLINE_BYTES, CopyWorkers
from .bulk import Bulk
from .copies import NodeCopies
from .fetch import Fetch
from .server import Blocks, BulkServer

# Between two looks if another process still fetches a version.
_POLL_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Copy:
    """A state of another host in a block of this one. ``is_verified``: this process has received it just now, and has
    compared every chunk with its digest."""

    source: ShmSource
    is_verified: bool


class Remote:
    """``serve`` opens it for other hosts; ``copy_here`` needs no server."""

    def __init__(self, place: Place, directory: Path, bulk: Bulk) -> None:
        self._place = place
        self._bulk = bulk
        self._copies = NodeCopies(directory, place)
        self._workers = CopyWorkers()  # a fetch lasts: it must not keep copies of this host waiting
        self._server: BulkServer | None = None
        self._fetches: set[Fetch] = set()
        self._closed = False
        self.statistics = NetworkStatistics()

    @property
    def encrypted(self) -> bool:
        return self._bulk.encrypted

    # ----------------------------------------------------------------------- for readers on other hosts

    def serve(self, blocks: Blocks) -> None:
        """Serves ``blocks`` from the first call on. Raises OSError if it can't listen."""
        if self._closed:
            raise TransportClosed
        if self._server is None:
            self._server = BulkServer(self._bulk, self.statistics, blocks)

    @property
    def address(self) -> str:
        """The host and port that readers of other hosts connect to. Only after ``serve``."""
        assert self._server is not None, "nothing is served"
        return self._server.address

    def source(self, memory: ShmSource) -> TcpSource:
        """A block of this process, for readers of other hosts."""
        return memory.served_at(self.address, encrypted=self.encrypted)

    def compare(self, old: Block, new: Block, size_bytes: int) -> Callable[[int], None] | None:
        """See ``BulkServer.compare``. None too if nothing is served."""
        return None if self._server is None else self._server.compare(old, new, size_bytes)

    # ----------------------------------------------------------------------- states of other hosts

    def find(self, handle: StateHandle) -> ShmSource | None:
        """The copy on this host of a state of another one, if there is one."""
        source = handle.source("tcp")
        if not isinstance(source, TcpSource) or source.node == self._place.node:
            return None
        return self._copies.find(handle)

    async def copy_here(self, request: ReadRequest[TcpSource]) -> Copy:
        """The copy on this host. It is fetched first, unless it is there or another process fetches it."""
        while True:
            if self._closed:
                raise TransportClosed
            # The lock comes first: with it, what is not there will not appear.
            lock = self._copies.try_lock(request.handle.key)
            try:
                if (source := self._copies.find(request.handle)) is not None:
                    return Copy(source, is_verified=False)
                if lock is not None:
                    begin = functools.partial(self._copies.begin, request.handle, self._workers.share)
                    block, generation = await self.fetch(request, begin)
                    return Copy(self._copies.source(block, generation), is_verified=True)
            finally:
                if lock is not None:
                    os.close(lock)
            request.progress.words = "another process of this host fetches it"
            await self._wait_unlocked(request.handle.key)

    async def _wait_unlocked(self, key: str) -> None:
        """Returns when no other process of this host fetches a version of ``key``. Raises TransportClosed."""
        while self._copies.is_locked(key):
            await asyncio.sleep(_POLL_S)
            if self._closed:
                raise TransportClosed

    async def fetch(
        self, request: ReadRequest[TcpSource], begin: Callable[[], tuple[Block, Block | None]]
    ) -> tuple[Block, int]:
        """Fills the block that ``begin`` has begun, and publishes it; returns its generation too. The other block of
        ``begin`` is a version to which changes can be applied."""
        handle = request.handle
        fetch = Fetch(self._bulk, request.source, handle, request.progress, self.statistics)

        def work(stop: threading.Event) -> tuple[Block, int]:
            block, base = begin()
            try:
                fetch.run(block, base, self._workers.share)
                return block, block.commit()
            except BaseException:
                block.end()
                raise

        self._fetches.add(fetch)
        # Never in the event loop, however small the state is.
        moving = asyncio.ensure_future(self._workers.run(handle.size_bytes + INLINE_BYTES + 1, work))
        try:
            return await asyncio.shield(moving)
        except asyncio.CancelledError:
            fetch.abort()
            await wait_ended(moving)
            if not moving.cancelled():
                moving.exception()  # known: it was aborted
            raise
        finally:
            self._fetches.discard(fetch)

    def drop(self, key: str) -> None:
        """Removes the copies of ``key`` on this host."""
        self._copies.drop(key)

    async def close(self) -> None:
        """To be called before the memory is removed."""
        self._closed = True
        for fetch in self._fetches:
            fetch.abort()
        await self._workers.close()
        if self._server is not None:
            self._server.close()
        self._copies.close()
