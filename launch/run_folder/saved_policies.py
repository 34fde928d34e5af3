"""The policies in a run's checkpoints."""

from pathlib import Path

from ...actors.names import PolicyName, Step
from ...actors.orchestrator import checkpoint
from ..errors import RunDirectoryError
from .run_directory import RunDirectory


def saved_steps(directory: RunDirectory) -> tuple[int, ...]:
    """The steps of the complete checkpoints, ascending."""
    folders = checkpoint.complete(directory.checkpoints)
    return tuple(int(folder.name.removeprefix("step_")) for folder in folders)


def policies_of(directory: RunDirectory, step: int | None) -> list[str]:
    """The policies in the checkpoint after ``step`` (None: the newest), at least one.

    Raises RunDirectoryError if there is no such checkpoint, CheckpointIncomplete if its manifest is damaged.
    """
    return sorted(checkpoint.policies(_joint(directory, step)))


def saved_policy(directory: RunDirectory, policy: str, step: int | None) -> Path:
    """The folder of ``policy`` in the checkpoint after ``step`` (None: the newest), once its files have been compared
    with their digests.

    Raises RunDirectoryError if there is no such checkpoint or policy, CheckpointIncomplete as ``check_files``.
    """
    joint = _joint(directory, step)
    policies = policies_of(directory, step)
    if policy not in policies:
        raise RunDirectoryError(f"{joint} has no policy {policy!r}; there are: {', '.join(policies)}")
    checkpoint.check_files(joint, PolicyName(policy))
    return joint / policy


def _joint(directory: RunDirectory, step: int | None) -> Path:
    saved = saved_steps(directory)
    if not saved:
        raise RunDirectoryError(f"{directory.path} has no checkpoint yet")
    if step is not None and step not in saved:
        steps = ", ".join(map(str, saved))
        raise RunDirectoryError(f"{directory.path} has no checkpoint of step {step}; there are: {steps}")
    return checkpoint.committed_folder(directory.checkpoints, Step(saved[-1] if step is None else step))
