"""The writer of ``metrics.jsonl`` and ``events.jsonl``: each line is whole, or absent.

    whole      a line is one write at the file's end; of a write that comes short the part is cut off again
    waiting    lines that find no space wait in memory, the oldest first, and are written with the next line, by
               ``retry`` or at the end; beyond ``WAITING_BYTES`` the oldest are lost
    said       that the file can't be written, that it can again, and at the end what it lacks

A run works for days, and a disk that is full for an hour costs it nothing but a warning: no method raises OSError.
"""

import contextlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...core.durable.files import open_descriptor

WAITING_BYTES: Final = 64 * 2**20

Name = int | str
"""A step, or the name of an event."""


class _Line(NamedTuple):
    name: Name
    data: bytes


class LineWriter:
    """Appends objects to a file, one per line. For one thread; no one else writes to the file meanwhile."""

    def __init__(self, path: Path, warn: Callable[[str], None], waiting_bytes: int = WAITING_BYTES) -> None:
        """Makes the file if it is missing. ``warn``: gets one line for the user."""
        self._path, self._warn, self._most_bytes = path, warn, waiting_bytes
        self._file: int | None = None
        self._torn_at: int | None = None
        """The place of a line's part that could not be cut off yet."""
        self._waiting: deque[_Line] = deque()
        self._lost: list[Name] = []
        self._problem = ""
        self._flush()

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes one line, or has it wait. A float that is not finite becomes null, as JSON has no such numbers."""
        data = json.dumps(finite(record), allow_nan=False, default=str).encode() + b"\n"
        self._waiting.append(_Line(record.get("event", record.get("step", "")), data))
        self._flush()
        if self._problem:
            while sum(len(line.data) for line in self._waiting) > self._most_bytes:
                self._lost.append(self._waiting.popleft().name)

    def retry(self) -> None:
        """Writes the lines that wait, if they find space now."""
        if self._waiting:
            self._flush()

    def close(self) -> None:
        """Forces the lines to the disk, and closes the file. May be called again."""
        self._flush()
        if self._file is not None:
            file, self._file = self._file, None
            try:
                os.fsync(file)
            except OSError as error:
                if os.fstat(file).st_size:  # a device has nothing to force
                    self._warn(f"{self._path} may lack its last lines: {error.strerror}")
            finally:
                with contextlib.suppress(OSError):
                    os.close(file)
        lacking = [*self._lost, *(line.name for line in self._waiting)]
        if lacking:
            self._warn(
                f"{self._path} lacks {_words(lacking)}: {self._problem or 'they did not fit into memory'}"
            )
        self._waiting.clear()
        self._lost.clear()

    # ------------------------------------------------------------------ inside

    def _flush(self) -> None:
        written = []
        try:
            self._open()
            while self._waiting:
                self._append(self._waiting[0].data)
                written.append(self._waiting.popleft().name)
        except OSError as error:
            if not self._problem:
                self._warn(f"{self._path} can't be written ({error.strerror}): its lines wait in memory")
            self._problem = error.strerror or str(error)
        else:
            if self._problem:
                self._problem = ""
                self._warn(f"{self._path} can be written again: it has {_words(written)}, which waited")

    def _open(self) -> None:
        if self._file is None:
            self._file = open_descriptor(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if self._torn_at is not None:
            os.ftruncate(self._file, self._torn_at)
            self._torn_at = None

    def _append(self, data: bytes) -> None:
        """Raises OSError if the line is not in the file; then no part of it is there, or ``_torn_at`` is set."""
        assert self._file is not None
        at = os.fstat(self._file).st_size
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            if len(rest) < len(data):
                self._torn_at = at
                with contextlib.suppress(OSError):
                    self._open()
            raise


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """``record`` with None for floats that are not finite."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


def _words(names: Iterable[Name]) -> str:
    """``steps 3-5 and 9``, or ``2 events: step_started, run_ended``."""
    entries = [*names]
    steps = [name for name in entries if isinstance(name, int)]
    if steps:
        return words_of_steps(steps)
    events = ", ".join(dict.fromkeys(map(str, entries)))
    return f"{len(entries)} {'event' if len(entries) == 1 else 'events'}: {events}"


def words_of_steps(steps: Iterable[int]) -> str:
    """``step 3``, or ``steps 3-5 and 9``. At least one step."""
    ranges: list[list[int]] = []
    for step in sorted({*steps}):
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    noun = "step" if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else "steps"
    return f"{noun} {' and '.join(filter(None, [', '.join(texts[:-1]), texts[-1]]))}"
