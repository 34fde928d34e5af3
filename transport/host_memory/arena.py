"""The host memory of one process for states: blocks (``block.py``) that are made once and used again."""

import contextlib
import itertools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ..errors import ArenaSpace
from .block import Block, Share, file_bytes, populate, remove_abandoned

# A spare block this many times as large as needed is left for larger states: with a small one in it, the next large one
# would wait for new pages, which the reserving was to prevent.
_MOST_WASTE: Final = 1.25


class Arena:
    """Blocks in ``directory``, for one process. All methods may be called by several threads.

    Memory that is ``reserved`` and not used stays with the process, as spare blocks, its pages in place: a state that
    takes one waits for no page. All other memory is given back when its state goes.

    ``pin``: called once with the address and size of each new block, for memory that devices copy from and to; returns
    the function that undoes it.
    """

    def __init__(
        self, directory: Path, process: str, pin: Callable[[int, int], Callable[[], None]] | None = None
    ) -> None:
        self._directory = directory
        self._process = process
        self._pin = pin
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._blocks: dict[str, Block] = {}
        self._unpin: dict[str, Callable[[], None]] = {}
        self._spare: list[Block] = []
        self._reserved_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks, spare ones included."""
        with self._lock:
            return sum(len(block.memory) for block in self._blocks.values())

    @property
    def spare_bytes(self) -> int:
        """Bytes of the blocks that hold no state."""
        with self._lock:
            return sum(len(block.memory) for block in self._spare)

    def take(self, size_bytes: int, label: str = "") -> Block:
        """A block for ``size_bytes``: the best fitting spare one, or a new one, named after ``label``.

        Raises ArenaSpace.
        """
        # Not one large file with an allocator inside: a file of its own is given back to the system by one unlink while
        # readers keep their mapping of it, and its lock is that of one state.
        with self._lock:
            fitting = [block for block in self._spare if self._suits(block, size_bytes)]
            if fitting:
                block = min(fitting, key=lambda block: block.capacity)
                self._spare.remove(block)
                return block
        return self.make(size_bytes, label)

    def give_back(self, block: Block) -> None:
        """Ends the use of a block. Handles of what it holds become stale; views of its memory stay valid."""
        with self._lock:
            if self._blocks.get(block.name) is not block:
                return
            # Before it can be taken again: a late reader must find it stale, not another key's bytes.
            block.revoke()
            kept = sum(len(spare.memory) for spare in self._spare) + len(block.memory)
            if kept <= self._reserved_bytes:
                self._spare.append(block)
                return
        self._remove(block)

    def reserve(self, size_bytes: int, blocks: int, share: Share) -> None:
        """Makes spare blocks for ``blocks`` more states of ``size_bytes``, with all their pages. Raises ArenaSpace."""
        for _ in range(blocks):
            block = self.make(size_bytes, "spare")
            with self._lock:
                self._reserved_bytes += len(block.memory)
            populate(block, share)
            with self._lock:
                self._spare.append(block)

    def remove_abandoned(self) -> list[str]:
        """Removes the blocks of processes of this run that have been killed; returns their names."""
        return remove_abandoned(self._directory)

    def close(self) -> None:
        """Removes all blocks. Processes that have mapped one keep its memory."""
        with self._lock:
            blocks = list(self._blocks.values())
            self._spare.clear()
        for block in blocks:
            self._remove(block)

    def _suits(self, block: Block, size_bytes: int) -> bool:
        return (
            size_bytes <= block.capacity <= max(_MOST_WASTE * size_bytes, size_bytes + (1 << 20))
            and not block.in_use
        )

    def make(self, size_bytes: int, label: str) -> Block:
        """A new block of exactly that capacity, in whole pages. Raises ArenaSpace."""
        while True:
            # The label makes the name readable; process and number make it unique.
            readable = re.sub(r"[^A-Za-z0-9]+", "_", label)[:48]
            name = f"{self._process}-{next(self._numbers)}-{readable}.arena"
            with contextlib.suppress(FileExistsError):  # another process has looked for abandoned files
                block = self._create(name, size_bytes)
                break
        with self._lock:
            self._blocks[name] = block
        if self._pin is not None:
            self._unpin[name] = self._pin(block.address, len(block.memory))
        return block

    def _create(self, name: str, size_bytes: int) -> Block:
        try:
            return Block.create(self._directory, name, size_bytes)
        except ArenaSpace as full:
            # Only now: each file in the directory takes a few system calls, too many for every new block.
            self._free_spares(full.needed_bytes)
            self.remove_abandoned()
            return Block.create(self._directory, name, size_bytes)

    def _free_spares(self, needed_bytes: int) -> None:
        """Gives spare blocks back to the system, the largest first, until ``needed_bytes`` are free."""
        with self._lock:
            spares = sorted(self._spare, key=lambda block: block.capacity)
        while spares and needed_bytes > 0:
            block = spares.pop()
            with self._lock:
                if block not in self._spare:  # another thread has taken it
                    continue
                self._spare.remove(block)
            needed_bytes -= file_bytes(block.capacity)
            self._remove(block)

    def _remove(self, block: Block) -> None:
        with self._lock:
            self._blocks.pop(block.name, None)
        if unpin := self._unpin.pop(block.name, None):
            unpin()
        block.unlink()
        block.close()
