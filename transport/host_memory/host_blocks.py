"""The blocks of host memory that a process maps: those that it sets, those that it lends, and those that it reads.

They are written and published here, and other hosts read them through one door.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from .. import payload
from ..device_memory.devices import DeviceEvent
from ..device_memory.host_copies import HostCopies
from ..errors import ForeignHandle, StaleHandle, TransportClosed
from ..handle import ShmSource, StateHandle
from ..remote.remote import Remote
from ..remote.server import BulkServer
from ..select import Place
from ..tensors.tensor_kind import TensorKind
from ..transfers import CopyWorkers, Fill, VersionedMemory
from .arena import Arena
from .block import Block
from .mapped_block import MappedBlock, Pin


class HostBlocks:
    """Blocks in ``directory``, the run's directory on tmpfs. ``remote``: copies states of other hosts here; None:
    states are not exchanged with them. ``copies``: from and to devices; None: this process has none.

    ``written``: those that this process sets, by key. ``lent``: those that it lends, by name.
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
        self.place, self.directory = place, directory
        self.arena, self.workers, self.remote = arena, workers, remote
        self.written: dict[str, VersionedMemory[MappedBlock]] = {}
        self.lent: dict[str, Block] = {}
        self.is_closed = False
        self._copies = copies
        self._door: BulkServer | None = None
        self._mapped: dict[str, MappedBlock] = {}

    # ----------------------------------------------------------------------- other hosts

    def open_door(self) -> BulkServer:
        """The server that other hosts read from. It listens from the first call on: a process that sets no state for
        them needs no port. Raises OSError if it can't listen."""
        assert self.remote is not None, "without keys, a transport has no path tcp"
        if self.is_closed:
            raise TransportClosed
        if self._door is None:
            self._door = BulkServer(self.remote.bulk, self.remote.statistics, self.find_block)
        return self._door

    def find_block(self, name: str) -> tuple[Block, list[Block]]:
        """The block of that name, of any process of this host, for readers on other hosts; and other ones of this
        process, with versions that such a reader may have. Raises StaleHandle, ForeignHandle. May be called by any
        thread."""
        # Lists, as the event loop changes both meanwhile.
        for written in list(self.written.values()):
            blocks = {mapped.block.name: mapped.block for mapped in list(written.published)}
            if block := blocks.pop(name, None):
                return block, list(blocks.values())
        block = self.map_block(name, name, 0).block
        # All that is lent: other processes set it, so that this one does not know whose versions it has.
        lent = list(self.lent.values())
        return block, [other for other in lent if other.name != name] if name in self.lent else []

    # ----------------------------------------------------------------------- mapping

    def map_block(self, name: str, key: str, version: int) -> MappedBlock:
        """The block of that name, of any process of this host. ``key``, ``version``: what the reader looks for in it,
        for the error. Raises StaleHandle, ForeignHandle. May be called by several threads."""
        # A mapping stays for the next version but one, which lies in the same block: to map it and to fault its pages
        # in costs much beside the copy.
        mapped = self._mapped.get(name)
        if mapped is not None:
            return mapped
        try:
            mapped = MappedBlock(Block.open(self.directory, name), self._pin)
        except FileNotFoundError as error:
            raise StaleHandle(key, version, None) from error
        # A new block often replaces one that its owner has removed, and whose memory is freed with its last mapping.
        for other in list(self._mapped):  # a list: other copy threads change the dict
            if not (self.directory / other).exists() and (outdated := self._mapped.pop(other, None)):
                outdated.forget()
        self._mapped[name] = mapped
        return mapped

    def add(self, block: Block) -> MappedBlock:
        """Maps a block of the arena."""
        mapped = self._mapped[block.name] = MappedBlock(block)
        return mapped

    def replace(self, mapped: MappedBlock, block: Block) -> MappedBlock:
        """Maps the same block of another process as ``block`` from now on."""
        mapped.forget()
        mapped = self._mapped[block.name] = MappedBlock(block, self._pin)
        return mapped

    def give_back(self, block: Block) -> None:
        """Returns a block of the arena to it; no reader finds it any more."""
        if mapped := self._mapped.pop(block.name, None):
            mapped.forget()
        self.arena.give_back(block)
        if self._door is not None:
            # After it was revoked: a thread of the door that has found it just before keeps nothing of it any more.
            self._door.forget(block.name)

    @property
    def _pin(self) -> Pin | None:
        return None if self._copies is None else self._copies.pin

    async def close(self) -> None:
        """Forgets all of them, and closes the door. To be called after the workers have ended."""
        self.is_closed = True
        if self._door is not None:
            self._door.close()
        if self.remote is not None:
            await self.remote.close()
        self.written.clear()
        self.lent.clear()
        for mapped in self._mapped.values():
            mapped.forget()
        self._mapped.clear()

    # ----------------------------------------------------------------------- writing

    def copies_after(
        self, kind: TensorKind[Any], point: DeviceEvent | None = None
    ) -> payload.DeviceCopies | None:
        """Copies from and to devices after ``point``; None: nothing of this kind is on a device."""
        if self._copies is None or kind is not payload.torch_kind():
            return None
        return self._copies.after(point)

    def copying(
        self,
        mapped: MappedBlock,
        layout: payload.Layout,
        sources: list[Any],
        device_copies: payload.DeviceCopies | None,
    ) -> payload.Copying:
        """The copy of ``sources`` into a block, for ``publish``."""
        views = mapped.views(layout.kind, layout.specs)
        return payload.Copying(layout.kind, views, sources, layout.specs, layout.size_bytes, device_copies)

    def publish(
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
        data, table, share = block.payload[: layout.size_bytes], block.table, self.workers.share
        # The changes for readers of other hosts that have the older version: while a chunk is in the cache. When
        # the first reader asks, both versions would have to be read from memory again, and all readers would wait.
        compare = None
        if newest is not None and self._door is not None:
            compare = self._door.compare(newest, block, layout.size_bytes)
        if copying is None:
            digest = payload.seal(layout.specs, data, table, share, stop, compare)
        else:
            digest = payload.put(copying, data, table, share, stop, compare)
        return ShmSource("shm", self.place.node, owner, block.name, block.commit()), digest

    async def fill_block(
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
            mapped = await self.workers.run(layout.size_bytes, lambda _stop: stack.enter_context(begin()))
            views = mapped.views(layout.kind, layout.specs)
            await fill({spec.name: view for spec, view in zip(layout.specs, views, strict=True)})
            work = functools.partial(self.publish, mapped, layout, owner, None, newest)
            return await self.workers.run(layout.size_bytes, work)


def check_size(block: Block, handle: StateHandle) -> None:
    """Raises ForeignHandle if the state can't be in the block."""
    if handle.size_bytes > block.capacity:
        reason = f"a payload of {handle.size_bytes} bytes can't be in a block of {block.capacity}"
        raise ForeignHandle(block.name, str(block.directory), reason)


def check_table(block: Block, handle: StateHandle) -> None:
    """Raises WrongDigest if the digests of the chunks are not those of the handle."""
    digest = payload.table_digest(block.table, handle.size_bytes)
    if digest != handle.digest:
        raise payload.WrongDigest(handle.digest or 0, digest)


def check_generation(block: Block, handle: StateHandle, source: ShmSource) -> None:
    """Raises StaleHandle if the block has another version now."""
    if block.generation != source.generation:
        raise StaleHandle(handle.key, handle.version, block.version)
