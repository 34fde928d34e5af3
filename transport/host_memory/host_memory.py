"""Host memory: states in blocks that the processes of a host map (``block.py`` has the rules of reading).

The writer copies its tensors into a block, the reader copies them into its own tensors; neither waits for the other.
A reader may also use the memory in place: then the writer takes another block for the next version.
Tensors may be on any device: they are copied beside its computations, from and to memory that is pinned.

Processes of other hosts read the same blocks through the door of this memory (``remote/server.py``), if it has one;
their states are copied here first (``remote/remote.py``).
"""

import functools
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

from .. import payload
from ..device_memory.devices import DeviceEvent
from ..errors import ArenaSpace, CorruptState, StaleHandle, TransportClosed
from ..handle import PathName, ShmSource, Source, StateHandle, TcpSource
from ..remote.server import BulkServer
from ..tensors.tensor_kind import TensorKind, Tensors
from ..transfers import Fill, Memory, Offer, ReadRequest, VersionedMemory
from .block import Block
from .host_blocks import HostBlocks, check_generation, check_size, check_table
from .mapped_block import MappedBlock


class HostMemory(Memory[Any]):
    """The states that this process sets in ``blocks``, and those that it reads there.

    ``close`` removes the files of this process; those of a killed process are removed by the next one that opens its
    transport in the directory.
    """

    def __init__(self, blocks: HostBlocks) -> None:
        self._blocks, self._workers = blocks, blocks.workers

    # ----------------------------------------------------------------------- writing

    async def offer(
        self,
        key: str,
        tensors: Tensors,
        *,
        version: int,
        paths: Sequence[PathName] = ("shm",),
        after: DeviceEvent | None = None,
    ) -> Offer:
        """``paths``: "shm" for processes of this host, "tcp" for those of other ones: both read the same copy. Raises
        OSError too, if the door can't listen."""
        # Before the copy: a port that can't be opened is an error of the Set, and nothing is published then.
        door = self._blocks.open_door() if "tcp" in paths else None
        written = self._blocks.written.setdefault(key, VersionedMemory())
        async with written.lock:
            if self._blocks.is_closed:
                raise TransportClosed
            layout = written.layout_of(tensors)
            device_copies = self._blocks.copies_after(layout.kind, after)
            work = functools.partial(
                self._write_next, key, written, layout, list(tensors.values()), version, device_copies
            )
            source, digest = await self._workers.run(layout.size_bytes, work)
        return _offer_of(source, digest, layout, door, paths)

    async def fill(
        self, key: str, layout: payload.Layout, fill: Fill, *, version: int, paths: Sequence[PathName]
    ) -> Offer:
        door = self._blocks.open_door() if "tcp" in paths else None
        written = self._blocks.written.setdefault(key, VersionedMemory())
        async with written.lock:
            if self._blocks.is_closed:
                raise TransportClosed
            begin = functools.partial(self._next_block, key, written, layout.size_bytes, version)
            newest = written.published[-1].block if written.published else None
            source, digest = await self._blocks.fill_block(
                begin, layout, fill, self._blocks.place.process, newest
            )
        return _offer_of(source, digest, layout, door, paths)

    def _write_next(
        self,
        key: str,
        written: VersionedMemory[MappedBlock],
        layout: payload.Layout,
        sources: list[Any],
        version: int,
        device_copies: payload.DeviceCopies | None,
        stop: threading.Event,
    ) -> tuple[ShmSource, int]:
        newest = written.published[-1].block if written.published else None
        with self._next_block(key, written, layout.size_bytes, version) as mapped:
            copying = self._blocks.copying(mapped, layout, sources, device_copies)
            return self._blocks.publish(mapped, layout, self._blocks.place.process, copying, newest, stop)

    @contextmanager
    def _next_block(
        self, key: str, written: VersionedMemory[MappedBlock], size_bytes: int, version: int
    ) -> Iterator[MappedBlock]:
        """A block of the key that is marked as being written. At the end it has the newest version; after an error
        nothing was published."""
        mapped = self._begin_block(key, written, size_bytes, version)
        try:
            yield mapped
        except BaseException:
            mapped.block.end()
            written.failed(mapped)
            raise
        for outdated in written.publish(mapped):
            self._blocks.give_back(outdated.block)

    def _begin_block(
        self, key: str, written: VersionedMemory[MappedBlock], size_bytes: int, version: int
    ) -> MappedBlock:
        """A block of the key, in none of its lists, that is marked as being written."""
        for mapped in written.candidates():
            if mapped.block.capacity >= size_bytes and mapped.block.begin(version, size_bytes):
                written.take(mapped)
                return mapped
        while True:
            try:
                block = self._blocks.arena.take(size_bytes, key)
            except ArenaSpace as full:
                raise full.of(key) from full
            if block.begin(version, size_bytes):
                return self._blocks.add(block)
            # A reader has begun to use it between the look and the lock. No wait for it: it may use it as long as it
            # likes.
            self._blocks.arena.give_back(block)

    async def drop(self, key: str) -> None:
        if self._blocks.remote is not None:
            self._blocks.remote.drop(key)
        written = self._blocks.written.get(key)
        if written is None:
            return
        async with written.lock:
            for mapped in (*written.published, *written.free):
                self._blocks.give_back(mapped.block)
            self._blocks.written.pop(key, None)

    # ----------------------------------------------------------------------- reading

    def sources(self, handle: StateHandle) -> tuple[Source, ...]:
        """The sources of a state, with the copy on this host instead of the memory of its owner's host."""
        copy = None if self._blocks.remote is None else self._blocks.remote.find(handle)
        if copy is None:
            return handle.sources
        return (*(source for source in handle.sources if source.path != "shm"), copy)

    async def fetch(
        self, request: ReadRequest[ShmSource] | ReadRequest[TcpSource], into: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """A state of another host is copied to this one first, unless a copy is there."""
        destination = None
        if into is not None:  # compared before the first byte crosses the network
            destination = payload.destinations(request.handle.key, request.tensors, into)
        local, checked = await self._bring(request)
        device_copies = None if destination is None else self._blocks.copies_after(destination[0])
        work = functools.partial(self._read, local, destination, checked, device_copies)
        return await self._workers.run(request.size_bytes, work)

    async def _bring(
        self, request: ReadRequest[ShmSource] | ReadRequest[TcpSource]
    ) -> tuple[ReadRequest[ShmSource], bool]:
        """The request, for a block of this host; false if its digests need no check, as they were just computed."""
        handle, source = request.handle, request.source
        if isinstance(source, ShmSource):
            return ReadRequest(handle, source, request.tensors, request.progress), True
        assert self._blocks.remote is not None, "select.choose refuses tcp without a door"
        remote = ReadRequest(handle, source, request.tensors, request.progress)
        copy = await self._blocks.remote.copy_here(remote, self._blocks.open_door)
        return ReadRequest(handle, copy.source, request.tensors, request.progress), not copy.is_verified

    def _read(
        self,
        request: ReadRequest[ShmSource],
        destination: tuple[TensorKind[Any], list[Any]] | None,
        checked: bool,
        device_copies: payload.DeviceCopies | None,
        stop: threading.Event,
    ) -> dict[str, Any]:
        handle, source, specs = request.handle, request.source, request.tensors
        mapped = self._blocks.map_block(source.block, handle.key, handle.version)
        block = mapped.block
        check_size(block, handle)
        kind, targets = destination or payload.destinations(handle.key, specs, None)
        with ExitStack() as stack:
            if not checked:
                # Without digests only the generation shows a mix of versions, and only if the machine orders its stores
                # as x86-64 does. So no process may write the block meanwhile; if one does already, digests decide.
                held = block.hold()
                checked = held is None
                if held is not None:
                    stack.callback(os.close, held)
            check_generation(block, handle, source)
            data, table = block.payload[: handle.size_bytes], block.table
            views = mapped.views(kind, specs) if request.is_whole else MappedBlock(block).views(kind, specs)
            copying = payload.Copying(kind, targets, views, specs, handle.size_bytes, device_copies)
            if device_copies is not None and any(map(device_copies.is_on_device, targets)):
                stack.enter_context(mapped.pinned())
            try:
                if checked:
                    check_table(block, handle)
                payload.fetch(copying, data, table if checked else None, self._workers.share, stop)
            except payload.WrongDigest as wrong:
                # If it was written meanwhile, the digests are those of two versions: it is stale, not corrupt.
                check_generation(block, handle, source)
                raise CorruptState(handle.key, handle.version, wrong.expected, wrong.actual) from wrong
            # The check before the copy saves a copy that would be in vain; this one makes it count.
            check_generation(block, handle, source)
        return {spec.name: target for spec, target in zip(specs, targets, strict=True)}

    @asynccontextmanager
    async def view(
        self, request: ReadRequest[ShmSource] | ReadRequest[TcpSource], *, checked: bool
    ) -> AsyncIterator[dict[str, Any]]:
        """Views of the shared memory, which stays as it is as long as one of them exists. The digests of the chunks
        are compared with the handle's in any case."""
        local, needs_check = await self._bring(request)
        handle, source = local.handle, local.source
        # A mapping of its own, not the one that copies share: it has the lock against the writer, which must last as
        # long as a tensor in it, and end with the last.
        try:
            block = Block.open_in_use(self._blocks.directory, source.block)
        except FileNotFoundError as error:
            raise StaleHandle(handle.key, handle.version, None) from error
        if block is None:  # the next version but one is being written
            raise StaleHandle(
                handle.key, handle.version, self._blocks.map_block(source.block, handle.key, 0).block.version
            )
        check_size(block, handle)
        check_generation(block, handle, source)
        try:
            check_table(block, handle)
            if checked and needs_check:
                data, table, share = block.payload[: handle.size_bytes], block.table, self._workers.share
                work = functools.partial(payload.check, request.tensors, data, table, share)
                await self._workers.run(request.size_bytes, work)
        except payload.WrongDigest as wrong:
            raise CorruptState(handle.key, handle.version, wrong.expected, wrong.actual) from wrong
        views = MappedBlock(block).views(payload.torch_kind(), request.tensors)
        yield {spec.name: view for spec, view in zip(request.tensors, views, strict=True)}

    async def close(self) -> None:
        """To be called after the workers have ended."""
        await self._blocks.close()


def _offer_of(
    source: ShmSource,
    digest: int,
    layout: payload.Layout,
    door: BulkServer | None,
    paths: Sequence[PathName],
) -> Offer:
    sources = tuple(source if door is None or path == "shm" else door.source(source) for path in paths)
    return Offer(sources, layout.specs, layout.size_bytes, digest)
