"""The files of one run.

    runs/<name>/
        config.yaml      the resolved configuration
        metrics.jsonl    one object per step
        events.jsonl     what happened, one object per event
        checkpoints/     joint checkpoints, newest last
        logs/            one file per actor process
        store/           the journal of the experience store, and samples that did not fit into memory
        report.html      written at the end
        lock             held while a process works on the run

A new run never touches a folder that exists; a resumed one first drops what lies after its checkpoint.
"""

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from .errors import RunDirectoryError


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.store = path / "store"
        self.store_address = self.store / "address"

    @classmethod
    def create(cls, path: Path, config: str) -> "RunDirectory":
        """A new one. Raises RunDirectoryError where ``path`` exists; nothing in it is touched then."""
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise RunDirectoryError(
                f"{path} exists already: choose another --name, or go on with it by --resume {path}"
            ) from None
        except OSError as error:
            raise RunDirectoryError(f"{path} can't be made: {error.strerror}") from None
        run = cls(path)
        run.checkpoints.mkdir()
        run.logs.mkdir()
        temporary = run.config.with_suffix(".tmp")
        temporary.write_text(config)
        temporary.rename(run.config)
        return run

    @classmethod
    def existing(cls, path: Path) -> "RunDirectory":
        """One that a run has made. Raises RunDirectoryError where ``path`` is none; nothing in it is touched then."""
        run = cls(path)
        for part in (run.config, run.checkpoints, run.logs):
            if not part.exists():
                raise RunDirectoryError(f"{path} is no run directory: it has no {part.name}")
        return run

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Raises RunDirectoryError where another process works on the run."""
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunDirectoryError(f"{self.path}: another process is working on this run") from None
            yield

    def forget_after(self, step: int) -> None:
        """Drops the metrics of steps after ``step``, which a resumed run takes again, and lines cut off by a crash."""
        _keep_lines(self.metrics, lambda record: 1 <= record["step"] <= step)
        _keep_lines(self.events, lambda record: True)


class JsonLines:
    """Appends objects to a file, a line each, flushed at once."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        """A value that is no finite number becomes null: JSON has none of these."""
        finite = {name: None if _not_finite(value) else value for name, value in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False, default=str) + "\n")
        self._file.flush()

    def event(self, event: str, **fields: Any) -> None:
        self.write({"time": round(time.time(), 3), "event": event, **fields})

    def close(self) -> None:
        """Raises OSError where what was written does not reach the disk; the file is closed all the same."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


def _keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Keeps the lines that are JSON objects and ``wanted``; the file changes as a whole or not at all."""
    if not path.exists():
        return
    kept = [
        line
        for line in path.read_bytes().split(b"\n")
        if (record := _object(line)) is not None and wanted(record)
    ]
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(b"".join(line + b"\n" for line in kept))
    temporary.rename(path)


def _object(line: bytes) -> dict[str, Any] | None:
    """What a line holds; None where it was cut off while it was written."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
