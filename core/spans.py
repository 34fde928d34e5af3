"""Spans: the work of a process, each piece with its begin and end. They wait in memory until they are taken.

A span has six names, of which five are its label, the same for many spans: its lane, its kind and three more. It has
six numbers. The meaning of all but lane and kind is for the layers above: this one carries them.

    quick      adding a span appends one tuple; they are packed into columns many at once, seldom
    bounded    a full buffer counts what it leaves out, and never waits
    by key     a share of all keys is kept, the same one in each process; a span without a key is always kept
    once       a batch stays here until the next call says that it has arrived: an answer that is lost costs nothing
"""

import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final
from zlib import crc32

from .protocol.codec import Buffer

LABEL: Final = 5
"""Names of a label: lane, kind and three more; empty: none."""
NUMBERS: Final = 6
SPAN_BYTES: Final = 2 * 8 + (2 + NUMBERS) * 4
"""In the columns of a part."""

MOST_BYTES: Final = 2 * 2**20
LONGEST_NAME: Final = 500
"""Characters; a longer name is cut."""
MOST_UNPACKED: Final = 512
"""Spans. One takes some 300 bytes until it is packed, and so many fit into a processor's cache."""
_KEYS: Final = 2**32
_GREATEST: Final = 2**31 - 1

Label = tuple[str, str, str, str, str]


@dataclass(frozen=True, slots=True)
class SpanPart:
    """``spans``: their number. ``columns``, one after the other, little-endian: begin and end (float64, by the clock of
    the process); the place of the label in ``labels``, the place of the sixth name in ``names`` or -1 for none, and the
    six numbers, -1 for none (int32). ``offset_s``: to be added to begin and end for seconds since 1970."""

    spans: int
    labels: tuple[Label, ...]
    names: tuple[str, ...]
    columns: Buffer
    offset_s: float


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """``dropped``: spans without room since the process began."""

    number: int
    parts: tuple[SpanPart, ...]
    dropped: int


def is_kept(key: str, share: float) -> bool:
    """True for ``share`` of all keys. Those of a smaller share are among those of a greater one."""
    return crc32(key.encode()) < share * _KEYS


class SpanRecorder:
    """The spans of one process. It records from the beginning, so that those of its start are not lost.

    ``share``: of the keys whose spans are kept; 0: nothing is recorded. ``now``: the clock of all spans, in seconds; it
    never goes back.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """``wall``: seconds since 1970."""
        self.now = now
        self.share = 1.0
        self.dropped = 0
        self._wall = wall
        self._most_bytes = most_bytes
        self._rows: list[tuple[Any, ...]] = []
        self._parts: list[SpanPart] = []
        self._sent: list[SpanPart] = []
        self._used = self._sent_used = 0
        """Bytes of the parts, with their names."""
        # A process that is started again begins with another number than its predecessor ended with.
        self._number = round(wall() * 1e9)

    def add(
        self,
        begin: float,
        end: float,
        label: Label,
        name: str = "",
        number_0: int = -1,
        number_1: int = -1,
        number_2: int = -1,
        number_3: int = -1,
        number_4: int = -1,
        number_5: int = -1,
        *,
        key: str = "",
    ) -> None:
        """Records a span, if there is room and its ``key`` is among those that are kept. ``begin``, ``end``: by
        ``now``. Numbers: of 32 bits."""
        if self.share:
            rows = self._rows
            rows.append((
                begin, end, label, name, number_0, number_1, number_2, number_3, number_4, number_5, key,
            ))  # fmt: skip
            if len(rows) >= MOST_UNPACKED:
                self._pack()

    def take(self, share: float, received: int) -> SpanBatch:
        """The spans since the batch ``received``, the last one that has arrived. ``share``: from now on."""
        if received == self._number:
            self._sent, self._sent_used = [], 0
        self._pack()
        self.share = share
        self._sent += self._parts
        self._sent_used += self._used
        self._parts, self._used = [], 0
        self._number += 1
        return SpanBatch(self._number, (*self._sent,), self.dropped)

    def _pack(self) -> None:
        rows, self._rows = self._rows, []
        if self.share < 1.0:
            kept = {key: not key or is_kept(key, self.share) for key in {row[-1] for row in rows}}
            rows = [row for row in rows if kept[row[-1]]]
        room = (self._most_bytes - self._used - self._sent_used) // SPAN_BYTES
        if len(rows) > room:
            self.dropped += len(rows) - max(0, room)
            rows = rows[: max(0, room)]
        if rows:
            part = _pack_rows(rows, self._wall() - self.now())
            self._parts.append(part)
            self._used += len(part.columns.view) + _characters(part)


def _pack_rows(rows: list[tuple[Any, ...]], offset_s: float) -> SpanPart:
    count = len(rows)
    begin, end, label, name, *numbers, _ = zip(*rows, strict=True)
    labels = {text: place for place, text in enumerate(dict.fromkeys(label))}
    names = {text: place for place, text in enumerate(dict.fromkeys(compress(name, name)))}
    # Twice as fast as arrays.
    columns = struct.pack(f"<{2 * count}d", *begin, *end)
    columns += struct.pack(f"<{count}i", *map(labels.__getitem__, label))
    columns += struct.pack(f"<{count}i", *map({**names, "": -1}.__getitem__, name))
    for column in numbers:
        columns += _int32(column)
    return SpanPart(
        count,
        tuple(map(_cut, labels)),
        tuple(text[:LONGEST_NAME] for text in names),
        Buffer(columns),
        offset_s,
    )


def _cut(label: Label) -> Label:
    lane, kind, first, second, third = (name[:LONGEST_NAME] for name in label)
    return lane, kind, first, second, third


def _int32(numbers: tuple[int, ...]) -> bytes:
    """A number that does not fit is the nearest one that does."""
    form = f"<{len(numbers)}i"
    try:
        return struct.pack(form, *numbers)
    except struct.error:
        return struct.pack(form, *(min(max(number, -1), _GREATEST) for number in numbers))


def _characters(part: SpanPart) -> int:
    names: Iterable[str] = (*part.names, *(name for label in part.labels for name in label))
    return sum(map(len, names))
