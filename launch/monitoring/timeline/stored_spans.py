"""Reads the spans of a run's folder, also while the run runs: each ``refresh`` takes those that are new.

In memory are the times, the lane and the kind of each span, 18 bytes, in blocks; its attributes are read from the file
when they are asked for. The id of a span is its place in the file.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ....actors.spans import KINDS, NAMES, NUMBERS, Span
from ...run_folder.spans.span_log import RECORD, count_spans, names_file, parse_names, spans_file

BLOCK: Final = 2**16
DAMAGED: Final = 2**16 - 1
"""The row of a record that is damaged: it is shown nowhere."""

Array = np.ndarray[Any, Any]


class Lane(NamedTuple):
    """``role``: the part of the run that it belongs to. ``node``: the host."""

    name: str
    role: str
    node: str


class Block:
    """Up to ``BLOCK`` spans in the order of the file. ``first_s``, ``last_s``: of all of them."""

    def __init__(self) -> None:
        self.size = 0
        self._begin, self._end, self._row = np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK, "<u2")
        self.first_s, self.last_s = np.inf, -np.inf

    def add(self, begin: Array, end: Array, row: Array) -> None:
        """Appends spans; there is room for them."""
        added = slice(self.size, self.size + len(begin))
        self._begin[added], self._end[added], self._row[added] = begin, end, row
        self.size += len(begin)
        if (whole := row != DAMAGED).any():
            self.first_s = min(self.first_s, float(begin[whole].min()))
            self.last_s = max(self.last_s, float(end[whole].max()))

    @property
    def begin(self) -> Array:
        """Seconds since 1970."""
        return self._begin[: self.size]

    @property
    def end(self) -> Array:
        """Seconds since 1970."""
        return self._end[: self.size]

    @property
    def row(self) -> Array:
        """Places in ``StoredSpans.rows``; ``DAMAGED`` for others."""
        return self._row[: self.size]

    @property
    def is_whole(self) -> Array:
        """False for records that are damaged."""
        whole: Array = self.row != DAMAGED
        return whole


class StoredSpans:
    """``lanes`` and ``kinds``: in the order of their first span. ``rows``: pairs of a lane and a kind. ``dropped``:
    spans that the run could not record."""

    def __init__(self, folder: Path) -> None:
        """``folder``: ``trace/`` of a run; it may be missing."""
        self._folder = folder
        self._forget()

    def _forget(self) -> None:
        self.lanes: list[Lane] = []
        self.kinds: list[str] = []
        self.rows: list[tuple[int, int]] = []
        self.blocks: list[Block] = []
        self.dropped = 0
        self.size = 0
        self._first = b""
        """The first record, by which a file is known again: its inode may be that of a file that was removed."""
        self._names: list[str] = []
        self._entries: dict[str, int] = {}
        self._lives: list[int] = []
        """The ids of the first span of each life of the run."""
        self._names_at = 0
        self._nodes: dict[str, str] = {}
        self._lane_of: dict[int, int] = {}
        self._kind_of: dict[int, int] = {}
        self._row_of: dict[tuple[int, int], int] = {}

    def refresh(self) -> bool:
        """Reads what has been written since the last call; True if that is something."""
        size = count_spans(self._folder)
        try:
            first = self._first_record()
        except FileNotFoundError:
            return False
        if self.size and (size < self.size or first != self._first):  # the folder is another run's by now
            self._forget()
        before, self._first = self.size, first
        self._read_names()  # they were written before the records with them
        while self.size < size:
            count = min(size - self.size, BLOCK - self.size % BLOCK)
            records = self._read(self.size, count)
            if not len(records):  # the file has become shorter since: the next call begins again
                break
            self._add(records)
        return self.size > before

    def _first_record(self) -> bytes:
        with spans_file(self._folder).open("rb") as file:
            return file.read(RECORD.itemsize)

    def _read_names(self) -> None:
        with names_file(self._folder).open("rb") as file:
            file.seek(self._names_at)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._names_at += whole
        for line in parse_names(text[:whole]):
            if isinstance(line, str):
                self._entries.setdefault(line, len(self._names))
                self._names.append(line)
            elif "lane" in line:
                self._nodes[str(line["lane"])] = str(line.get("node", ""))
            elif "life" in line:
                self._lives.append(int(line["life"]))
            else:
                self.dropped = int(line.get("dropped", self.dropped))

    def _read(self, first: int, count: int) -> Array:
        with spans_file(self._folder).open("rb") as file:
            file.seek(first * RECORD.itemsize)
            return np.fromfile(file, RECORD, count)

    def _add(self, records: Array) -> None:
        if self.size % BLOCK == 0:
            self.blocks.append(Block())
        self.size += len(records)
        begin, end = records["begin"], records["end"]
        with np.errstate(invalid="ignore"):
            # A simulated run begins at 0, and in a hole of the file all is 0.
            is_whole = (begin >= 0) & (end > 0) & (end >= begin) & np.isfinite(end)
        for column in ("lane", "kind"):
            is_whole &= (records[column] >= 0) & (records[column] < len(self._names))
        row = np.full(len(records), DAMAGED, "<u2")
        pairs = records["lane"].astype("<i8") << 32 | records["kind"]
        for pair in np.unique(pairs[is_whole]).tolist():
            row[is_whole & (pairs == pair)] = self._row(pair >> 32, pair & 0xFFFFFFFF)
        self.blocks[-1].add(begin, end, row)

    def _row(self, lane_name: int, kind_name: int) -> int:
        """``lane_name``, ``kind_name``: entries of the table."""
        kind = self._kind(kind_name)
        pair = self._lane(lane_name, self.kinds[kind]), kind
        if pair not in self._row_of:
            if len(self.rows) == DAMAGED:
                return DAMAGED
            self._row_of[pair] = len(self.rows)
            self.rows.append(pair)
        return self._row_of[pair]

    def _kind(self, name: int) -> int:
        if name not in self._kind_of:
            self._kind_of[name] = len(self.kinds)
            self.kinds.append(self._names[name])
        return self._kind_of[name]

    def _lane(self, name: int, kind: str) -> int:
        if name not in self._lane_of:
            self._lane_of[name] = len(self.lanes)
            text = self._names[name]
            self.lanes.append(Lane(text, KINDS.get(kind, ""), self._nodes.get(text, "")))
        return self._lane_of[name]

    # ------------------------------------------------------------------ attributes

    def records(self) -> Iterator[tuple[int, Array]]:
        """The records of each block as they are in the file, with the id of the first."""
        for first in range(0, self.size, BLOCK):
            yield first, self._read(first, min(BLOCK, self.size - first))

    def records_of_block(self, block: int) -> Array:
        """The records of one block as they are in the file."""
        return self._read(self.first_of(block), self.blocks[block].size)

    def begins(self, ids: Sequence[int]) -> Array:
        """The times at which spans begin, from memory."""
        return np.array([self.blocks[number // BLOCK].begin[number % BLOCK] for number in ids])

    def spans(self, ids: Sequence[int]) -> list[Span]:
        """The spans with these ids."""
        return [self.span_of(record) for record in self.records_of(ids)]

    def span_of(self, record: Any) -> Span:
        """The span that a record of the file holds."""
        names: Mapping[str, Any] = {name: self._name(int(record[name])) for name in NAMES}
        numbers: Mapping[str, Any] = {name: int(record[name]) for name in NUMBERS}
        return Span(begin=float(record["begin"]), end=float(record["end"]), **names, **numbers)

    def _name(self, entry: int) -> str:
        return self._names[entry] if 0 <= entry < len(self._names) else ""

    def shown(self, number: int) -> tuple[int, int]:
        """Lane and kind of a span, as indexes. Raises KeyError for a record that is damaged."""
        row = int(self.blocks[number // BLOCK].row[number % BLOCK])
        if row == DAMAGED:
            raise KeyError(number)
        return self.rows[row]

    def ids_of(self, kind: str) -> list[int]:
        """The ids of all spans of a kind, in the order of the file."""
        rows = [row for row, (_, number) in enumerate(self.rows) if self.kinds[number] == kind]
        return [
            self.first_of(number) + place
            for number, block in enumerate(self.blocks)
            for place in np.flatnonzero(np.isin(block.row, rows)).tolist()
        ]

    def first_of(self, block: int) -> int:
        """The id of the first span of a block."""
        return block * BLOCK

    def entry_of(self, kind: str) -> int | None:
        """The entry of a kind in the records; None if there is no span of it."""
        return next((entry for entry, number in self._kind_of.items() if self.kinds[number] == kind), None)

    def keys(self, ids: Array, records: Array, by: Sequence[str], steps: int = 0) -> Array:
        """One number for the attributes ``by`` of each record, by which the spans of one life of the run are compared:
        equal attributes, equal numbers. Those of others differ, but for one in 2^64. ``steps``: added to the
        version."""
        key = np.searchsorted(self._lives, ids, side="right").astype("<u8")
        for name in by:
            column = records[name].astype("<i8") + (steps if name == "version" else 0)
            key = (key ^ column.view("<u8")) * np.uint64(0x9E3779B97F4A7C15)
            key ^= key >> np.uint64(29)
        return key

    def records_of(self, ids: Sequence[int]) -> Array:
        """The records of spans as they are in the file."""
        with spans_file(self._folder).open("rb") as file:
            parts = []
            for number in ids:
                file.seek(number * RECORD.itemsize)
                parts.append(file.read(RECORD.itemsize))
        return np.frombuffer(b"".join(parts), RECORD)
