"""The policies in a run's newest checkpoint, as their simulated trainers have saved them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....actors.json_files import read_json
from ....actors.orchestrator import checkpoint
from ....actors.trainer.backends.simulated_policy import STATE_FILE
from ...run_folder.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class SavedPolicy:
    """A policy in a checkpoint. ``digest``: of the sums of all its steps. ``trained``: the sample ids of each step, by
    the version that it has changed."""

    version: int
    digest: int
    trained: Mapping[int, Sequence[str]]


def newest_checkpoint(directory: RunDirectory) -> Path | None:
    """The folder of the newest complete checkpoint; None without one."""
    folders = checkpoint.complete(directory.checkpoints) if directory.checkpoints.exists() else []
    return folders[-1] if folders else None


def read_saved(directory: RunDirectory, policies: Iterable[str]) -> dict[str, SavedPolicy]:
    """Those of the newest checkpoint; empty without one. Raises CheckpointIncomplete naming the file that is missing or
    damaged."""
    if (folder := newest_checkpoint(directory)) is None:
        return {}
    checkpoint.check_files(folder)
    return {name: _read(folder / name / STATE_FILE) for name in policies}


def newest_version(directory: RunDirectory, policy: str) -> int:
    """The newest version of a policy in any checkpoint, complete or not; 0 without one."""
    files = directory.checkpoints.glob(f"step_*/{policy}/{STATE_FILE}")
    return max((read_json(file)["version"] for file in files), default=0)


def _read(file: Path) -> SavedPolicy:
    state = read_json(file)
    trained = {int(version): ids for version, ids in state["trained"].items()}
    return SavedPolicy(state["version"], state["digest"], trained)
