"""Spans: the work of a process, each piece with its begin and end. They wait in memory until they are taken.

A span has six names, of which five are its label, the same for many spans: its lane, its kind and three more. It has
six numbers. The meaning of all but lane and kind is for the layers above: this one carries them.

    quick      adding a span writes 48 bytes behind the others. No object of it stays: thousands of tuples, which live
               for a second, would push what the process works on out of the processor's cache
    bounded    a full buffer counts what it leaves out, and never waits
    by key     a share of all keys is kept, the same one in each process; a span without a key is always kept
    once       a batch stays here until the next call says that it has arrived: an answer that is lost costs nothing
    last       an actor that fails hands over all that is here with its error (``HostedActor``), since its process ends
"""

import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final
from zlib import crc32

from .protocol.codec import Buffer

LABEL: Final = 5
"""Names of a label: lane, kind and three more; empty: none."""
NUMBERS: Final = 6
_ROW: Final = struct.Struct(f"<2d{2 + NUMBERS}i")
SPAN_BYTES: Final = _ROW.size

MOST_BYTES: Final = 2 * 2**20
LONGEST_NAME: Final = 500
"""Characters; a longer name is cut."""
_KEYS: Final = 2**32
_GREATEST: Final = 2**31 - 1

Label = tuple[str, str, str, str, str]


@dataclass(frozen=True, slots=True)
class SpanPart:
    """``rows``: one of ``SPAN_BYTES`` for each span, little-endian: begin and end (float64, by the clock of the
    process); the place of the label in ``labels``, the place of the sixth name in ``names`` or -1 for none, and the six
    numbers, -1 for none (int32). ``offset_s``: to be added to begin and end for seconds since 1970. ``batch``: the
    number of the first batch with this part."""

    labels: tuple[Label, ...]
    names: tuple[str, ...]
    rows: Buffer
    offset_s: float
    batch: int


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """``dropped``: spans without room since the process began."""

    number: int
    parts: tuple[SpanPart, ...]
    dropped: int

    def since(self, received: int) -> "SpanBatch":
        """Without the parts of the batch ``received`` and those before it."""
        if received > self.number:  # of the process's predecessor, before the clock of the host was set back
            return self
        return replace(self, parts=tuple(part for part in self.parts if part.batch > received))


class LastSpans:
    """The last spans of processes whose actors have failed, of the newest of each name, until they have arrived."""

    def __init__(self) -> None:
        self._batches: dict[str, SpanBatch] = {}

    def add(self, name: str, batch: SpanBatch) -> None:
        """``batch``: from ``SpanRecorder.take`` without a batch that has arrived."""
        self._batches[name] = batch

    def forget(self, received: Mapping[str, int]) -> None:
        """Drops those that have arrived. ``received``: the number of the last batch that has, by name."""
        self._batches = {
            name: last for name, last in self._batches.items() if received.get(name) != last.number
        }

    def since(self, received: Mapping[str, int]) -> dict[str, SpanBatch]:
        """The batches without the parts that have arrived, by name. ``received``: see ``forget``."""
        return {name: last.since(received.get(name, 0)) for name, last in self._batches.items()}


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
        self._rows = bytearray()
        self._labels: dict[Label, int] = {}
        self._names = {"": -1}
        self._characters = 0
        """Those of the names in both."""
        self._sent: list[SpanPart] = []
        self._sent_used = 0
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
        if not self.share or (key and self.share < 1.0 and not is_kept(key, self.share)):
            return
        if len(self._rows) + self._characters + self._sent_used > self._most_bytes - SPAN_BYTES:
            self.dropped += 1
            return
        label_place = self._labels.get(label)
        if label_place is None:
            label_place = self._place(label)
        name_place = self._names.get(name)
        if name_place is None:
            name_place = self._names[name] = len(self._names) - 1
            self._characters += min(len(name), LONGEST_NAME)
        try:
            self._rows += _ROW.pack(
                begin,
                end,
                label_place,
                name_place,
                number_0,
                number_1,
                number_2,
                number_3,
                number_4,
                number_5,
            )
        except struct.error:
            numbers = number_0, number_1, number_2, number_3, number_4, number_5
            self._rows += _ROW.pack(begin, end, label_place, name_place, *map(_int32, numbers))

    def take(self, share: float, received: int) -> SpanBatch:
        """The spans since the batch ``received``, the last one that has arrived; 0: all that may not have arrived.
        ``share``: from now on."""
        if received == self._number:
            self._sent, self._sent_used = [], 0
        self._number += 1
        if self._rows:
            self._sent.append(self._part())
            self._sent_used += len(self._rows) + self._characters
            self._rows, self._labels, self._names, self._characters = bytearray(), {}, {"": -1}, 0
        self.share = share
        return SpanBatch(self._number, (*self._sent,), self.dropped)

    def _place(self, label: Label) -> int:
        place = self._labels[label] = len(self._labels)
        self._characters += sum(min(len(name), LONGEST_NAME) for name in label)
        return place

    def _part(self) -> SpanPart:
        names = tuple(name[:LONGEST_NAME] for name in self._names if name)
        offset_s = self._wall() - self.now()
        return SpanPart(tuple(map(_cut, self._labels)), names, Buffer(self._rows), offset_s, self._number)


def _cut(label: Label) -> Label:
    lane, kind, first, second, third = (name[:LONGEST_NAME] for name in label)
    return lane, kind, first, second, third


def _int32(number: int) -> int:
    """A number that does not fit is the nearest one that does."""
    return min(max(number, -1), _GREATEST)
