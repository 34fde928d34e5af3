"""The panel *Now*: step and phase, the things that a run stands still for, the failure with the next step, news."""

import dataclasses
import shlex
import time
from typing import Any, Final

from ....actors.run_events import (
    CheckpointSaved,
    RunContinued,
    RunResumed,
    RunStalled,
    RunStarted,
    TrajectoryFailed,
)
from ...run_folder.logged_event import LoggedEvent
from ..console.event_text import note_of, warning_of
from ..console.progress_state import one_line
from .curves import Query
from .headline import headline
from .recorded_run import RecordedRun

_NEWS: Final = 60
_BAR_POINTS: Final = 240
_RECENT: Final = 50
_LIVE: Final = ("phase", "idle_s", "causes", "instances", "processes")
_PARTS: Final = (
    "rollout_s",
    "overlap_s",
    "step_s",
    "failed_trajectories",
    "tokens_per_s",
    "time_s",
    "tokens",
)


def view(run: RecordedRun, query: Query) -> dict[str, Any]:
    """``query`` has no parameters."""
    steps = run.config.get("training.steps")
    return {
        "headline": headline(run),
        "state": run.state,
        "mode": str(run.config.get("mode", "")),
        "recipe": str(run.config.get("recipe", "")).rstrip("/").rpartition("/")[2],
        "step": run.last_step,
        "steps": steps if isinstance(steps, int) else None,
        "began": next((life.time for life in run.lives if isinstance(life.event, RunStarted)), None),
        "now": time.time(),
        "pace_s": _pace_s(run),
        "live": _live(run),
        "standstill": _standstill(run),
        "failure": _failure(run),
        "figures": {key: run.curves[key].thinned(_BAR_POINTS) for key in _PARTS if key in run.curves},
        "resumes": run.resumes,
        "policies": {
            name: int(run.curves[f"version/{name}"].values[-1]) for name in run.curves.names("version")
        },
        "findings": [dataclasses.asdict(finding) for finding in run.findings],
        "unreadable": run.unreadable,
        "news": _newest_events(run),
        "failed": _failed_trajectories(run),
    }


def _pace_s(run: RecordedRun) -> float | None:
    """Seconds per step over the last steps of this life, with all that happens between them."""
    curve = run.curves["time_s"]
    steps, times = curve.steps[-_RECENT:], curve.values[-_RECENT:]
    if len(steps) < 2 or times[-1] <= times[0]:
        return None
    return float((times[-1] - times[0]) / (steps[-1] - steps[0]))


def _live(run: RecordedRun) -> dict[str, Any] | None:
    """The answer of the run's process, while it runs."""
    if run.live is None or run.state != "running":
        return None
    return {name: run.live[name] for name in _LIVE}


def _standstill(run: RecordedRun) -> dict[str, Any] | None:
    """The last standstill, if nothing has ended since."""
    for logged in reversed(run.events):
        if isinstance(logged.event, RunStalled):
            return {"seconds": logged.event.seconds, "causes": list(logged.event.causes), "time": logged.time}
        if isinstance(logged.event, RunContinued | RunStarted | RunResumed):
            return None
    return None


def _failure(run: RecordedRun) -> dict[str, Any] | None:
    ended = run.ended
    if ended is None or ended.stopped or not ended.error:
        return None
    saved = any(isinstance(logged.event, CheckpointSaved) for logged in run.events)
    return {
        "error": ended.error,
        "traceback": ended.traceback or "",
        "next": f"flexmarl {'train --resume' if saved else 'logs'} {shlex.quote(str(run.path))}",
        "next_words": "Continue from the newest checkpoint with"
        if saved
        else "There is no checkpoint. Its log:",
    }


def _failed_trajectories(run: RecordedRun) -> dict[str, Any] | None:
    """The number of trajectories that failed, and the first of them that is known."""
    events = [logged.event for logged in run.events if isinstance(logged.event, TrajectoryFailed)]
    count = max(len(events), int(sum(run.curves["failed_trajectories"].values)))
    first = next(
        ({"name": event.trajectory, "text": event.traceback or event.error} for event in events), None
    )
    return {"count": count, "first": first} if count else None


def _newest_events(run: RecordedRun) -> list[dict[str, Any]]:
    """The newest events that a person wants to know, the newest first."""
    news: list[dict[str, Any]] = []
    for logged in reversed(run.events):
        line = _line(logged)
        if line is not None:
            news.append(line)
        if len(news) == _NEWS:
            break
    return news


def _line(logged: LoggedEvent) -> dict[str, Any] | None:
    if logged.event is None:
        return None
    warning = warning_of(logged.event)
    text = warning or note_of(logged.event, 1)
    if isinstance(logged.event, RunStalled):
        text = f"{text} {'; '.join(logged.event.causes)}"
    if not text:
        return None
    return {"time": logged.time, "kind": logged.name, "warning": warning is not None, "text": one_line(text)}
