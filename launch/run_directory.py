"""The files of one run.

runs/<name>/
    config.yaml      the resolved configuration
    metrics.jsonl    one object per step
    events.jsonl     what happened, one object per event
    checkpoints/     joint checkpoints, newest last
    logs/            one file per actor process
    report.html      written at the end
    lock             held while a process works on the run
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ..core.errors import RunDirectoryError


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"

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
        """One that a run has made. Raises RunDirectoryError where ``path`` is none."""
        run = cls(path)
        if not run.config.is_file():
            raise RunDirectoryError(f"{path} is no run directory: it has no config.yaml")
        run.checkpoints.mkdir(exist_ok=True)
        run.logs.mkdir(exist_ok=True)
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
        """Drops the metrics of steps after ``step``, which a resumed run takes again, and a torn last line."""
        if not self.metrics.exists():
            return
        kept = [
            line for line in self.metrics.read_text().splitlines() if _step_of(line, beyond=step + 1) <= step
        ]
        temporary = self.metrics.with_suffix(".tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        temporary.rename(self.metrics)

    def last_metrics(self) -> dict[str, Any] | None:
        if not self.metrics.exists():
            return None
        lines = self.metrics.read_text().splitlines()
        last: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
        return last


class JsonLines:
    """Appends objects to a file, a line each, flushed at once."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False, default=str) + "\n")
        self._file.flush()

    def event(self, event: str, **fields: Any) -> None:
        self.write({"time": round(time.time(), 3), "event": event, **fields})

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _step_of(line: str, beyond: int) -> int:
    """The step that a metrics line is of; ``beyond`` for a line that was cut off while it was written."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return beyond
