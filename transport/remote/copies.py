"""The copies of other hosts' states on this host: fetched by one process, read by all through shared memory.

There is a lock per key, held by the process that fetches: the others wait for it, and then find the copy. A key has
two blocks as a rule. The newest version stays while the next one is written to another block, so that a fetch that
fails, or is killed, leaves it whole. A block goes with the process that made it.
"""

import itertools
import os
from pathlib import Path
from typing import Final

import xxhash

from ..errors import ForeignHandle
from ..handle import ShmSource, StateHandle
from ..host_memory.arena import Share, populate
from ..host_memory.block import Block
from ..host_memory.locks import is_locked, try_lock
from ..payload import table_digest
from ..select import Place

LOCK_FILE: Final = "copies.lock"


class NodeCopies:
    """In ``directory``, the run's directory on tmpfs of this host."""

    def __init__(self, directory: Path, place: Place) -> None:
        self._directory = directory
        self._place = place
        self._by_name: dict[str, Block] = {}
        self._new_blocks: dict[str, Block] = {}
        self._numbers = itertools.count()
        self._watching: int | None = None
        self._populated: set[str] = set()

    def find(self, handle: StateHandle) -> ShmSource | None:
        """The source of the copy of that version on this host, if there is one."""
        for block in self._whole(handle.key):
            if (
                block.version == handle.version
                and block.size_bytes == handle.size_bytes
                and table_digest(block.table, handle.size_bytes) == handle.digest
            ):
                return self.source(block, block.generation)
        return None

    def source(self, block: Block, generation: int) -> ShmSource:
        return ShmSource("shm", self._place.node, self._place.process, block.name, generation)

    def try_lock(self, key: str) -> int | None:
        """A descriptor that has the lock of ``key`` until it is closed; None if another one has it."""
        descriptor = self._opened_lock_file()
        if try_lock(descriptor, _lock_of(key), exclusive=True):
            return descriptor
        os.close(descriptor)
        return None

    def is_locked(self, key: str) -> bool:
        """True if another one has the lock of ``key``. One system call: cheap enough to be asked often by those that
        wait, while the cores are busy with what they wait for."""
        if self._watching is None:
            self._watching = self._opened_lock_file()
        return is_locked(self._watching, _lock_of(key))

    def _opened_lock_file(self) -> int:
        path = self._directory / LOCK_FILE
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def begin(self, handle: StateHandle, share: Share) -> tuple[Block, Block | None]:
        """A block for the version, which is marked as being written, and the newest version that changes can be applied
        to, if there is one. To be called with the lock of the key. Raises ArenaSpace."""
        newest = max(self._whole(handle.key), key=lambda block: block.version, default=None)
        base = newest if newest is not None and newest.size_bytes == handle.size_bytes else None
        for block in self._blocks(handle.key):
            if block is newest or block.in_use:
                continue
            if handle.size_bytes <= block.capacity and block.begin(handle.version, handle.size_bytes):
                self._populate(block, share)
                return block, base
            block.unlink()
        return self._new(handle, share), base

    def _new(self, handle: StateHandle, share: Share) -> Block:
        name = f"copy-{_number(handle.key):016x}-{self._place.process}-{next(self._numbers)}.arena"
        block = Block.create(self._directory, name, handle.size_bytes)
        self._new_blocks[name] = self._by_name[name] = block
        block.begin(handle.version, handle.size_bytes)
        self._populate(block, share)
        return block

    def _populate(self, block: Block, share: Share) -> None:
        """Gives the pages to this process, once for each block: also one that another process has made and filled. Each
        page that is first touched while bytes arrive would cost much more."""
        if block.name in self._populated:
            return
        try:
            populate(block, share)
        except BaseException:
            block.end()
            raise
        self._populated.add(block.name)

    def drop(self, key: str) -> None:
        """Removes the copies of ``key``."""
        for block in self._blocks(key):
            block.unlink()

    def close(self) -> None:
        """Removes the copies that this process has made."""
        for block in self._new_blocks.values():
            block.unlink()
            block.close()
        self._new_blocks.clear()
        self._by_name.clear()
        if self._watching is not None:
            os.close(self._watching)
            self._watching = None

    def _whole(self, key: str) -> list[Block]:
        return [block for block in self._blocks(key) if block.generation and block.generation % 2 == 0]

    def _blocks(self, key: str) -> list[Block]:
        """Those that exist, of any process."""
        names = {path.name for path in self._directory.glob(f"copy-{_number(key):016x}-*.arena")}
        for name in [name for name, block in list(self._by_name.items()) if not block.is_linked]:
            self._by_name.pop(name, None)
            self._populated.discard(name)
        for name in names - self._by_name.keys():
            try:
                self._by_name[name] = Block.open(self._directory, name, writable=True)
            except (FileNotFoundError, ForeignHandle):  # removed, or made, at this moment
                continue
        return [self._by_name[name] for name in sorted(names & self._by_name.keys())]


def _lock_of(key: str) -> int:
    return _number(key) >> 2  # a position in a file has 63 bits


def _number(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode())
