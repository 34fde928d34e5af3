"""Lent memory on a disk: the states in an arena, written to a file and read back bit for bit."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Final

from .arena import Arena
from .errors import TransportClosed

# A copy can be stopped between two pieces.
_PIECE_BYTES: Final = 16 << 20


def write(arena: Arena, slots: Sequence[int], file: Path, stop: Event) -> None:
    """Writes the states in ``slots`` to a new file, which has holes in place of the others.

    Raises OSError (ENOSPC: the disk is full) and TransportClosed; then there is no file.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, len(arena.memory))
        for start, end in _pieces(arena, slots):
            _check(stop)
            with memoryview(arena.memory)[start:end] as piece:
                while start < end:
                    start += os.pwrite(descriptor, piece[start - end :], start)
    except BaseException:
        file.unlink()
        raise
    finally:
        os.close(descriptor)


def read(file: Path, slots: Sequence[int], arena: Arena, stop: Event) -> None:
    """Reads them into an arena of the same size, generations included. Raises OSError, TransportClosed."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for start, end in _pieces(arena, slots):
            _check(stop)
            with memoryview(arena.memory)[start:end] as piece:
                while start < end:
                    count = os.preadv(descriptor, [piece[start - end :]], start)
                    if not count:
                        raise OSError(f"{file} ends at byte {start} of {len(arena.memory)}")
                    start += count
    finally:
        os.close(descriptor)


def _pieces(arena: Arena, slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and last byte of each piece: the head, then the slots."""
    yield 0, arena.offset(0)
    for slot in slots:
        first, end = arena.offset(slot), arena.offset(slot) + arena.slot_bytes
        for start in range(first, end, _PIECE_BYTES):
            yield start, min(start + _PIECE_BYTES, end)


def _check(stop: Event) -> None:
    if stop.is_set():
        raise TransportClosed
