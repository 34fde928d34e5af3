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
        for begin, end, label, name, *numbers in struct.iter_unpack(f"<2d{2 + NUMBERS}i", part.rows.view):
            rows.append(
                Row(
                    begin + part.offset_s,
                    end + part.offset_s,
                    part.labels[label],
                    part.names[name] if name >= 0 else "",
                    (*numbers,),
                )
            )
    return rows
