"""Forcing files and folders to the disk."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Forces ``folder`` and every file below it to the disk, so that a rename may announce it afterwards."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Forces one file, or the names in one folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
