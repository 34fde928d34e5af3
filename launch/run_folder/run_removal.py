"""Removes a run with all its files."""

import shutil

from ..errors import RunDirectoryError
from .run_directory import RunDirectory
from .stored_run import is_alive


def refuse_alive(directory: RunDirectory) -> None:
    """Raises RunDirectoryError if a process works on the run."""
    if is_alive(directory):
        raise RunDirectoryError(f"{directory.path}: a process works on this run; stop it first")


def remove_run(directory: RunDirectory) -> None:
    """Removes the run, under another name first: a removal that is cut short leaves no run with half of its files.
    Raises RunDirectoryError if a process works on it, OSError."""
    refuse_alive(directory)
    with directory.locked():
        path = directory.path
        doomed = path.with_name(f".{path.name}.removed")
        if doomed.exists():
            shutil.rmtree(doomed)
        path.rename(doomed)
        shutil.rmtree(doomed)
