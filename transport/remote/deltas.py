"""The exact changes from one version of a chunk to another: the words (2 bytes) that differ, with their new values.

A word is a value of bfloat16, the half of a float32. Per chunk:

    count of words, 4 bytes | gaps, 2 bytes each | new values, 2 bytes each        (little-endian)

A gap is the number of unchanged words before a changed one. If more than 65,535 lie between, unchanged words are sent
among the changed ones. All chunks have a multiple of 8 bytes: memory of states ends with a page.

``Deltas`` has the changes between two versions of a state, for all readers that have the older one.
"""

import threading
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

import numpy as np

from ..host_memory.block import CHUNK_BYTES, Block

_MOST_GAP: Final = 0xFFFF
_COUNT_BYTES: Final = 4
# Words of 2 bytes: weights are bfloat16 as a rule, and an optimizer step leaves many of them as they were. Not zlib
# over the difference: it is slower than a network between two hosts. Larger deltas are not worth it: they take the
# sender and the reader longer than the bytes themselves.
MOST_SHARE: Final = 0.25
# After so many chunks of which none has a small delta, no more are computed: a step that changes most values
# does so in all chunks, and to compare them costs as much as to read both versions.
_TRIED_CHUNKS: Final = 16


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


class VersionPair(NamedTuple):
    """The blocks of two versions, and their generations."""

    old: str
    old_generation: int
    new: str
    new_generation: int


class Deltas:
    """The changes chunk by chunk, each computed once: by the thread that comes first, for which others wait.

    The new version must stay as it is. The old one may be written over: from then on no more changes are computed. All
    methods may be called by several threads.
    """

    def __init__(self, old: Block, new: Block, size_bytes: int) -> None:
        # A block that is being written has an odd generation, and the next one when it is published.
        new_generation = new.generation + new.generation % 2
        self.pair = VersionPair(old.name, old.generation, new.name, new_generation)
        self._old, self._new = old, new
        self._size_bytes = -(-size_bytes // 8) * 8  # memory ends with a page
        self._lock = threading.Lock()
        self._futures: dict[int, Future[bytes | None]] = {}
        self._computed = 0
        self._small = 0

    @property
    def has_old(self) -> bool:
        """True if the old block still has its version, whole."""
        return self._old.generation == self.pair.old_generation and not self.pair.old_generation % 2

    @property
    def has_both(self) -> bool:
        """True if both blocks still have their versions, published."""
        return self.has_old and self._new.generation == self.pair.new_generation

    def of(self, start: int, end: int) -> bytes | None:
        """The changes of a range; None if they are not much smaller than it."""
        deltas = []
        for chunk in range(start, end, CHUNK_BYTES):
            changes = self._chunk(chunk)
            if changes is None:
                return None
            deltas.append(changes)
        return b"".join(deltas)

    def are_small(self) -> bool:
        """False if none of the first chunks has much fewer changes than bytes."""
        for start in range(0, min(self._size_bytes, _TRIED_CHUNKS * CHUNK_BYTES), CHUNK_BYTES):
            if self._small or self._chunk(start) is not None:
                return True
        return False

    def compute(self, start: int) -> None:
        """Computes those of the chunk that begins there, which is in the cache: its thread has just written it."""
        self._chunk(start)

    def _chunk(self, start: int) -> bytes | None:
        # Each chunk's changes are kept until the next version: readers of several hosts ask for the same ones, at about
        # the same time.
        with self._lock:
            future = self._futures.get(start)
            if future is None:
                if self._computed >= _TRIED_CHUNKS and not self._small:
                    return None
                mine = self._futures[start] = Future()
        if future is not None:
            return future.result()
        end = min(start + CHUNK_BYTES, self._size_bytes)
        try:
            changes = encode(self._old.payload[start:end], self._new.payload[start:end])
        except BaseException as error:
            with self._lock:
                del self._futures[start]
            mine.set_exception(error)  # else those that wait would wait for ever
            raise
        # No lock keeps the old block: by that, a reader with a slow link would keep the next version from being set.
        if not self.has_old:
            changes = None
        with self._lock:
            self._computed += 1
            self._small += changes is not None
        mine.set_result(changes)
        return changes
