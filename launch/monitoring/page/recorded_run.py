"""A run's folder, read as it grows: the page's data are made of it. Any file may be missing, torn or of an older
version; what can't be read is counted, and the rest is shown."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ....actors.errors import ConfigError
from ....actors.run_events import (
    Evaluated,
    PolicyResumed,
    PolicySuspended,
    RunEnded,
    RunResumed,
    RunStarted,
)
from ...config.config_reading import flattened, read_yaml
from ...errors import SamplesUnreadable
from ...run_folder.growing_file import GrowingFile
from ...run_folder.json_lines import object_of
from ...run_folder.logged_event import LoggedEvent
from ...run_folder.run_directory import RunDirectory
from ...run_folder.run_findings import run_findings
from ...run_folder.samples.reader import Samples
from ...run_folder.samples.showing import TokenTexts
from ...run_folder.stored_run import State, is_alive, state_of
from ..formatting import number
from ..slowness.finding import Finding
from ..timeline.timeline import Timeline
from .curves import Curves

COPIES: Final = (PolicySuspended, PolicyResumed)
"""Events that a shared pool may write many of in a step."""

_KEPT_EVENTS: Final = 20_000
_LONGEST_TEXT: Final = 20_000
_EVALUATION: Final = b'"eval/'
_STEP_LIMIT: Final = 10**12
_ANSWER_S: Final = 10.0
_FINDINGS_S: Final = 5.0


class RecordedRun:
    """``path``: the run's folder, whose last part is the run's name. ``live``: the answer of its process, the fields of
    ``RunStatus``; None without one. ``frozen``: it is read once, maybe by the run's process: an end that is written
    counts. Methods that read are for any thread, under ``reading``."""

    def __init__(self, path: Path, *, frozen: bool = False) -> None:
        self.path = path
        self._frozen = frozen
        self.directory = RunDirectory(path)
        self.name = path.resolve().name
        self.live: Mapping[str, Any] | None = None
        self.revision = 0
        self._lock = threading.Lock()
        self._metrics = GrowingFile(self.directory.metrics)
        self._events = GrowingFile(self.directory.events)
        self._state: State | None = None
        self._samples: Samples | None = None
        self._samples_lock = threading.Lock()
        self._timeline = Timeline(self.directory)
        self._timeline_lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self.curves = Curves()
        self.steps_read = 0
        self.last_step = 0
        self.last_time_s = 0.0
        self.resumes: list[int] = []
        self.events: deque[LoggedEvent] = deque(maxlen=_KEPT_EVENTS)
        self.copies: deque[LoggedEvent] = deque(maxlen=_KEPT_EVENTS)
        self.lives: list[LoggedEvent] = []
        self._of_steps: dict[int, Mapping[str, float]] = {}
        self._of_events: dict[int, Mapping[str, float]] = {}
        self.unreadable = 0
        self.config: Mapping[str, Any] = {}
        self._config_version: tuple[int, int, int] | None = None
        self._findings: list[Finding] = []
        self._findings_s = -_FINDINGS_S

    @contextmanager
    def reading(self) -> Iterator["RecordedRun"]:
        """The run as it is at one moment, up to date."""
        with self._lock:
            self._read()
            yield self

    def refresh(self) -> int:
        """Reads what was added, and returns the revision, which grows with every change."""
        with self._lock:
            self._read()
            return self.revision

    def set_live(self, status: Mapping[str, Any] | None) -> None:
        """Takes the answer of the run's process. A change of words is a change of the run; its clock is not."""
        with self._lock:
            before, self.live = self.live, status
            if _words(before) != _words(status):
                self.revision += 1

    @contextmanager
    def samples(self) -> Iterator[Samples]:
        """Its recorded trajectories, for any thread, also while others are ``reading``: the first look at a hundred
        thousand takes seconds. Raises SamplesUnreadable, RunDirectoryError."""
        with self._samples_lock:
            if self._samples is None:
                self._samples = Samples(self.path, _ANSWER_S)
            try:
                yield self._samples
            except SamplesUnreadable:
                self._samples.close()
                self._samples = None
                raise

    @contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """Its spans, for any thread, also while others are ``reading``: the first look at two million takes seconds."""
        with self._timeline_lock:
            yield self._timeline

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Raises ConfigError."""
        return TokenTexts(self.path)

    def close(self) -> None:
        """Closes the file of trajectories."""
        with self._samples_lock:
            if self._samples is not None:
                self._samples.close()
                self._samples = None

    @property
    def state(self) -> State:
        """As `flexmarl runs list` says it."""
        return self._state or "not started"

    @property
    def findings(self) -> list[Finding]:
        """The reasons for slow steps, and for learning little, in the newest steps; of a run that runs, up to
        ``_FINDINGS_S`` old."""
        # A page asks at every step, and they take as long as the other parts of its panel; one step changes little in
        # a window of fifty.
        now_s = time.monotonic()
        if self.state != "running" or now_s - self._findings_s >= _FINDINGS_S:
            self._findings = run_findings(self.directory, self.config)
            self._findings_s = now_s
        return self._findings

    @property
    def evaluations(self) -> dict[int, Mapping[str, float]]:
        """Metrics by name, by step. One before training, or one that a resumed run caught up on, is in no step's."""
        return dict(sorted({**self._of_events, **self._of_steps}.items()))

    @property
    def ended(self) -> RunEnded | None:
        """The end of its last life, None while it runs or if it was killed."""
        event = self.lives[-1].event if self.lives else None
        return event if isinstance(event, RunEnded) else None

    # ------------------------------------------------------------------ inside

    def _read(self) -> None:
        if self._metrics.is_replaced() | self._events.is_replaced():
            self._metrics.rewind()
            self._events.rewind()
            self._forget()
            self.revision += 1
        before = self.steps_read, len(self.lives), self.unreadable
        changes = sum(self._take_step(line) for line in self._metrics.lines())
        changes += sum(self._take_event(line) for line in self._events.lines())
        if changes:
            self.curves.replace("eval", self.evaluations)
        self.curves.flush()
        last = self.lives[-1].event if self.lives else None
        alive = is_alive(self.directory) and not (self._frozen and isinstance(last, RunEnded))
        state = state_of(last, alive=alive)
        changes += self._read_config()
        if changes or state != self._state or before != (self.steps_read, len(self.lives), self.unreadable):
            self._state = state
            self.revision += 1

    def _read_config(self) -> bool:
        """Reads the config if it is another one than before, as after a resume with other settings; True then. One
        that can't be read leaves the last one."""
        try:
            status = self.directory.config.stat()
            version = status.st_ino, status.st_mtime_ns, status.st_size
            if version == self._config_version:
                return False
            self._config_version = version
            config = dict(flattened(read_yaml(self.directory.config)))
        except (OSError, ConfigError):
            return False
        self.config = config
        return True

    def _take_step(self, line: bytes) -> bool:
        record = object_of(line)
        step = record.pop("step", None) if record else None
        if record is None or type(step) is not int or not 0 <= step < _STEP_LIMIT:
            self.unreadable += bool(line.strip())
            return False
        time_s = number(record.get("time_s")) or 0.0
        if self.steps_read and (step <= self.last_step or time_s < self.last_time_s):
            self.resumes.append(step)
        if step <= self.last_step:
            self.curves.cut(step)
            self._of_steps = {at: metrics for at, metrics in self._of_steps.items() if at < step}
        self.curves.take(step, record)
        metrics = {
            key.removeprefix("eval/"): finite
            for key, value in (record.items() if _EVALUATION in line else ())
            if key[:5] == "eval/" and (finite := number(value)) is not None
        }
        if metrics:
            self._of_steps[step] = metrics
        self.last_step, self.last_time_s = step, time_s
        self.steps_read += 1
        return True

    def _take_event(self, line: bytes) -> bool:
        record = object_of(line)
        if record is None:
            self.unreadable += bool(line.strip())
            return False
        shortened = {key: _cut(value) for key, value in record.items()}
        logged = LoggedEvent.of(shortened)
        match logged.event:
            case PolicySuspended() | PolicyResumed():
                self.copies.append(logged)
                return True
            case RunStarted() | RunEnded():
                self.lives.append(logged)
            case RunResumed(step=resumed):
                self.lives.append(logged)
                self._of_events = {at: metrics for at, metrics in self._of_events.items() if at <= resumed}
            case Evaluated(step=step, metrics=metrics):
                self._of_events[step] = metrics
        self.events.append(logged)
        return True


def _words(status: Mapping[str, Any] | None) -> tuple[object, ...]:
    return () if status is None else tuple(status[name] for name in ("step", "phase", "causes", "instances"))


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return f"{value[:_LONGEST_TEXT]}... ({len(value)} characters, all of them in events.jsonl)"
    return value
