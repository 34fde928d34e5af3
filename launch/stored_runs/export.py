"""A policy of a checkpoint as a folder that transformers loads: weights, config and tokenizer, no training state."""

import shutil
from pathlib import Path
from typing import Final

from ...actors.errors import CheckpointIncomplete
from ...actors.names import PolicyName, Step
from ...actors.orchestrator import checkpoint
from ...actors.trainer.backends.simulated_policy import STATE_FILE as SIMULATED_FILE
from ...actors.trainer.saved_policy import TRAINING_FILES
from ..errors import RunDirectoryError
from ..run_directory import RunDirectory
from .stored_run import saved_steps

_PARTIAL: Final = ".partial"


def saved_policy(directory: RunDirectory, policy: str, step: int | None) -> Path:
    """The folder of ``policy`` in the checkpoint after ``step`` (None: the newest), once its files have been compared
    with their digests.

    Raises RunDirectoryError if there is no such checkpoint or policy, or if the policy has no weights because its model
    is simulated; CheckpointIncomplete naming a damaged file.
    """
    saved = saved_steps(directory)
    if not saved:
        raise RunDirectoryError(f"{directory.path} has no checkpoint yet")
    if step is not None and step not in saved:
        there = ", ".join(map(str, saved))
        raise RunDirectoryError(f"{directory.path} has no checkpoint of step {step}; there are: {there}")
    joint = checkpoint.committed_folder(directory.checkpoints, Step(saved[-1] if step is None else step))
    policies = sorted(path.name for path in joint.iterdir() if path.is_dir())
    if policy not in policies:
        raise RunDirectoryError(f"{joint} has no policy {policy!r}; there are: {', '.join(policies)}")
    folder = joint / policy
    if (folder / SIMULATED_FILE).exists():
        raise RunDirectoryError(f"policy {policy} of {directory.path} has no weights: its model is simulated")
    checkpoint.check_files(joint, PolicyName(policy))
    return folder


def export(directory: RunDirectory, policy: str, step: int | None, target: Path) -> Path:
    """Copies the policy to ``target``, which appears when it is complete; returns the folder that it was copied from.

    Raises RunDirectoryError if ``target`` exists and is not an empty folder, and as ``saved_policy``.
    """
    source = saved_policy(directory, policy, step)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise RunDirectoryError(f"{target} exists and is not an empty folder: choose another one")
    partial = target.with_name(target.name + _PARTIAL)
    if partial.exists():
        shutil.rmtree(partial)  # of an export that was killed
    try:
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns(*TRAINING_FILES))
        partial.replace(target)
    except OSError as error:
        if source.exists():
            raise
        raise CheckpointIncomplete(source, "removed while it was copied: the run has newer ones") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return source
