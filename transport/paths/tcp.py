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
import os
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ..errors import TransportClosed
from ..handle import ShmSource, Source, StateHandle, TcpSource
from ..network.bulk import Bulk
from ..network.copies import NodeCopies
from ..network.fetch import Fetch
from ..network.server import BulkServer
from ..select import Place
from ..statistics import NetworkStatistics
from ..workers import INLINE_BYTES, CopyWorkers, wait_ended
from . import buckets
from .shm import ShmPath
from .tensor_kind import Tensors
from .transfer_path import Offered, Wanted

# Between two looks if another process has fetched a version.
_POLL_S: Final = 0.005


def of_this_host(offered: Offered) -> Offered:
    """What ``TcpPath.offer`` has set, for readers of the same host."""
    source = offered.source
    assert isinstance(source, TcpSource), "it was offered by tcp"
    return replace(
        offered, source=ShmSource("shm", source.host, source.process, source.block, source.generation)
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
        if self._closed:
            raise TransportClosed
        if self._server is None:
            self._server = BulkServer(self._bulk, self._shm.served, self.statistics)
        server = self._server
        server.stop_ahead()
        offered = await self._shm.offer(key, tensors, version=version)
        source = offered.source
        assert isinstance(source, ShmSource), "shared memory offers its own source"
        block, others = self._shm.served(source.block)
        if others:
            server.compute_ahead(others[-1], block, offered.size_bytes)
        remote = TcpSource(
            "tcp", source.host, source.process, server.address, self._bulk.encrypted, source.block, source.generation
        )  # fmt: skip
        return replace(offered, source=remote)

    async def drop(self, key: str) -> None:
        await self._shm.drop(key)
        self._copies.drop(key)

    # ----------------------------------------------------------------------- reading

    def sources(self, handle: StateHandle) -> tuple[Source, ...]:
        """The sources of a state, with the copy on this host instead of the memory of its owner's host."""
        source = handle.source("tcp")
        if not isinstance(source, TcpSource) or source.host == self._place.host:
            return handle.sources
        copy = self._copies.find(handle)
        if copy is None:
            return handle.sources
        return (*(source for source in handle.sources if source.path != "shm"), copy)

    async def fetch(self, wanted: Wanted[TcpSource], into: Mapping[str, Any] | None) -> dict[str, Any]:
        if into is not None:
            buckets.destinations(wanted.handle.key, wanted.tensors, into)
        copy = await self._copy(wanted)
        return await self._shm.fetch(Wanted(wanted.handle, copy, wanted.tensors), into)

    @asynccontextmanager
    async def view(self, wanted: Wanted[TcpSource], *, checked: bool) -> AsyncIterator[dict[str, Any]]:
        """See ``ShmPath.view``: of the copy on this host."""
        copy = await self._copy(wanted)
        async with self._shm.view(Wanted(wanted.handle, copy, wanted.tensors), checked=checked) as tensors:
            yield tensors

    async def _copy(self, wanted: Wanted[TcpSource]) -> ShmSource:
        """The copy on this host, fetched if there is none and no other process is fetching it."""
        while True:
            if self._closed:
                raise TransportClosed
            # The lock comes first: with it, what is not there will not appear.
            lock = self._copies.try_lock(wanted.handle.key)
            try:
                if (found := self._copies.find(wanted.handle)) is not None:
                    return found
                if lock is not None:
                    return await self._fetched(wanted)
            finally:
                if lock is not None:
                    os.close(lock)
            wanted.progress.words = "another process of this host fetches it"
            await asyncio.sleep(_POLL_S)

    async def _fetched(self, wanted: Wanted[TcpSource]) -> ShmSource:
        handle = wanted.handle
        fetch = Fetch(self._bulk, wanted.source, handle, wanted.progress, self.statistics)

        def work(stop: threading.Event) -> ShmSource:
            block, base = self._copies.begin(handle, self._workers.share)
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
