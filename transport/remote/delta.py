"""The exact changes from one version of a chunk to another: the words (2 bytes) that differ, with their new values.

A word is a value of bfloat16, the half of a float32. Per chunk:

    count of words, 4 bytes | gaps, 2 bytes each | new values, 2 bytes each        (little-endian)

A gap is the number of unchanged words before a changed one. If more than 65,535 lie between, unchanged words are sent
among the changed ones. All chunks have a multiple of 8 bytes: memory of states ends with a page.
"""

import threading
from typing import Any, Final

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint16]]
_MOST_GAP: Final = 0xFFFF
_COUNT_BYTES: Final = 4
# Larger deltas are not worth it: they take the sender and the reader longer than the bytes themselves.
MOST_SHARE: Final = 0.25


class BadDelta(Exception):
    """The changes don't fit the chunk."""


class _Scratch(threading.local):
    """Memory of a thread that is not allocated for every chunk: its pages would cost as much as comparing."""

    memory = np.empty(0, np.bool_)


_SCRATCH: Final = _Scratch()


def _scratch(size: int) -> Any:
    if len(_SCRATCH.memory) < size:
        _SCRATCH.memory = np.empty(size, np.bool_)
    return _SCRATCH.memory[:size]


def encode(old: memoryview, new: memoryview) -> bytes | None:
    """The changes from ``old`` to ``new``, of equal length; None if they take more than ``MOST_SHARE`` of it."""
    before, after = np.frombuffer(old, np.uint64), np.frombuffer(new, np.uint64)
    quads = np.flatnonzero(np.not_equal(before, after, out=_scratch(len(before))))
    if 4 * len(quads) > len(new) * MOST_SHARE:  # each has a changed word
        return None
    values = after.take(quads)
    words = np.flatnonzero((before.take(quads) ^ values).view(np.uint16) != 0)
    positions = 4 * quads[words >> 2] + (words & 3)
    changed = values.view("<u2")[words]
    gaps = np.diff(positions, prepend=-1) - 1
    if len(gaps) and gaps.max() > _MOST_GAP:
        positions = _with_fillers(positions, gaps)
        gaps = np.diff(positions, prepend=-1) - 1
        changed = after.view("<u2")[positions]
    if _COUNT_BYTES + 4 * len(positions) > len(new) * MOST_SHARE:
        return None
    count = len(positions).to_bytes(_COUNT_BYTES, "little")
    return b"".join((count, gaps.astype("<u2").tobytes(), changed.tobytes()))


def _with_fillers(positions: Any, gaps: Any) -> Any:
    """Positions, of which no two neighbours are too far from each other."""
    missing = gaps // (_MOST_GAP + 1)
    ends = np.cumsum(missing)
    number = np.arange(ends[-1]) - np.repeat(ends - missing, missing)
    fillers = np.repeat(positions - gaps - 1, missing) + (number + 1) * (_MOST_GAP + 1)
    return np.sort(np.concatenate((positions, fillers)))


def apply(changes: memoryview, chunk: memoryview) -> int:
    """Writes the first chunk's changes in ``changes`` into ``chunk``, which has the old bytes; returns the bytes read.

    Raises BadDelta, and nothing is written.
    """
    count = int.from_bytes(changes[:_COUNT_BYTES], "little")
    end = _COUNT_BYTES + 4 * count
    if len(changes) < end or 2 * count > len(chunk):
        raise BadDelta(f"{count} changes in {len(changes)} bytes")
    if count:
        words = np.frombuffer(chunk, "<u2")
        numbers = np.frombuffer(changes[_COUNT_BYTES:end], "<u2")
        positions = np.cumsum(numbers[:count], dtype=np.int64)
        positions += np.arange(count)
        if positions[-1] >= len(words):
            raise BadDelta(f"word {positions[-1]} of {len(words)}")
        words[positions] = numbers[count:]
    return end
