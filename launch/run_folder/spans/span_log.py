"""Writes the spans of a run into ``trace/`` of its folder.

    spans.bin       records of 64 bytes (``RECORD``), in the order of their arrival
    names.jsonl     the table of names, one JSON string a line: the first is the entry 0. Between them are objects:
                    ``{"lane": ..., "node": ...}`` the host of a lane, ``{"dropped": n}`` spans that are missing,
                    ``{"life": n}`` the number of spans before a life of the run: a resumed run repeats steps

Both are only appended to, names before the records with them. A crash may cut off the last record and the last
line; the next life of the run removes them. A disk that is full costs spans, which are counted, never the run.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ....actors.spans import NAMES, NUMBERS, OF_LABEL, OF_NAME
from ....core.durable.files import FOLDER_MODE, open_descriptor
from ....core.spans import LABEL, SPAN_BYTES, SpanBatch, SpanPart
from .trace_config import TraceConfig

RECORD: Final = np.dtype(
    [
        ("begin", "<f8"),
        ("end", "<f8"),
        *((name, "<i4") for name in NAMES),
        *((name, "<i4") for name in NUMBERS),
    ]
)
"""Names are entries of the table; -1: none."""

_ROW: Final = np.dtype(
    [("begin", "<f8"), ("end", "<f8"), *((name, "<i4") for name in ("label", "name", *NUMBERS))]
)
"""As a recorder writes them."""

DAMAGED: Final = "?"
"""The name of an entry that can't be read."""

_MIB: Final = 2**20
_TAIL: Final = 2**16


def spans_file(folder: Path) -> Path:
    """The file of records in a run's folder ``trace/``."""
    return folder / "spans.bin"


def names_file(folder: Path) -> Path:
    """The file of names in a run's folder ``trace/``."""
    return folder / "names.jsonl"


def count_spans(folder: Path) -> int:
    """The whole records in a run's folder ``trace/``."""
    try:
        return spans_file(folder).stat().st_size // RECORD.itemsize
    except FileNotFoundError:
        return 0


class SpanLog:
    """Appends to the files; one for each life of a run. ``dropped``: spans that are missing, in all lives. It is closed
    at the end."""

    def __init__(self, folder: Path, config: TraceConfig, warn: Callable[[str], None]) -> None:
        """``warn``: gets one line for the user, when the first span is lost to the disk."""
        self._folder, self._config, self._warn = folder, config, warn
        self._limit = config.limit_mib * _MIB
        self._entries: dict[str, int] = {}
        self._names = 0
        """Entries of the table: one more than in the dictionary for each that is damaged."""
        self._lanes: set[int] = set()
        """Entries of the lanes whose host is written."""
        self._dropped_by: dict[str, int] = {}
        self._used = 0
        self._files: tuple[int, int] | None = None
        self._is_losing = False
        self._has_begun = False
        self.dropped = 0

    @property
    def share(self) -> float:
        """The share of queries to record now; 0: nothing."""
        if not self._config.enabled or self._used >= self._limit:
            return 0.0
        return self._config.sample * 2.0 ** -math.floor(math.log2(self._limit / (self._limit - self._used)))

    def add(self, process: str, host: str, batch: SpanBatch) -> None:
        """Writes the spans of a process on ``host``."""
        before = self._dropped_by.get(process, 0)
        self._dropped_by[process] = batch.dropped
        lost = batch.dropped - before if batch.dropped >= before else batch.dropped  # else it has begun again
        parts, spans = batch.parts, sum(len(part.rows.view) // SPAN_BYTES for part in batch.parts)
        if not self.share:  # it was recorded before its process has heard that the limit is reached
            lost, parts, spans = lost + spans, (), 0
        if not self._config.enabled or (not spans and not lost):
            return
        try:
            self._open()
            self._write(parts, host, lost)
            self._is_losing = False
        except OSError as error:
            self.dropped += lost + spans
            self._reopen()
            if not self._is_losing:
                self._is_losing = True
                self._warn(f"spans are not recorded: {self._folder}: {error.strerror}")

    def close(self) -> None:
        """Closes the files. May be called again."""
        files, self._files = self._files, None
        for file in files or ():
            os.close(file)

    # ------------------------------------------------------------------ inside

    def _reopen(self) -> None:
        """Has the next call read what is in the files: a write that came short has left a part."""
        self.close()
        self._entries.clear()
        self._names = 0
        self._lanes.clear()

    def _open(self) -> None:
        if self._files is not None:
            return
        if not self._folder.exists():
            self._folder.mkdir(mode=FOLDER_MODE)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        names = open_descriptor(names_file(self._folder), flags)
        spans = open_descriptor(spans_file(self._folder), flags)
        self._files = names, spans
        with open(names, "rb", closefd=False) as file:
            text = file.read()
        whole = text.rfind(b"\n") + 1
        os.ftruncate(names, whole)
        size = os.fstat(spans).st_size
        os.ftruncate(spans, size - size % RECORD.itemsize)
        self._used = whole + size
        dropped = 0
        for line in parse_names(text[:whole]):
            if isinstance(line, str):
                self._entries.setdefault(line, self._names)
                self._names += 1
            elif "lane" in line:
                self._lanes.add(self._entries.get(line["lane"], -1))
            else:
                dropped = line.get("dropped", dropped)
        self.dropped = max(self.dropped, dropped)
        self._begin()

    def _begin(self) -> None:
        """Notes the begin of this life. Adds entries for names that are lost, though the records with them are there,
        as after a power failure: new names must not take their places."""
        assert self._files is not None, "they are open"
        size = os.fstat(self._files[1]).st_size
        first = max(0, size - _TAIL * RECORD.itemsize)
        records = np.frombuffer(os.pread(self._files[1], size - first, first), RECORD)
        entries = max((int(records[column].max(initial=-1)) + 1 for column in NAMES), default=0)
        if (missing := entries - self._names) > 0:
            self._append(self._files[0], f"{json.dumps(DAMAGED)}\n".encode() * missing)
            self._names = entries
        if not self._has_begun:
            self._append(self._files[0], f"{json.dumps({'life': size // RECORD.itemsize})}\n".encode())
            self._has_begun = True

    def _write(self, parts: Sequence[SpanPart], host: str, lost: int) -> None:
        assert self._files is not None, "they are open"
        lines: list[str | Mapping[str, Any]] = []
        records = [self._records(part, host, lines) for part in parts]
        if lost:
            self.dropped += lost
            lines.append({"dropped": self.dropped})
        self._append(self._files[0], "".join(f"{json.dumps(line)}\n" for line in lines).encode())
        self._append(self._files[1], b"".join(record.tobytes() for record in records))

    def _records(
        self, part: SpanPart, host: str, lines: list[str | Mapping[str, Any]]
    ) -> "np.ndarray[Any, Any]":
        """The records of a part. Adds to ``lines`` those that the table of names lacks."""

        def entry(name: str) -> int:
            if not name:
                return -1
            if (number := self._entries.get(name)) is None:
                number = self._entries[name] = self._names
                self._names += 1
                lines.append(name)
            return number

        labels = np.array([[entry(name) for name in label] for label in part.labels], "<i4").reshape(
            -1, LABEL
        )
        names = np.array([*map(entry, part.names), -1], "<i4")  # -1, no name, is the last one
        for (lane, *_), number in zip(part.labels, labels[:, 0].tolist(), strict=True):
            if number not in self._lanes:
                self._lanes.add(number)
                lines.append({"lane": lane, "node": host})
        rows = np.frombuffer(part.rows.view, _ROW)
        label, name = labels[rows["label"]], names[rows["name"]]
        records = np.empty(len(rows), RECORD)
        records["begin"] = rows["begin"] + part.offset_s
        # A clock that was set back makes no negative time.
        records["end"] = np.maximum(rows["end"], rows["begin"]) + part.offset_s
        for place, column in enumerate(OF_LABEL):
            records[column] = label[:, place]
        records[OF_NAME] = name
        for column in NUMBERS:
            records[column] = rows[column]
        return records

    def _append(self, file: int, data: bytes) -> None:
        self._used += len(data)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]


def parse_names(text: bytes) -> list[str | dict[str, Any]]:
    """The whole lines of the file of names. One that is damaged is an unknown name: those behind it keep their
    entries."""
    lines: list[str | dict[str, Any]] = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        lines.append(entry if isinstance(entry, str | dict) else DAMAGED)
    return lines
