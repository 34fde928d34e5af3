"""The outcome of a case: what its run has left behind, beside what the same run leaves behind without faults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ....actors.json_files import read_json
from ....actors.orchestrator import checkpoint
from ....actors.trainer.backends.simulated_policy import STATE_FILE
from ...config.run_config import RunConfig
from ...run_folder.json_lines import read_lines
from ...run_folder.run_directory import RunDirectory
from ..simulated_faults import InjectedFault
from ..simulation import simulate
from .chaos_case import ChaosCase
from .observed_store import OBSERVED_STORE, lost_writes

_LIMIT_S: Final = 3600.0
"""Seconds of virtual time: a run of a few that takes longer waits for something that never comes."""


@dataclass(frozen=True, slots=True)
class SavedPolicy:
    """A policy in a checkpoint. ``digest``: of the sums of all its steps. ``trained``: the sample ids of each step, by
    the version that it has changed."""

    version: int
    digest: int
    trained: Mapping[int, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """``staleness``: the most versions that a sample may be older than the one that it changes. ``error``: the one that
    ended the run, or the run without faults; None for one that ended by itself. ``saved``: the policies of the newest
    checkpoint, and ``expected`` those of the run without faults; empty if there is none. ``lost_writes``: see
    ``observed_store.py``. ``injected``: empty if the run has failed."""

    steps: int
    staleness: int
    error: Exception | None
    saved: Mapping[str, SavedPolicy]
    expected: Mapping[str, SavedPolicy]
    events: Sequence[Mapping[str, Any]] = ()
    lost_writes: Sequence[str] = ()
    injected: Sequence[InjectedFault] = ()
    seconds: float = 0.0


def outcome_of(case: ChaosCase, folder: Path) -> Outcome:
    """Plays a case, and the same run without faults, in two new folders within ``folder``. An error of the run is a
    part of its outcome."""
    config = case.config()
    expected: Mapping[str, SavedPolicy] = {}
    injected: Sequence[InjectedFault] = ()
    error, seconds = None, 0.0
    run = RunDirectory(folder / "run")
    try:
        plain = simulate(config, folder / "without", case.seed, keep_log=False, limit_s=_LIMIT_S)
        expected = _read_saved(plain.directory, config)
        played = simulate(
            config, run.path, case.seed,
            hosts=case.hosts, faults=case.link_faults, planned_faults=case.faults, keep_log=False,
            watches=True, stand_ins={"store": OBSERVED_STORE}, limit_s=_LIMIT_S,
        )  # fmt: skip
        injected, seconds = played.injected_faults, played.seconds
    except Exception as problem:  # noqa: BLE001  # every end of a run is a finding
        error = problem
    lost = lost_writes(run.path)
    return Outcome(
        steps=config.training.steps,
        staleness=config.staleness,
        error=error,
        saved=_read_saved(run, config),
        expected=expected,
        events=read_lines(run.events)[0] if run.events.exists() else (),
        lost_writes=lost.read_text(encoding="utf-8").splitlines() if lost.exists() else (),
        injected=injected,
        seconds=seconds,
    )


def _read_saved(directory: RunDirectory, config: RunConfig) -> dict[str, SavedPolicy]:
    """The policies of the newest checkpoint; empty without one."""
    folders = checkpoint.complete(directory.checkpoints) if directory.checkpoints.exists() else []
    return {name: _read(folders[-1] / name / STATE_FILE) for name in config.trained} if folders else {}


def _read(file: Path) -> SavedPolicy:
    state = read_json(file)
    trained = {int(version): ids for version, ids in state["trained"].items()}
    return SavedPolicy(state["version"], state["digest"], trained)
