"""The files of one run.

    runs/<name>/
        config.yaml      the resolved configuration
        made_with.json   the same, and digests of the recipe's code: what a resumed run is compared with
        metrics.jsonl    one object per step
        events.jsonl     one object per event
        checkpoints/     joint checkpoints, newest last
        logs/            one file per actor process
        store/           the journal of the experience store, and samples beyond its memory limit
        samples.sqlite   trajectories of the last steps and of all evaluations, for people (``samples/``)
        trace/           spans: what each part did, from when to when (``spans/``)
        opponents/       past versions of policies that are opponents, and the results against them
        suspended/       training states beyond the memory for them, while the run runs
        report.html      written at the end
        sinks/           series that a resumed run extends (``monitoring/sinks/sink_series.py``), and sinks' folders
        address          of the launcher, while it runs
        gateway.key      of services that open sessions
        lock             locked by the process that works on the run

A new run never touches an existing folder; a resumed run first removes the metrics of later steps than its checkpoint.

All is this user's alone, also with a umask that allows more: folders have mode 0700, files 0600. No part of a run is a
link: through a link that stands there already any other file could be written.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ...core.durable.files import FOLDER_MODE, open_private, replace_private, sync
from ..errors import RunDirectoryError
from .json_lines import KeptLines, keep_lines
from .line_writer import words_of_steps

_STEP: Final = re.compile(r'"step": (\d+)[,}]')


class RunDirectory:
    """Paths of one run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.made_with = path / "made_with.json"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.store = path / "store"
        self.samples = path / "samples.sqlite"
        self.trace = path / "trace"
        self.opponents = path / "opponents"
        self.suspended = path / "suspended"
        self.sinks = path / "sinks"
        self.report = path / "report.html"
        self.control_address = path / "address"
        self.gateway_key = path / "gateway.key"
        self.lock = path / "lock"

    @staticmethod
    def check_new(path: Path) -> None:
        """Raises RunDirectoryError if ``path`` exists or can't be a path; nothing is made."""
        try:
            exists = path.exists() or path.is_symlink()
        except OSError as error:
            raise _refusal(path, error) from None
        if exists:
            raise RunDirectoryError(
                f"{path} exists already: choose another --name, or continue it with --resume {path}"
            )

    @classmethod
    def create(cls, path: Path, config: str) -> "RunDirectory":
        """Makes a new folder. Raises RunDirectoryError if ``path`` exists; it is left as it was."""
        cls.check_new(path)
        try:
            # The folders above it get the umask's mode: they may be for others.
            path.mkdir(mode=FOLDER_MODE, parents=True)
        except OSError as error:
            raise _refusal(path, error) from None
        run = cls(path)
        run.checkpoints.mkdir(mode=FOLDER_MODE)
        run.logs.mkdir(mode=FOLDER_MODE)
        replace_private(run.config, config.encode(), durable=True)
        # A checkpoint is safe only if all folders above it are: their names are forced to the disk too.
        sync(path)
        # A folder for others may not be listed, or has no fsync over a network.
        with contextlib.suppress(OSError):
            sync(path.parent)
        return run

    @classmethod
    def existing(cls, path: Path) -> "RunDirectory":
        """Opens the folder of a run. Raises RunDirectoryError if ``path`` is another folder; it is left as it was."""
        return cls._with_parts(path, "config", "checkpoints", "logs")

    @classmethod
    def recorded(cls, path: Path) -> "RunDirectory":
        """The folder of a run to be read, also after its checkpoints were deleted to free the disk. Raises
        RunDirectoryError if it has no config."""
        return cls._with_parts(path, "config")

    @classmethod
    def _with_parts(cls, path: Path, *parts: str) -> "RunDirectory":
        run = cls(path)
        for part in (getattr(run, name) for name in parts):
            if not part.exists():
                raise RunDirectoryError(f"{path} is not a run directory: it has no {part.name}")
        return run

    def check_no_links(self) -> None:
        """Raises RunDirectoryError, which names it, if a file or folder of the run is a link."""
        written = (
            self.checkpoints,
            self.logs,
            self.store,
            self.opponents,
            self.suspended,
            self.sinks,
            self.trace,
        )
        for folder, folders, files in os.walk(self.path):
            directory = Path(folder)
            for path in (directory / name for name in (*folders, *files)):
                _check_no_link(path)
            if directory == self.path:  # others hold what libraries have written: wandb makes links
                folders[:] = [name for name in folders if directory / name in written]

    def log_of(self, actor: str) -> Path:
        """Raises RunDirectoryError if the actor has none."""
        log_files = {path.stem: path for path in sorted(self.logs.glob("*.log"))}
        if actor not in log_files:
            raise RunDirectoryError(
                f"{self.path} has no log of {actor!r}; there are: {', '.join(log_files) or 'none'}"
            )
        return log_files[actor]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the run. Raises RunDirectoryError if another process works on it, or the lock is a link."""
        _check_no_link(self.lock)
        with open_private(self.lock, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunDirectoryError(f"{self.path}: another process is working on this run") from None
            yield

    def forget_after(self, step: int) -> list[str]:
        """Removes the metrics of steps after ``step``, which a resumed run repeats, and damaged lines. Returns warnings
        about these, about a last one that a crash cut off, and about steps up to ``step`` that are missing."""

        def is_step(record: Mapping[str, Any]) -> bool:
            return type(record.get("step")) is int

        def is_kept(record: Mapping[str, Any]) -> bool:
            return bool(1 <= record["step"] <= step)

        metrics = keep_lines(self.metrics, is_step, is_kept, key=lambda record: record["step"])
        events = keep_lines(self.events, lambda record: "event" in record, lambda record: True)
        warnings = [*_damages(self.metrics, metrics, step), *_damages(self.events, events, step)]
        missing = {*range(1, step + 1)} - {record["step"] for record in metrics.objects}
        if missing:
            warnings.append(f"{self.metrics} lacks {words_of_steps(missing)}: not written, or lost")
        return warnings


def _damages(path: Path, lines: KeptLines, last_step: int) -> Iterator[str]:
    """``last_step``: the last one that the run keeps."""
    for line, text in lines.damaged:
        yield f"{path}, line {line}: damaged, was removed: {text!r}"
    if lines.torn is not None:
        step = _STEP.search(lines.torn)
        repeated = ", which is trained again," if step and int(step[1]) > last_step else ""
        of_step = f" of step {step[1]}{repeated}" if step else ""
        yield f"{path}: the last line{of_step} was cut off by a crash, and was removed: {lines.torn!r}"


def _check_no_link(path: Path) -> None:
    if path.is_symlink():
        raise RunDirectoryError(
            f"{path} is a link to {path.readlink()}, and a run writes into its own folder alone: put the file or "
            "folder itself in its place"
        )


def _refusal(path: Path, error: OSError) -> RunDirectoryError:
    place = next(folder for folder in path.absolute().parents if os.access(folder, os.F_OK))
    return RunDirectoryError(
        f"{path} can't be made: {error.strerror}, in {place}; --runs names another folder for runs"
    )
