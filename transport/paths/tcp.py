"""Between hosts: the owner's shared memory, fetched over TCP into shared memory of the reader's host, once for all of
its processes.

    owner's host                                        reader's host
    Set -> block of shm -> server threads  ==TCP==>     the first reader: block of shm -> its tensors
                                                        all other readers:      "      -> their tensors

The owner copies nothing: it serves the block that it has set for readers of its own host (``network/server.py``). The
reader receives straight into a block of its host (``network/fetch.py``), compares the digests and publishes the block
(``network/copies.py``); from then on the version is read as any other one of shared memory. A fetch that fails leaves
the destination, and the older version on this host, as they were.
"""

import asyncio
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ...core.threads import wait_ended
from ..block import Block
from ..errors import ArenaSpace, MemoryInUse, TransportClosed
from ..handle import LentMemory, ShmSource, Source, StateHandle, TcpSource
from ..network.bulk import Bulk
from ..network.copies import NodeCopies
from ..network.fetch import Fetch
from ..network.server import BulkServer
from ..select import Place
from ..statistics import NetworkStatistics
from ..workers import INLINE_BYTES, CopyWorkers
from . import buckets
from .shm import Serving, ShmPath
from .tensor_kind import Tensors
from .transfer_path import Offered, Wanted

# Between two looks if another process still fetches a version.
_POLL_S: Final = 0.005


def _remote(source: ShmSource, address: str, *, encrypted: bool) -> TcpSource:
    return TcpSource("tcp", source.node, source.process, address, encrypted, source.block, source.generation)


def sources_in(lent: LentMemory, source: Source) -> tuple[Source, ...]:
    """All sources of a state whose ``source`` is lent memory."""
    if lent.address is None or not isinstance(source, ShmSource):
        return (source,)
    return source, _remote(source, lent.address, encrypted=lent.encrypted)


def of_this_node(offered: Offered) -> Offered:
    """The state that ``TcpPath.offer`` has set, for readers of the same node."""
    source = offered.source
    assert isinstance(source, TcpSource), "it was offered by tcp"
    return replace(
        offered, source=ShmSource("shm", source.node, source.process, source.block, source.generation)
    )


class TcpPath:
    """``shm``: the path that sets the states, and reads the copies. The server starts with the first ``offer``."""

    def __init__(self, place: Place, directory: Path, shm: ShmPath, bulk: Bulk) -> None:
        self._place = place
        self._shm = shm
        self._bulk = bulk
        self._copies = NodeCopies(directory, place)
        self._workers = CopyWorkers()
        self._server: BulkServer | None = None
        self._fetches: set[Fetch] = set()
        self._closed = False
        self.statistics = NetworkStatistics()

    # ----------------------------------------------------------------------- writing

    async def offer(self, key: str, tensors: Tensors, *, version: int) -> Offered:
        """Raises OSError too, if it can't listen."""
        server = self._listening()
        offered = await self._shm.offer(key, tensors, version=version)
        source = offered.source
        assert isinstance(source, ShmSource), "shared memory offers its own source"
        return replace(offered, source=_remote(source, server.address, encrypted=self._bulk.encrypted))

    def compared(self, old: Block, new: Block, size_bytes: int) -> Callable[[int], None] | None:
        """See ``shm.Compared``: computes the changes for readers on other hosts that have the older version."""
        return None if self._server is None else self._server.comparing(old, new, size_bytes)

    def serving(self) -> Serving:
        """The address at which this process serves its memory, from now on. Raises OSError if it can't listen."""
        return Serving(self._listening().address, self._bulk.encrypted)

    def _listening(self) -> BulkServer:
        if self._closed:
            raise TransportClosed
        if self._server is None:
            self._server = BulkServer(self._bulk, self.statistics, self._shm.served)
        return self._server

    async def take(self, request: Wanted[TcpSource], lent: LentMemory) -> StateHandle:
        """See ``StateTransport.take``: fetches a state of another node into memory that this process lends."""
        handle, block = request.handle, self._shm.lent(lent)

        def begin() -> tuple[Block, None]:
            if handle.size_bytes > block.capacity:
                place = str(block.directory / block.name)
                raise ArenaSpace(handle.size_bytes, block.capacity, place, handle.key)
            if not block.begin(handle.version, handle.size_bytes):
                raise MemoryInUse(handle.key, handle.version, block.name)
            return block, None

        copy = await self._fetch(request, begin)
        return replace(handle, sources=sources_in(lent, copy))

    async def drop(self, key: str) -> None:
        await self._shm.drop(key)
        self._copies.drop(key)

    # ----------------------------------------------------------------------- reading

    def sources(self, handle: StateHandle) -> tuple[Source, ...]:
        """The sources of a state, with the copy on this host instead of the memory of its owner's host."""
        source = handle.source("tcp")
        if not isinstance(source, TcpSource) or source.node == self._place.node:
            return handle.sources
        copy = self._copies.find(handle)
        if copy is None:
            return handle.sources
        return (*(source for source in handle.sources if source.path != "shm"), copy)

    async def fetch(self, request: Wanted[TcpSource], into: Mapping[str, Any] | None) -> dict[str, Any]:
        if into is not None:
            buckets.destinations(request.handle.key, request.tensors, into)
        copy = await self._copy(request)
        return await self._shm.fetch(Wanted(request.handle, copy, request.tensors), into)

    @asynccontextmanager
    async def view(self, request: Wanted[TcpSource], *, checked: bool) -> AsyncIterator[dict[str, Any]]:
        """See ``ShmPath.view``: of the copy on this host."""
        copy = await self._copy(request)
        async with self._shm.view(Wanted(request.handle, copy, request.tensors), checked=checked) as tensors:
            yield tensors

    async def _copy(self, request: Wanted[TcpSource]) -> ShmSource:
        """The copy on this host. It is fetched first, unless it is there or another process fetches it."""
        while True:
            if self._closed:
                raise TransportClosed
            # The lock comes first: with it, what is not there will not appear.
            lock = self._copies.try_lock(request.handle.key)
            try:
                if (copy := self._copies.find(request.handle)) is not None:
                    return copy
                if lock is not None:
                    begin = functools.partial(self._copies.begin, request.handle, self._workers.share)
                    return await self._fetch(request, begin)
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

    async def _fetch(
        self, request: Wanted[TcpSource], begin: Callable[[], tuple[Block, Block | None]]
    ) -> ShmSource:
        """The source of the state in the block that ``begin`` has begun; its other block is a version to which changes
        can be applied."""
        handle = request.handle
        fetch = Fetch(self._bulk, request.source, handle, request.progress, self.statistics)

        def work(stop: threading.Event) -> ShmSource:
            block, base = begin()
            try:
                fetch.run(block, base, self._workers.share)
                return self._copies.source(block, block.commit())
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

    async def close(self) -> None:
        """To be called before the memory is removed."""
        self._closed = True
        for fetch in self._fetches:
            fetch.abort()
        await self._workers.close()
        if self._server is not None:
            self._server.close()
        self._copies.close()
