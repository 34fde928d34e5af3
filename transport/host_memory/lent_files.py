"""Lent memory on a disk: the states in some blocks, written to a file and read back bit for bit."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Final

from ..errors import TransportClosed
from .block import Block

# A copy can be stopped between two pieces. The file is not forced to the disk (fsync): it replaces memory of this
# process, and is worth nothing after the machine has failed.
_PIECE_BYTES: Final = 16 << 20


def write(blocks: Sequence[Block], file: Path, stop: Event) -> None:
    """Writes the blocks to a new file, one behind the other.

    Raises OSError (ENOSPC: the disk is full) and TransportClosed; then there is no file.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for offset, piece in _pieces(blocks):
            _check(stop)
            written = 0
            while written < len(piece):
                written += os.pwrite(descriptor, piece[written:], offset + written)
    except BaseException:
        file.unlink()
        raise
    finally:
        os.close(descriptor)


def read(file: Path, blocks: Sequence[Block], stop: Event) -> None:
    """Reads them into blocks of the same sizes, generations included. Raises OSError, TransportClosed."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for offset, piece in _pieces(blocks):
            _check(stop)
            got = 0
            while got < len(piece):
                count = os.preadv(descriptor, [piece[got:]], offset + got)
                if not count:
                    raise OSError(f"{file} ends at byte {offset + got}")
                got += count
    finally:
        os.close(descriptor)


def _pieces(blocks: Sequence[Block]) -> Iterator[tuple[int, memoryview]]:
    """The memory of the blocks in pieces, each with its place in the file."""
    first = 0
    for block in blocks:
        memory = memoryview(block.memory)
        for start in range(0, len(memory), _PIECE_BYTES):
            yield first + start, memory[start : start + _PIECE_BYTES]
        first += len(memory)


def _check(stop: Event) -> None:
    if stop.is_set():
        raise TransportClosed
