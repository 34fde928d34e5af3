"""Recorders whose spans have the times that a test gives them, and the spans in a batch."""

import struct
from typing import NamedTuple

from flexmarl.core.spans import MOST_BYTES, NUMBERS, Label, SpanBatch, SpanRecorder


class Row(NamedTuple):
    """``begin``, ``end``: seconds since 1970."""

    begin: float
    end: float
    label: Label
    name: str
    numbers: tuple[int, ...]


def timeless_recorder(most_bytes: int = MOST_BYTES) -> SpanRecorder:
    """Its clock stands still in 1970: times stay as they are."""
    return SpanRecorder(lambda: 0.0, lambda: 0.0, most_bytes)


def rows_of(batch: SpanBatch) -> list[Row]:
    """The spans of a batch, in their order."""
    rows: list[Row] = []
    for part in batch.parts:
        count = part.spans
        columns = struct.unpack(f"<{2 * count}d{(2 + NUMBERS) * count}i", part.columns.view)
        begin, end, label, name, *numbers = (
            columns[first : first + count] for first in range(0, len(columns), count)
        )
        rows += [
            Row(
                begin[place] + part.offset_s,
                end[place] + part.offset_s,
                part.labels[label[place]],
                part.names[name[place]] if name[place] >= 0 else "",
                tuple(column[place] for column in numbers),
            )
            for place in range(count)
        ]
    return rows
