"""Spans: the work of a process, each piece with its begin and end. They wait in memory until they are taken.

A span has six names, of which the first is its lane and the second its kind, and six numbers. The meaning of the others
is for the layers above: this one carries them. In a record a name is the number of an entry of the batch's table.

    bounded    a full buffer counts what it leaves out, and never waits
    by key     a share of all keys is kept, the same one in each process; a span without a key is always kept
    once       a batch stays here until the next call says that it has arrived: an answer that is lost costs nothing
"""

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from .protocol.codec import Buffer

NAMES: Final = 6
NUMBERS: Final = 6
RECORD: Final = struct.Struct(f"<2d{NAMES}i{NUMBERS}i")
"""Begin and end, in seconds since 1970; entries of the table of names, -1: no name; numbers, -1: no number."""

MOST_BYTES: Final = 2 * 2**20
LONGEST_NAME: Final = 500
"""Characters; a longer name is cut."""
_KEYS: Final = 2**32


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """``records``: each as ``RECORD`` packs it. ``dropped``: spans without room since the process began."""

    number: int
    names: tuple[str, ...]
    records: Buffer
    dropped: int


def is_kept(key: str, share: float) -> bool:
    """True for ``share`` of all keys. Those of a smaller share are among those of a greater one."""
    return crc32(key.encode()) < share * _KEYS


class SpanRecorder:
    """The spans of one process. It records from the beginning, so that those of its start are not lost.

    ``share``: of the keys whose spans are kept; 0: nothing is recorded.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.share = 1.0
        self.dropped = 0
        self._most_bytes = most_bytes
        self._names: dict[str, int] = {"": -1}
        self._records = bytearray()
        self._text = self._sent_text = 0
        """Characters of the names, at most: they take memory as the records do."""
        self._sent: tuple[dict[str, int], bytearray] = {"": -1}, bytearray()
        # A process that is started again begins with another number than its predecessor ended with.
        self._number = time.time_ns()
        self._set_clock()

    def _set_clock(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now(self) -> float:
        """Seconds since 1970 by this host's clock. It runs evenly between two calls of ``take``."""
        return time.monotonic() + self._offset_s

    def add(
        self, begin: float, end: float, names: Sequence[str], numbers: Sequence[int], key: str = ""
    ) -> None:
        """Records a span, if there is room and its ``key`` is among those that are kept. ``names``: six, the lane and
        the kind first, empty: none. ``numbers``: six of 32 bits, -1: none."""
        if self.share < 1.0 and (not self.share or (key and not is_kept(key, self.share))):
            return
        if len(self._records) + len(self._sent[1]) + self._text + self._sent_text >= self._most_bytes:
            self.dropped += 1
            return
        entries = self._names
        count = len(entries)
        # The table has one entry for no name, so that the first name is the entry 0.
        indexes = [entries.setdefault(name, len(entries) - 1) for name in names]
        if len(entries) > count:  # most spans have names that are known: their lengths need no look
            if max(map(len, names)) > LONGEST_NAME:
                while len(entries) > count:
                    entries.popitem()
                names = [name[:LONGEST_NAME] for name in names]
                indexes = [entries.setdefault(name, len(entries) - 1) for name in names]
            self._text += sum(map(len, names))
        # A clock that was set back makes no negative time.
        self._records += RECORD.pack(begin, end if end > begin else begin, *indexes, *numbers)

    def take(self, share: float, received: int) -> SpanBatch:
        """The spans since the batch ``received``, the last one that has arrived. ``share``: from now on."""
        self.share = share
        self._set_clock()
        if received == self._number:
            self._sent, self._sent_text = ({"": -1}, bytearray()), 0
        if self._sent[1]:  # it has not arrived: its spans are in front of the new ones
            self._join_sent()
        self._sent, self._names, self._records = (self._names, self._records), {"": -1}, bytearray()
        self._sent_text, self._text = self._sent_text + self._text, 0
        self._number += 1
        names, records = self._sent
        return SpanBatch(self._number, tuple(names)[1:], Buffer(bytes(records)), self.dropped)

    def _join_sent(self) -> None:
        names, records = self._sent
        table = [names.setdefault(name, len(names) - 1) for name in self._names]
        # ``table`` begins with the entry -1 of no name, which is its first one.
        for record in RECORD.iter_unpack(self._records):
            entries = [table[entry + 1] for entry in record[2 : 2 + NAMES]]
            records += RECORD.pack(*record[:2], *entries, *record[2 + NAMES :])
        self._names, self._records = names, records
