"""Blocks that a process lends: other processes of its host set states in them, which outlive these processes."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from .. import payload
from ..device_memory.devices import DeviceEvent
from ..device_memory.near_cores import on_side
from ..errors import ArenaSpace, CorruptState, ForeignHandle, MemoryInUse, TransportClosed
from ..handle import LentMemory, ShmSource, StateHandle, TcpSource
from ..tensors.tensor_kind import Tensors
from ..transfers import Fill, Offer, ReadRequest
from . import lent_files
from .block import CHUNK_BYTES, Block, file_bytes, populate
from .host_blocks import HostBlocks, check_generation, check_size, check_table
from .mapped_block import MappedBlock


class LentBlocks:
    """The lender's part: ``lend`` to ``bring_back``; the part of a process that sets a state: ``offer_in`` and
    ``fill_in``."""

    def __init__(self, blocks: HostBlocks) -> None:
        self._blocks, self._workers = blocks, blocks.workers

    async def lend(self, key: str, size_bytes: int, side: int | None) -> LentMemory:
        """See ``StateTransport.lend``. The memory is reserved by a thread: that takes a while."""

        def work(stop: threading.Event) -> Block:
            (block,) = self._take_blocks(self._blocks.arena.take, key, [(size_bytes, side)])
            populate(block, self._workers.share)
            return block

        return self._register_lent(await self._workers.run(file_bytes(size_bytes), work), side)

    def _take_blocks(
        self, take: Callable[[int, str], Block], key: str, pieces: Sequence[tuple[int, int | None]]
    ) -> list[Block]:
        """``pieces``: their bytes and sides."""
        blocks: list[Block] = []
        try:
            for size_bytes, side in pieces:
                # Here, not in ``populate``: the bytes of the file are pages of a side as soon as they are reserved. And
                # the threads that help there must not be started on this side, as they stay where they are.
                with on_side(side):
                    blocks.append(take(size_bytes, f"lent-{key}"))
        except BaseException as error:
            for block in blocks:
                self._blocks.arena.give_back(block)
            if isinstance(error, ArenaSpace):
                raise error.of(key) from error
            raise
        return blocks

    def _register_lent(self, block: Block, side: int | None) -> LentMemory:
        self._blocks.lent[block.name] = block
        self._blocks.add(block)
        place = self._blocks.place
        lent = LentMemory(place.process, block.name, block.capacity, place.node, side=side)
        if self._blocks.remote is None:
            return lent
        door = self._blocks.open_door()
        return replace(lent, address=door.address, encrypted=door.encrypted)

    def is_used(self, lent: LentMemory) -> bool:
        """See ``StateTransport.is_used``."""
        block = self._blocks.lent.get(lent.block)
        return block is not None and block.in_use

    async def take(
        self, request: ReadRequest[ShmSource] | ReadRequest[TcpSource], lent: LentMemory
    ) -> StateHandle:
        """See ``StateTransport.take``: copies a state into memory that this process lends."""
        handle, source, block = request.handle, request.source, self._blocks.lent[lent.block]

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
            assert self._blocks.remote is not None, "else there is no path to another node"
            remote = ReadRequest(handle, source, request.tensors, request.progress)
            _, generation = await self._blocks.remote.fetch(remote, begin)
        return replace(handle, sources=lent.sources(generation))

    def _copy_block(
        self,
        handle: StateHandle,
        source: ShmSource,
        begin: Callable[[], tuple[Block, None]],
        stop: threading.Event,
    ) -> int:
        """Copies a state of this node as it lies in its block, digests included; returns the copy's generation."""
        original = self._blocks.map_block(source.block, handle.key, handle.version).block
        check_size(original, handle)
        check_generation(original, handle, source)
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
            check_generation(original, handle, source)
            check_table(block, handle)
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
            if block := self._blocks.lent.pop(piece.block, None):
                self._blocks.give_back(block)

    async def store_away(self, lent: Sequence[LentMemory], file: Path) -> None:
        """See ``StateTransport.store_away``."""
        blocks = [self._blocks.lent[piece.block] for piece in lent]
        size_bytes = sum(len(block.memory) for block in blocks)
        await self._workers.run(size_bytes, lambda stop: lent_files.write(blocks, file, stop))
        self.take_back(lent)

    async def bring_back(self, lent: Sequence[LentMemory], file: Path) -> list[LentMemory]:
        """See ``StateTransport.bring_back``."""

        def work(stop: threading.Event) -> list[Block]:
            pieces = [(piece.size_bytes, piece.side) for piece in lent]
            blocks = self._take_blocks(self._blocks.arena.make, file.stem, pieces)
            try:
                lent_files.read(file, blocks, stop)
            except BaseException:
                for block in blocks:
                    self._blocks.arena.give_back(block)
                raise
            file.unlink()
            return blocks

        size_bytes = sum(piece.size_bytes for piece in lent)
        blocks = await self._workers.run(size_bytes, work)
        return [self._register_lent(block, piece.side) for block, piece in zip(blocks, lent, strict=True)]

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
        if self._blocks.is_closed:
            raise TransportClosed
        # A layout for each Set: lent memory is set by one process now, by another one then, and none keeps its
        # versions.
        layout = payload.Layout.of(tensors)
        begin = self._beginning_of_lent(lent, key, version, layout.size_bytes)
        device_copies = self._blocks.copies_after(layout.kind, after)

        def work(stop: threading.Event) -> tuple[ShmSource, int]:
            with begin() as mapped:
                copying = self._blocks.copying(mapped, layout, [*tensors.values()], device_copies)
                return self._blocks.publish(mapped, layout, lent.process, copying, None, stop)

        source, digest = await self._workers.run(layout.size_bytes, work)
        return Offer(lent.sources(source.generation), layout.specs, layout.size_bytes, digest)

    async def fill_in(
        self, lent: LentMemory, key: str, layout: payload.Layout, fill: Fill, *, version: int
    ) -> Offer:
        """As ``fill``, in memory of this process or of another one of this host."""
        if self._blocks.is_closed:
            raise TransportClosed
        begin = self._beginning_of_lent(lent, key, version, layout.size_bytes)
        source, digest = await self._blocks.fill_block(begin, layout, fill, lent.process)
        return Offer(lent.sources(source.generation), layout.specs, layout.size_bytes, digest)

    def _beginning_of_lent(
        self, lent: LentMemory, key: str, version: int, size_bytes: int
    ) -> Callable[[], AbstractContextManager[MappedBlock]]:
        """Raises ArenaSpace."""
        if size_bytes > lent.size_bytes:
            raise ArenaSpace(size_bytes, lent.size_bytes, f"{self._blocks.directory / lent.block}", key)
        return functools.partial(self._lent_block, lent, key, version, size_bytes)

    @contextmanager
    def _lent_block(self, lent: LentMemory, key: str, version: int, size_bytes: int) -> Iterator[MappedBlock]:
        """The block, pinned and marked as being written."""
        mapped = self._blocks.map_block(lent.block, key, version)
        if not mapped.block.is_writable:
            block = Block.open(self._blocks.directory, lent.block, writable=True)
            # The lender has given the pages to itself: in this process each first touch would still be a fault.
            populate(block, self._workers.share)
            mapped = self._blocks.replace(mapped, block)
        if mapped.block.capacity != lent.size_bytes:
            raise ForeignHandle(lent.block, str(self._blocks.directory), "it is not as large as it was lent")
        if not mapped.block.begin(version, size_bytes):
            raise MemoryInUse(key, version, lent.block)
        try:
            with mapped.pinned():
                yield mapped
        except BaseException:
            mapped.block.end()
            raise
