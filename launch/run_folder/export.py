"""A policy of a checkpoint as a folder that transformers loads, or peft if it is a LoRA adapter: weights, config and
tokenizer, no training state."""

import shutil
from pathlib import Path
from typing import Final

from ...actors.errors import CheckpointIncomplete
from ...actors.trainer.backends.simulated_policy import STATE_FILE as SIMULATED_FILE
from ...actors.trainer.saved_policy import ADAPTER_CONFIG_FILE, ADAPTER_FILE, TRAINING_FILES
from ..errors import RunDirectoryError
from .run_directory import RunDirectory
from .saved_policies import saved_policy

_PARTIAL: Final = ".partial"


def export(
    directory: RunDirectory, policy: str, step: int | None, target: Path, *, merged: bool = False
) -> Path:
    """Copies the policy to ``target``, which appears when it is complete; returns the folder that it was copied from.

    ``merged``: a LoRA adapter is added to the weights of its base, and the whole model is written. Raises
    RunDirectoryError if ``target`` exists and is not an empty folder, if the policy's model is simulated, or if it is
    whole and shall be merged; as ``saved_policy``; and CheckpointMismatch if the base is not the one that the adapter
    was trained over.
    """
    source = saved_policy(directory, policy, step)
    if (source / SIMULATED_FILE).exists():
        raise RunDirectoryError(f"policy {policy} of {directory.path} has no weights: its model is simulated")
    if merged and not (source / ADAPTER_FILE).exists():
        raise RunDirectoryError(f"policy {policy} of {directory.path} is a whole model: leave out --merged")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise RunDirectoryError(f"{target} exists and is not an empty folder: choose another one")
    partial = target.with_name(target.name + _PARTIAL)
    if partial.exists():
        shutil.rmtree(partial)  # of an export that was killed
    try:
        _copy(source, partial)
        if merged:
            _merge(source, partial)
        partial.replace(target)
    except OSError as error:
        if source.exists():
            raise
        raise CheckpointIncomplete(source, "removed while it was copied: the run has newer ones") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return source


def _copy(source: Path, target: Path) -> None:
    """Copies all but the training state, with modes as the umask says: an export may be for others, a run is not."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_dir():
            _copy(path, target / path.name)
        elif path.name not in TRAINING_FILES:
            shutil.copyfile(path, target / path.name)


def _merge(source: Path, target: Path) -> None:
    """Writes the whole model in place of the adapter."""
    # Imported here: torch and peft take seconds.
    from ...actors.trainer.backends.torch_policy.merged_model import write_merged

    write_merged(source, target)
    for name in (ADAPTER_FILE, ADAPTER_CONFIG_FILE):
        (target / name).unlink()
