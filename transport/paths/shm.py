"""Between processes of one host: memory-mapped blocks (``block.py`` has the rules of reading).

The writer copies its tensors into a block, the reader copies them into its own tensors; neither waits for the other.
A reader may also use the memory in place: then the writer takes another block for the next version.
Tensors may be on any device: the block stages them.
"""

import functools
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import lent_files
from ..arena import Arena, populate
from ..block import Block, file_bytes
from ..errors import (
    ArenaSpace,
    CorruptState,
    ForeignHandle,
    MemoryInUse,
    StaleHandle,
    TransportClosed,
)
from ..handle import LentMemory, ShmSource, StateHandle, TensorSpec
from ..select import Place
from ..workers import CopyWorkers
from . import buckets
from .kinds import torch_kind
from .tensor_kind import T, TensorKind, Tensors
from .transfer_path import Offered, Wanted
from .versioned_memory import VersionedMemory


class _Mapped:
    """A block with tensors as views of its bytes. The views are made once per layout."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self._views: tuple[TensorKind[Any], Sequence[TensorSpec], list[Any]] | None = None

    def views(self, kind: TensorKind[T], specs: Sequence[TensorSpec]) -> list[T]:
        entry = self._views
        if entry is None or entry[0] is not kind or (entry[1] is not specs and entry[1] != specs):
            flat = kind.flat(self.block.memory)
            entry = self._views = kind, specs, buckets.bucket_views(kind, flat, Block.START, specs)
        return entry[2]


@dataclass(frozen=True, slots=True)
class Serving:
    """``address``: at which this process serves its memory to other nodes; None: it does not."""

    address: str | None
    encrypted: bool = True


Compared = Callable[[Block, Block, int], Callable[[int], None] | None]
"""Called with the newest version of a key, the block that a Set is about to write, and its bytes. Returns a function to
call with the first byte of each chunk once it is written; None: there is none to call."""


class ShmPath:
    """Blocks in ``directory``, the run's directory on tmpfs.

    ``close`` removes the files of this process; those of a killed process are removed by the next one that opens its
    transport in the directory.
    """

    def __init__(self, place: Place, directory: Path, arena: Arena, workers: CopyWorkers) -> None:
        self._place = place
        self._directory = directory
        self._arena = arena
        self._workers = workers
        self._written: dict[str, VersionedMemory[_Mapped]] = {}
        self._mapped: dict[str, _Mapped] = {}
        self._lent: dict[str, Block] = {}
        self.serving: Callable[[], Serving] = lambda: Serving(None)
        """Serves lent memory from the call on."""
        self.compared: Compared = lambda old, new, size_bytes: None
        self._closed = False

    # ----------------------------------------------------------------------- writing

    async def offer(self, key: str, tensors: Tensors, *, version: int) -> Offered:
        written = self._written.setdefault(key, VersionedMemory())
        async with written.lock:
            if self._closed:
                raise TransportClosed
            layout = written.layout_of(tensors)
            work = functools.partial(self._write_next, key, written, layout, list(tensors.values()), version)
            return await self._workers.run(layout.size_bytes, work)

    def _write_next(
        self,
        key: str,
        written: VersionedMemory[_Mapped],
        layout: buckets.Layout,
        sources: list[Any],
        version: int,
        stop: threading.Event,
    ) -> Offered:
        mapped = self._begin_block(key, written, layout.size_bytes, version)
        try:
            newest = written.published[-1].block if written.published else None
            offered = self._write(mapped, layout, sources, self._place.process, stop, newest)
        except BaseException:
            written.failed(mapped)
            raise
        for outdated in written.publish(mapped):
            self._give_back(outdated.block)
        return offered

    def _begin_block(
        self, key: str, written: VersionedMemory[_Mapped], size_bytes: int, version: int
    ) -> _Mapped:
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
                mapped = self._mapped[block.name] = _Mapped(block)
                return mapped
            self._arena.give_back(block)  # a reader has begun to use it meanwhile

    def _write(
        self,
        mapped: _Mapped,
        layout: buckets.Layout,
        sources: list[Any],
        owner: str,
        stop: threading.Event,
        newest: Block | None = None,
    ) -> Offered:
        """Writes the bucket of a block that was begun, and publishes it. ``newest``: of the versions of its key."""
        block = mapped.block
        try:
            bucket = block.bucket[: layout.size_bytes]
            views = mapped.views(layout.kind, layout.specs)
            copying = buckets.Copying(layout.kind, views, sources, layout.specs, layout.size_bytes)
            compare = None if newest is None else self.compared(newest, block, layout.size_bytes)
            digest = buckets.put(copying, bucket, block.table, self._workers.share, stop, compare)
        except BaseException:
            block.end()
            raise
        source = ShmSource("shm", self._place.node, owner, block.name, block.commit())
        return Offered(source, layout.specs, layout.size_bytes, digest)

    def _give_back(self, block: Block) -> None:
        self._mapped.pop(block.name, None)
        self._arena.give_back(block)

    async def drop(self, key: str) -> None:
        written = self._written.get(key)
        if written is None:
            return
        async with written.lock:
            for mapped in (*written.published, *written.free):
                self._give_back(mapped.block)
            self._written.pop(key, None)

    def served(self, name: str) -> tuple[Block, list[Block]]:
        """The block of that name, of any process of this host, for readers on other hosts; and the other ones that this
        process has published of its key. Raises StaleHandle, ForeignHandle. May be called by any thread."""
        for written in list(self._written.values()):
            blocks = {mapped.block.name: mapped.block for mapped in list(written.published)}
            if block := blocks.pop(name, None):
                return block, list(blocks.values())
        return self._map(name, name, 0).block, []

    # ----------------------------------------------------------------------- lent memory

    async def lend(self, key: str, size_bytes: int) -> tuple[LentMemory, LentMemory]:
        """See ``StateTransport.lend``. The memory is reserved by a thread: that takes a while."""

        def work(stop: threading.Event) -> list[Block]:
            blocks = self._take_blocks(self._arena.take, key, [size_bytes] * 2)
            for block in blocks:
                populate(block, self._workers.share)
            return blocks

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

    def _register_lent(self, blocks: Sequence[Block]) -> tuple[LentMemory, LentMemory]:
        for block in blocks:
            self._lent[block.name] = block
            self._mapped[block.name] = _Mapped(block)
        place, served = self._place, self.serving()
        first, second = (
            LentMemory(
                place.process, block.name, block.capacity, place.node, served.address, served.encrypted
            )
            for block in blocks
        )
        return first, second

    def lent(self, memory: LentMemory) -> Block:
        """The block of memory that this process lends."""
        return self._lent[memory.block]

    def take_back(self, pair: Sequence[LentMemory]) -> None:
        """Processes that have mapped it keep its memory until they forget it."""
        for lent in pair:
            if block := self._lent.pop(lent.block, None):
                self._give_back(block)

    async def store_away(self, pair: Sequence[LentMemory], used: Sequence[LentMemory], file: Path) -> None:
        """See ``StateTransport.store_away``."""
        blocks = [self._lent[lent.block] for lent in used]
        size_bytes = sum(len(block.memory) for block in blocks)
        await self._workers.run(size_bytes, lambda stop: lent_files.write(blocks, file, stop))
        self.take_back(pair)

    async def bring_back(
        self, pair: Sequence[LentMemory], used: Sequence[LentMemory], file: Path
    ) -> tuple[LentMemory, LentMemory]:
        """See ``StateTransport.bring_back``."""

        def work(stop: threading.Event) -> list[Block]:
            blocks = self._take_blocks(self._arena.make, file.stem, [lent.size_bytes for lent in pair])
            again = [block for block, lent in zip(blocks, pair, strict=True) if lent in used]
            try:
                lent_files.read(file, again, stop)
            except BaseException:
                for block in blocks:
                    self._arena.give_back(block)
                raise
            file.unlink()
            return blocks

        size_bytes = sum(lent.size_bytes for lent in pair)
        return self._register_lent(await self._workers.run(size_bytes, work))

    async def offer_in(self, lent: LentMemory, key: str, tensors: Tensors, *, version: int) -> Offered:
        """As ``offer``, in memory of this process or of another one of this host."""
        if self._closed:
            raise TransportClosed
        layout = buckets.Layout.of(tensors)
        if layout.size_bytes > lent.size_bytes:
            raise ArenaSpace(layout.size_bytes, lent.size_bytes, f"{self._directory / lent.block}", key)
        work = functools.partial(self._write_lent, lent, key, layout, list(tensors.values()), version)
        return await self._workers.run(layout.size_bytes, work)

    def _write_lent(
        self,
        lent: LentMemory,
        key: str,
        layout: buckets.Layout,
        sources: list[Any],
        version: int,
        stop: threading.Event,
    ) -> Offered:
        mapped = self._map(lent.block, key, version)
        if not mapped.block.is_writable:
            block = Block.open(self._directory, lent.block, writable=True)
            populate(block, self._workers.share)
            mapped = self._mapped[lent.block] = _Mapped(block)
        if mapped.block.capacity != lent.size_bytes:
            raise ForeignHandle(lent.block, str(self._directory), "it is not as large as it was lent")
        if not mapped.block.begin(version, layout.size_bytes):
            raise MemoryInUse(key, version, lent.block)
        return self._write(mapped, layout, sources, lent.process, stop)

    # ----------------------------------------------------------------------- reading

    async def fetch(self, request: Wanted[ShmSource], into: Mapping[str, Any] | None) -> dict[str, Any]:
        work = functools.partial(self._read, request, into)
        return await self._workers.run(request.size_bytes, work)

    def _read(
        self, request: Wanted[ShmSource], into: Mapping[str, Any] | None, stop: threading.Event
    ) -> dict[str, Any]:
        handle, source, specs = request.handle, request.source, request.tensors
        mapped = self._map(source.block, handle.key, handle.version)
        block = mapped.block
        _check_size(block, handle)
        kind, targets = buckets.destinations(handle.key, specs, into)
        _check_generation(block, handle, source)
        bucket, table = block.bucket[: handle.size_bytes], block.table
        views = mapped.views(kind, specs) if request.is_whole else _Mapped(block).views(kind, specs)
        copying = buckets.Copying(kind, targets, views, specs, handle.size_bytes)
        try:
            _check_table(block, handle)
            buckets.fetch(copying, bucket, table, self._workers.share, stop)
        except buckets.WrongDigest as wrong:
            _check_generation(block, handle, source)
            raise CorruptState(handle.key, handle.version, wrong.expected, wrong.actual) from wrong
        _check_generation(block, handle, source)
        return {spec.name: target for spec, target in zip(specs, targets, strict=True)}

    @asynccontextmanager
    async def view(self, request: Wanted[ShmSource], *, checked: bool) -> AsyncIterator[dict[str, Any]]:
        """Views of the shared memory, which stays as it is as long as one of them exists. The digests of the chunks
        are compared with the handle's in any case."""
        handle, source = request.handle, request.source
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
            if checked:
                bucket, table, share = block.bucket[: handle.size_bytes], block.table, self._workers.share
                work = functools.partial(buckets.check, request.tensors, bucket, table, share)
                await self._workers.run(request.size_bytes, work)
        except buckets.WrongDigest as wrong:
            raise CorruptState(handle.key, handle.version, wrong.expected, wrong.actual) from wrong
        views = _Mapped(block).views(torch_kind(), request.tensors)
        yield {spec.name: view for spec, view in zip(request.tensors, views, strict=True)}

    def _map(self, name: str, key: str, version: int) -> _Mapped:
        mapped = self._mapped.get(name)
        if mapped is not None:
            return mapped
        try:
            mapped = _Mapped(Block.open(self._directory, name))
        except FileNotFoundError as error:
            raise StaleHandle(key, version, None) from error
        # A new block often replaces one that its owner has removed, and whose memory is freed with its last mapping.
        for other in list(self._mapped):  # a list: other copy threads change the dict
            if not (self._directory / other).exists():
                self._mapped.pop(other, None)
        self._mapped[name] = mapped
        return mapped

    async def close(self) -> None:
        """To be called after the workers have ended."""
        self._closed = True
        self._written.clear()
        self._lent.clear()
        self._mapped.clear()


def _check_size(block: Block, handle: StateHandle) -> None:
    if handle.size_bytes > block.capacity:
        reason = f"a bucket of {handle.size_bytes} bytes can't be in a block of {block.capacity}"
        raise ForeignHandle(block.name, str(block.directory), reason)


def _check_table(block: Block, handle: StateHandle) -> None:
    """Raises WrongDigest if the digests of the chunks are not those of the handle."""
    digest = buckets.table_digest(block.table, handle.size_bytes)
    if digest != handle.digest:
        raise buckets.WrongDigest(handle.digest or 0, digest)


def _check_generation(block: Block, handle: StateHandle, source: ShmSource) -> None:
    if block.generation != source.generation:
        raise StaleHandle(handle.key, handle.version, block.version)
