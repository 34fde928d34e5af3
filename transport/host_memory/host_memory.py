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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import payload
from ..device_memory.devices import DeviceEvent
from ..device_memory.host_copies import HostCopies
from ..errors import ArenaSpace, CorruptState, ForeignHandle, MemoryInUse, StaleHandle, TransportClosed
from ..handle import LentMemory, PathName, ShmSource, Source, StateHandle, TcpSource
from ..remote.remote import Remote
from ..remote.server import BulkServer
from ..select import Place
from ..tensors.tensor_kind import TensorKind, Tensors
from ..transfers import CopyWorkers, Fill, Memory, Offer, ReadRequest, VersionedMemory
from . import lent_files
from .arena import Arena
from .block import CHUNK_BYTES, Block, file_bytes, populate
from .mapped_block import MappedBlock, Pin


class HostMemory(Memory[Any]):
    """Blocks in ``directory``, the run's directory on tmpfs. ``remote``: copies states of other hosts here; None:
    states are not exchanged with them. ``copies``: from and to devices; None: this process has none.

    One class of more than 300 lines: what it sets, lends and reads are the same mapped blocks, and each of the three
    has to know what the others have mapped.

    ``close`` removes the files of this process; those of a killed process are removed by the next one that opens its
    transport in the directory.
    """

    def __init__(
        self,
        place: Place,
        directory: Path,
        arena: Arena,
        workers: CopyWorkers,
        remote: Remote | None,
        copies: HostCopies | None = None,
    ) -> None:
        self._place = place
        self._directory = directory
        self._arena = arena
        self._workers = workers
        self._remote = remote
        self._copies = copies
        self._door: BulkServer | None = None
        self._written: dict[str, VersionedMemory[MappedBlock]] = {}
        self._mapped: dict[str, MappedBlock] = {}
        self._lent: dict[str, Block] = {}
        self._closed = False

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
        door = self._open_door() if "tcp" in paths else None
        written = self._written.setdefault(key, VersionedMemory())
        async with written.lock:
            if self._closed:
                raise TransportClosed
            layout = written.layout_of(tensors)
            device_copies = self._copies_after(layout.kind, after)
            work = functools.partial(
                self._write_next, key, written, layout, list(tensors.values()), version, device_copies
            )
            source, digest = await self._workers.run(layout.size_bytes, work)
        return _offer_of(source, digest, layout, door, paths)

    async def fill(
        self, key: str, layout: payload.Layout, fill: Fill, *, version: int, paths: Sequence[PathName]
    ) -> Offer:
        door = self._open_door() if "tcp" in paths else None
        written = self._written.setdefault(key, VersionedMemory())
        async with written.lock:
            if self._closed:
                raise TransportClosed
            begin = functools.partial(self._next_block, key, written, layout.size_bytes, version)
            newest = written.published[-1].block if written.published else None
            source, digest = await self._fill_block(begin, layout, fill, self._place.process, newest)
        return _offer_of(source, digest, layout, door, paths)

    async def _fill_block(
        self,
        begin: Callable[[], AbstractContextManager[MappedBlock]],
        layout: payload.Layout,
        fill: Fill,
        owner: str,
        newest: Block | None = None,
    ) -> tuple[ShmSource, int]:
        """Has ``fill`` write the payload of the block that ``begin`` gives, and publishes it."""
        with ExitStack() as stack:
            # Entered by the thread: the result of a cancelled call is lost, and its block would stay locked.
            mapped = await self._workers.run(layout.size_bytes, lambda _stop: stack.enter_context(begin()))
            views = mapped.views(layout.kind, layout.specs)
            await fill({spec.name: view for spec, view in zip(layout.specs, views, strict=True)})
            work = functools.partial(self._publish, mapped, layout, owner, None, newest)
            return await self._workers.run(layout.size_bytes, work)

    def _open_door(self) -> BulkServer:
        """The server that other hosts read from. It listens from the first call on: a process that sets no state for
        them needs no port. Raises OSError if it can't listen."""
        assert self._remote is not None, "without keys, a transport has no path tcp"
        if self._closed:
            raise TransportClosed
        if self._door is None:
            self._door = BulkServer(self._remote.bulk, self._remote.statistics, self.find_block)
        return self._door

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
            copying = self._copying(mapped, layout, sources, device_copies)
            return self._publish(mapped, layout, self._place.process, copying, newest, stop)

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
            self._give_back(outdated.block)

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
                block = self._arena.take(size_bytes, key)
            except ArenaSpace as full:
                raise full.of(key) from full
            if block.begin(version, size_bytes):
                mapped = self._mapped[block.name] = MappedBlock(block)
                return mapped
            # A reader has begun to use it between the look and the lock. No wait for it: it may use it as long as it
            # likes.
            self._arena.give_back(block)

    def _copying(
        self,
        mapped: MappedBlock,
        layout: payload.Layout,
        sources: list[Any],
        device_copies: payload.DeviceCopies | None,
    ) -> payload.Copying:
        views = mapped.views(layout.kind, layout.specs)
        return payload.Copying(layout.kind, views, sources, layout.specs, layout.size_bytes, device_copies)

    def _publish(
        self,
        mapped: MappedBlock,
        layout: payload.Layout,
        owner: str,
        copying: payload.Copying | None,
        newest: Block | None,
        stop: threading.Event,
    ) -> tuple[ShmSource, int]:
        """Writes the payload of a block that was begun by ``copying``, unless it was written in place, and publishes
        it: its source and digest. ``newest``: of the versions of its key."""
        block = mapped.block
        data, table, share = block.payload[: layout.size_bytes], block.table, self._workers.share
        # The changes for readers of other hosts that have the older version: while a chunk is in the cache. When
        # the first reader asks, both versions would have to be read from memory again, and all readers would wait.
        compare = None
        if newest is not None and self._door is not None:
            compare = self._door.compare(newest, block, layout.size_bytes)
        if copying is None:
            digest = payload.seal(layout.specs, data, table, share, stop, compare)
        else:
            digest = payload.put(copying, data, table, share, stop, compare)
        return ShmSource("shm", self._place.node, owner, block.name, block.commit()), digest

    def _give_back(self, block: Block) -> None:
        if mapped := self._mapped.pop(block.name, None):
            mapped.forget()
        self._arena.give_back(block)
        if self._door is not None:
            # After it was revoked: a thread of the door that has found it just before keeps nothing of it any more.
            self._door.forget(block.name)

    async def drop(self, key: str) -> None:
        if self._remote is not None:
            self._remote.drop(key)
        written = self._written.get(key)
        if written is None:
            return
        async with written.lock:
            for mapped in (*written.published, *written.free):
                self._give_back(mapped.block)
            self._written.pop(key, None)

    def find_block(self, name: str) -> tuple[Block, list[Block]]:
        """The block of that name, of any process of this host, for readers on other hosts; and other ones of this
        process, with versions that such a reader may have. Raises StaleHandle, ForeignHandle. May be called by any
        thread."""
        # Lists, as the event loop changes both meanwhile.
        for written in list(self._written.values()):
            blocks = {mapped.block.name: mapped.block for mapped in list(written.published)}
            if block := blocks.pop(name, None):
                return block, list(blocks.values())
        block = self._map(name, name, 0).block
        # All that is lent: other processes set it, so that this one does not know whose versions it has.
        lent = list(self._lent.values())
        return block, [other for other in lent if other.name != name] if name in self._lent else []

    # ----------------------------------------------------------------------- lent memory

    async def lend(self, key: str, size_bytes: int) -> LentMemory:
        """See ``StateTransport.lend``. The memory is reserved by a thread: that takes a while."""

        def work(stop: threading.Event) -> Block:
            (block,) = self._take_blocks(self._arena.take, key, [size_bytes])
            populate(block, self._workers.share)
            return block

        return self._register_lent(await self._workers.run(file_bytes(size_bytes), work))

    def _take_blocks(self, take: Callable[[int, str], Block], key: str, sizes: Sequence[int]) -> list[Block]:
        blocks: list[Block] = []
        try:
            blocks.extend(take(size_bytes, f"lent-{key}") for size_bytes in sizes)
        except BaseException as error:
            for block in blocks:
                self._arena.give_back(block)
            if isinstance(error, ArenaSpace):
                raise error.of(key) from error
            raise
        return blocks

    def _register_lent(self, block: Block) -> LentMemory:
        self._lent[block.name] = block
        self._mapped[block.name] = MappedBlock(block)
        lent = LentMemory(self._place.process, block.name, block.capacity, self._place.node)
        if self._remote is None:
            return lent
        door = self._open_door()
        return replace(lent, address=door.address, encrypted=door.encrypted)

    def is_used(self, lent: LentMemory) -> bool:
        """See ``StateTransport.is_used``."""
        block = self._lent.get(lent.block)
        return block is not None and block.in_use

    async def take(
        self, request: ReadRequest[ShmSource] | ReadRequest[TcpSource], lent: LentMemory
    ) -> StateHandle:
        """See ``StateTransport.take``: copies a state into memory that this process lends."""
        handle, source, block = request.handle, request.source, self._lent[lent.block]

        def begin() -> tuple[Block, None]:
            if handle.size_bytes > block.capacity:
                place = str(block.directory / block.name)
                raise ArenaSpace(handle.size_bytes, block.capacity, place, handle.key)
            if not block.begin(handle.version, handle.size_bytes):
                raise MemoryInUse(handle.key, handle.version, block.name)
            return block, None

        if isinstance(source, ShmSource):
            copy = functools.partial(self._copy_block, handle, source, begin)
            generation = await self._workers.run(handle.size_bytes, copy)
        else:
            assert self._remote is not None, "else there is no path to another node"
            remote = ReadRequest(handle, source, request.tensors, request.progress)
            _, generation = await self._remote.fetch(remote, begin)
        return replace(handle, sources=lent.sources(generation))

    def _copy_block(
        self,
        handle: StateHandle,
        source: ShmSource,
        begin: Callable[[], tuple[Block, None]],
        stop: threading.Event,
    ) -> int:
        """Copies a state of this node as it lies in its block, digests included; returns the copy's generation."""
        original = self._map(source.block, handle.key, handle.version).block
        _check_size(original, handle)
        _check_generation(original, handle, source)
        block, _ = begin()
        size, share = handle.size_bytes, self._workers.share
        try:
            for start in range(0, size, CHUNK_BYTES):
                if stop.is_set():
                    raise TransportClosed
                end = min(start + CHUNK_BYTES, size)
                block.payload[start:end] = original.payload[start:end]
            chunks = -(-size // CHUNK_BYTES)
            block.table[:chunks] = original.table[:chunks]
            _check_generation(original, handle, source)
            _check_table(block, handle)
            payload.check(handle.tensors, block.payload[:size], block.table, share, stop)
            return block.commit()
        except payload.WrongDigest as wrong:
            block.end()
            raise CorruptState(handle.key, handle.version, wrong.expected, wrong.actual) from wrong
        except BaseException:
            block.end()
            raise

    def take_back(self, lent: Sequence[LentMemory]) -> None:
        """Processes that have mapped it keep its memory until they forget it."""
        for piece in lent:
            if block := self._lent.pop(piece.block, None):
                self._give_back(block)

    async def store_away(self, lent: Sequence[LentMemory], file: Path) -> None:
        """See ``StateTransport.store_away``."""
        blocks = [self._lent[piece.block] for piece in lent]
        size_bytes = sum(len(block.memory) for block in blocks)
        await self._workers.run(size_bytes, lambda stop: lent_files.write(blocks, file, stop))
        self.take_back(lent)

    async def bring_back(self, lent: Sequence[LentMemory], file: Path) -> list[LentMemory]:
        """See ``StateTransport.bring_back``."""

        def work(stop: threading.Event) -> list[Block]:
            blocks = self._take_blocks(self._arena.make, file.stem, [piece.size_bytes for piece in lent])
            try:
                lent_files.read(file, blocks, stop)
            except BaseException:
                for block in blocks:
                    self._arena.give_back(block)
                raise
            file.unlink()
            return blocks

        size_bytes = sum(piece.size_bytes for piece in lent)
        return [self._register_lent(block) for block in await self._workers.run(size_bytes, work)]

    def _copies_after(
        self, kind: TensorKind[Any], point: DeviceEvent | None = None
    ) -> payload.DeviceCopies | None:
        """None: nothing of this kind is on a device."""
        if self._copies is None or kind is not payload.torch_kind():
            return None
        return self._copies.after(point)

    async def offer_in(
        self,
        lent: LentMemory,
        key: str,
        tensors: Tensors,
        *,
        version: int,
        after: DeviceEvent | None = None,
    ) -> Offer:
        """As ``offer``, in memory of this process or of another one of this host."""
        if self._closed:
            raise TransportClosed
        # A layout for each Set: lent memory is set by one process now, by another one then, and none keeps its
        # versions.
        layout = payload.Layout.of(tensors)
        begin = self._beginning_of_lent(lent, key, version, layout.size_bytes)
        device_copies = self._copies_after(layout.kind, after)

        def work(stop: threading.Event) -> tuple[ShmSource, int]:
            with begin() as mapped:
                copying = self._copying(mapped, layout, [*tensors.values()], device_copies)
                return self._publish(mapped, layout, lent.process, copying, None, stop)

        source, digest = await self._workers.run(layout.size_bytes, work)
        return Offer(lent.sources(source.generation), layout.specs, layout.size_bytes, digest)

    async def fill_in(
        self, lent: LentMemory, key: str, layout: payload.Layout, fill: Fill, *, version: int
    ) -> Offer:
        """As ``fill``, in memory of this process or of another one of this host."""
        if self._closed:
            raise TransportClosed
        begin = self._beginning_of_lent(lent, key, version, layout.size_bytes)
        source, digest = await self._fill_block(begin, layout, fill, lent.process)
        return Offer(lent.sources(source.generation), layout.specs, layout.size_bytes, digest)

    def _beginning_of_lent(
        self, lent: LentMemory, key: str, version: int, size_bytes: int
    ) -> Callable[[], AbstractContextManager[MappedBlock]]:
        """Raises ArenaSpace."""
        if size_bytes > lent.size_bytes:
            raise ArenaSpace(size_bytes, lent.size_bytes, f"{self._directory / lent.block}", key)
        return functools.partial(self._lent_block, lent, key, version, size_bytes)

    @contextmanager
    def _lent_block(self, lent: LentMemory, key: str, version: int, size_bytes: int) -> Iterator[MappedBlock]:
        """The block, pinned and marked as being written."""
        mapped = self._map(lent.block, key, version)
        if not mapped.block.is_writable:
            block = Block.open(self._directory, lent.block, writable=True)
            # The lender has given the pages to itself: in this process each first touch would still be a fault.
            populate(block, self._workers.share)
            mapped.forget()
            mapped = self._mapped[lent.block] = MappedBlock(block, self._pin)
        if mapped.block.capacity != lent.size_bytes:
            raise ForeignHandle(lent.block, str(self._directory), "it is not as large as it was lent")
        if not mapped.block.begin(version, size_bytes):
            raise MemoryInUse(key, version, lent.block)
        try:
            with mapped.pinned():
                yield mapped
        except BaseException:
            mapped.block.end()
            raise

    # ----------------------------------------------------------------------- reading

    def sources(self, handle: StateHandle) -> tuple[Source, ...]:
        """The sources of a state, with the copy on this host instead of the memory of its owner's host."""
        copy = None if self._remote is None else self._remote.find(handle)
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
        device_copies = None if destination is None else self._copies_after(destination[0])
        work = functools.partial(self._read, local, destination, checked, device_copies)
        return await self._workers.run(request.size_bytes, work)

    async def _bring(
        self, request: ReadRequest[ShmSource] | ReadRequest[TcpSource]
    ) -> tuple[ReadRequest[ShmSource], bool]:
        """The request, for a block of this host; false if its digests need no check, as they were just computed."""
        handle, source = request.handle, request.source
        if isinstance(source, ShmSource):
            return ReadRequest(handle, source, request.tensors, request.progress), True
        assert self._remote is not None, "select.choose refuses tcp without a door"
        remote = ReadRequest(handle, source, request.tensors, request.progress)
        copy = await self._remote.copy_here(remote, self._open_door)
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
        mapped = self._map(source.block, handle.key, handle.version)
        block = mapped.block
        _check_size(block, handle)
        kind, targets = destination or payload.destinations(handle.key, specs, None)
        with ExitStack() as stack:
            if not checked:
                # Without digests only the generation shows a mix of versions, and only if the machine orders its stores
                # as x86-64 does. So no process may write the block meanwhile; if one does already, digests decide.
                held = block.hold()
                checked = held is None
                if held is not None:
                    stack.callback(os.close, held)
            _check_generation(block, handle, source)
            data, table = block.payload[: handle.size_bytes], block.table
            views = mapped.views(kind, specs) if request.is_whole else MappedBlock(block).views(kind, specs)
            copying = payload.Copying(kind, targets, views, specs, handle.size_bytes, device_copies)
            if device_copies is not None and any(map(device_copies.is_on_device, targets)):
                stack.enter_context(mapped.pinned())
            try:
                if checked:
                    _check_table(block, handle)
                payload.fetch(copying, data, table if checked else None, self._workers.share, stop)
            except payload.WrongDigest as wrong:
                # If it was written meanwhile, the digests are those of two versions: it is stale, not corrupt.
                _check_generation(block, handle, source)
                raise CorruptState(handle.key, handle.version, wrong.expected, wrong.actual) from wrong
            # The check before the copy saves a copy that would be in vain; this one makes it count.
            _check_generation(block, handle, source)
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
            block = Block.open_in_use(self._directory, source.block)
        except FileNotFoundError as error:
            raise StaleHandle(handle.key, handle.version, None) from error
        if block is None:  # the next version but one is being written
            raise StaleHandle(
                handle.key, handle.version, self._map(source.block, handle.key, 0).block.version
            )
        _check_size(block, handle)
        _check_generation(block, handle, source)
        try:
            _check_table(block, handle)
            if checked and needs_check:
                data, table, share = block.payload[: handle.size_bytes], block.table, self._workers.share
                work = functools.partial(payload.check, request.tensors, data, table, share)
                await self._workers.run(request.size_bytes, work)
        except payload.WrongDigest as wrong:
            raise CorruptState(handle.key, handle.version, wrong.expected, wrong.actual) from wrong
        views = MappedBlock(block).views(payload.torch_kind(), request.tensors)
        yield {spec.name: view for spec, view in zip(request.tensors, views, strict=True)}

    def _map(self, name: str, key: str, version: int) -> MappedBlock:
        # A mapping stays for the next version but one, which lies in the same block: to map it and to fault its pages
        # in costs much beside the copy.
        mapped = self._mapped.get(name)
        if mapped is not None:
            return mapped
        try:
            mapped = MappedBlock(Block.open(self._directory, name), self._pin)
        except FileNotFoundError as error:
            raise StaleHandle(key, version, None) from error
        # A new block often replaces one that its owner has removed, and whose memory is freed with its last mapping.
        for other in list(self._mapped):  # a list: other copy threads change the dict
            if not (self._directory / other).exists() and (outdated := self._mapped.pop(other, None)):
                outdated.forget()
        self._mapped[name] = mapped
        return mapped

    @property
    def _pin(self) -> Pin | None:
        return None if self._copies is None else self._copies.pin

    async def close(self) -> None:
        """To be called after the workers have ended."""
        self._closed = True
        if self._door is not None:
            self._door.close()
        if self._remote is not None:
            await self._remote.close()
        self._written.clear()
        self._lent.clear()
        for mapped in self._mapped.values():
            mapped.forget()
        self._mapped.clear()


def _offer_of(
    source: ShmSource,
    digest: int,
    layout: payload.Layout,
    door: BulkServer | None,
    paths: Sequence[PathName],
) -> Offer:
    sources = tuple(source if door is None or path == "shm" else door.source(source) for path in paths)
    return Offer(sources, layout.specs, layout.size_bytes, digest)


def _check_size(block: Block, handle: StateHandle) -> None:
    if handle.size_bytes > block.capacity:
        reason = f"a payload of {handle.size_bytes} bytes can't be in a block of {block.capacity}"
        raise ForeignHandle(block.name, str(block.directory), reason)


def _check_table(block: Block, handle: StateHandle) -> None:
    """Raises WrongDigest if the digests of the chunks are not those of the handle."""
    digest = payload.table_digest(block.table, handle.size_bytes)
    if digest != handle.digest:
        raise payload.WrongDigest(handle.digest or 0, digest)


def _check_generation(block: Block, handle: StateHandle, source: ShmSource) -> None:
    if block.generation != source.generation:
        raise StaleHandle(handle.key, handle.version, block.version)
