"""The segments that writers may fill, as the journal has them, and the newest grant of each writer. Pure.

A writer numbers its grants, and asks for one number until it has the answer. If an answer is lost, with the connection
or with the store's process, the next one names the same segment. A writer that asks for the next number has its segment
before that: only the newest is kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgpack

from ..segments.segments import SegmentGrant

GRANT: Final = 16  # writer, segment, size in bytes; if it is the writer's newest: number
SEAL: Final = 17  # writer, segments


class Grants:
    def __init__(self) -> None:
        self.writers: dict[str, str] = {}
        """The writers of all segments that the journal has as granted and not sealed, when it has been read."""
        self.sizes: dict[str, int] = {}
        """Their sizes in bytes, which the store can't see: those of other hosts are not files here."""
        self._newest: dict[str, tuple[int, SegmentGrant]] = {}

    def read(self, kind: int, fields: Sequence[Any]) -> None:
        """Applies one record of the journal."""
        if kind == GRANT:
            writer, segment, size_bytes, *number = fields
            self.writers[segment], self.sizes[segment] = writer, size_bytes
            if number:
                self.add(writer, number[0], SegmentGrant(segment, size_bytes))
        else:
            for segment in fields[1]:
                self.writers.pop(segment, None)

    def add(self, writer: str, number: int, grant: SegmentGrant) -> None:
        """Makes ``grant`` the newest of the writer."""
        self._newest[writer] = number, grant
        self.sizes[grant.segment] = grant.size_bytes

    def find(self, writer: str, number: int) -> SegmentGrant | None:
        """The grant of that number, if it is the writer's newest. Its segment may have been sealed since."""
        newest, grant = self._newest.get(writer, (None, None))
        return grant if newest == number else None

    def retire(self, writer: str) -> None:
        """Forgets the segments of a writer that is given up for lost."""
        self._newest.pop(writer, None)
        self.writers = {segment: other for segment, other in self.writers.items() if other != writer}

    def records(self, granted: Mapping[str, str]) -> Iterator[bytes]:
        """The records that lead a new store to this state. ``granted``: the writer of each segment that is not
        sealed."""
        self.sizes = {segment: self.sizes[segment] for segment in granted}
        for segment, writer in granted.items():
            number, newest = self._newest.get(writer, (0, None))
            if newest is not None and newest.segment == segment:
                yield grant_record(writer, number, newest)
            else:
                yield msgpack.packb([GRANT, writer, segment, self.sizes[segment]])


def grant_record(writer: str, number: int, grant: SegmentGrant) -> bytes:
    """The record of a grant, for the journal."""
    record: bytes = msgpack.packb([GRANT, writer, grant.segment, grant.size_bytes, number])
    return record


def seal_record(writer: str, segments: Sequence[str]) -> bytes:
    """The record of segments that the writer fills no more, for the journal."""
    record: bytes = msgpack.packb([SEAL, writer, segments])
    return record
