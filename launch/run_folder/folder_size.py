"""The size of a folder that another process works in."""

import contextlib
import os
import stat
from pathlib import Path


def folder_bytes(folder: Path) -> int:
    """The bytes of all files below ``folder``; without those that are removed or renamed meanwhile."""
    total = 0
    # Not ``rglob``, which fails at a folder that goes between its listing and its opening: before Python 3.13 it does.
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(Path(parent, name))
                if stat.S_ISREG(status.st_mode):
                    total += status.st_size
    return total
