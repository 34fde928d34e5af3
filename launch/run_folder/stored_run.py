"""One run as its folder shows it, without a process of the run: state, progress, figures, size."""

import fcntl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...actors.errors import ConfigError
from ...actors.run_events import RunEnded, RunEvent, RunResumed, RunStarted
from ..config.config_reading import flattened, read_yaml
from ..errors import RunDirectoryError
from ..monitoring.formatting import number
from .folder_size import folder_bytes
from .run_directory import RunDirectory
from .run_history import History, first_and_last, load_history
from .saved_policies import saved_steps

State = Literal["running", "done", "stopped", "failed", "killed", "not started"]


@dataclass(frozen=True, slots=True)
class StoredRun:
    """``killed``: the run's process ended without a word. ``error``: of a run that failed or was stopped at once.
    ``step``: the last complete one, of ``steps`` in its config (None if the config can't be read). ``evaluation``:
    metrics of the last one by name, after ``evaluated_step``. ``rewards``: means over the last twentieth of the steps,
    by ``reward/<agent>`` and ``turn_reward/<agent>``. ``age_s``: since the run began. ``size_bytes``: of all its files.
    ``config``: by dotted key."""

    path: Path
    recipe: str
    state: State
    error: str | None
    step: int
    steps: int | None
    evaluated_step: int | None
    evaluation: Mapping[str, float]
    rewards: Mapping[str, float]
    wall_s: float
    age_s: float
    size_bytes: int
    checkpoints: tuple[int, ...]
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the run's folder, by which commands find it."""
        return self.path.name


def read_run(path: Path) -> StoredRun:
    """Raises RunDirectoryError if ``path`` is not a run's folder."""
    directory = RunDirectory.existing(path)
    history = load_history(path)
    config = _config(directory)
    evaluated = max(history.evaluations, default=None)
    steps = config.get("training.steps")
    return StoredRun(
        path=path,
        recipe=Path(str(config.get("recipe", "?"))).name.replace("_", "-"),
        state=(state := state_of(_last_life(history), alive=is_alive(directory))),
        error=ends[-1].error
        if state in ("failed", "stopped") and (ends := history.events_of(RunEnded))
        else None,
        step=history.steps[-1].step if history.steps else 0,
        steps=steps if isinstance(steps, int) else None,
        evaluated_step=evaluated,
        evaluation={} if evaluated is None else history.evaluations[evaluated],
        rewards=_rewards(history),
        wall_s=history.wall_s,
        age_s=max(0.0, time.time() - _began(directory, history)),
        size_bytes=folder_bytes(path),
        checkpoints=saved_steps(directory),
        config=config,
    )


def read_runs(folder: Path) -> list[StoredRun]:
    """All runs in ``folder``, the newest first; other folders are left out. Raises RunDirectoryError if there is no
    such folder."""
    if not folder.is_dir():
        raise RunDirectoryError(f"there is no folder {folder}: --runs names the folder of all runs")
    folders = [path for path in folder.iterdir() if (path / "config.yaml").is_file() and _is_run(path)]
    return sorted(map(read_run, folders), key=lambda run: run.age_s)


def is_alive(directory: RunDirectory) -> bool:
    """True if a process works on the run."""
    try:
        with directory.lock.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # no process has ever worked on it
        pass
    return False


def _is_run(path: Path) -> bool:
    try:
        RunDirectory.existing(path)
    except RunDirectoryError:
        return False
    return True


def _config(directory: RunDirectory) -> dict[str, Any]:
    try:
        return dict(flattened(read_yaml(directory.config)))
    except ConfigError:
        return {}


def _began(directory: RunDirectory, history: History) -> float:
    """Unix seconds: of the first event, or of the folder's config if no process has ever worked on the run, or if its
    events have virtual time."""
    if any(isinstance(logged.event, RunStarted) and not logged.event.pid for logged in history.events):
        return directory.config.stat().st_mtime
    times = (number(logged.line.get("time")) for logged in history.events)
    return next((time_s for time_s in times if time_s is not None), directory.config.stat().st_mtime)


def state_of(last: RunEvent | None, *, alive: bool) -> State:
    """``last``: the newest event of the run that is its start, a resume or its end. ``alive``: as ``is_alive``."""
    if alive:
        return "running"
    if last is None:
        return "not started"
    if not isinstance(last, RunEnded):
        return "killed"
    if last.stopped:
        return "stopped"
    return "done" if last.error is None else "failed"


def _last_life(history: History) -> RunEvent | None:
    events = (logged.event for logged in reversed(history.events))
    return next((event for event in events if isinstance(event, RunStarted | RunResumed | RunEnded)), None)


def _rewards(history: History) -> dict[str, float]:
    rewards = {
        f"{figure}/{agent}": first_and_last(history.of_agent(agent, figure))
        for figure in ("reward", "turn_reward")
        for agent in history.agents
    }
    return {name: ends[1] for name, ends in rewards.items() if ends is not None}
