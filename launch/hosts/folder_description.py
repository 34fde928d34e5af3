"""The folder of all runs as a run sees it: its file system, its room, and the clock of the host that serves it."""

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_SHARED: Final = (
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse.",
    "glusterfs",
    "gpfs",
    "lustre",
    "nfs",
    "smb",
    "wekafs",
)
_LEAST_BYTES: Final = 1 << 30
_MOST_SKEW_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class FolderDescription:
    """``path``: the folder, or the one that exists and that it would be made in. ``file_system``: its type.
    ``shared``: other hosts may see it too. ``clock_ahead_s``: seconds by which the clock that dates its files is ahead
    of this host's; None if no file can be written, for ``refused``."""

    path: str
    file_system: str
    shared: bool
    free_bytes: int
    clock_ahead_s: float | None
    refused: str

    def problems(self) -> list[str]:
        """The reasons why a run would fail or mislead in this folder, each a sentence with its remedy; empty if a run
        may begin."""
        problems = []
        if self.clock_ahead_s is None:
            problems.append(
                f"no file can be written in {self.path}: {self.refused}. Name another folder by --runs"
            )
        elif abs(self.clock_ahead_s) > _MOST_SKEW_S:
            problems.append(
                f"the clock of the file server of {self.path} differs by {self.clock_ahead_s:+.1f} s from this host's: "
                "set both by NTP, or events of several hosts seem to be out of order"
            )
        if self.free_bytes < _LEAST_BYTES:
            problems.append(
                f"{self.path} has {self.free_bytes >> 20} MiB free: checkpoints are kept there; make room, or name "
                "another folder by --runs"
            )
        return problems


def describe_folder(path: Path) -> FolderDescription:
    """Leaves nothing behind: it writes a file without a name to read its date."""
    path = path.absolute()
    path = next(folder for folder in (path, *path.parents) if folder.is_dir())
    kind = _file_system(path)
    ahead, refused = None, ""
    try:
        ahead = _clock_ahead_s(path)
    except OSError as error:
        refused = error.strerror or str(error)
    shared = kind.startswith(_SHARED)
    return FolderDescription(str(path), kind, shared, shutil.disk_usage(path).free, ahead, refused)


def _clock_ahead_s(folder: Path) -> float:
    """Tenths of a second; 0 if the file's date is between the times before and after the write."""
    before = time.time()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")
        file.flush()
        dated = os.fstat(file.fileno()).st_mtime
    after = time.time()
    # The kernel dates a file by its last tick, up to 10 ms before the write: finer than tenths would be its noise.
    return round(dated - min(max(dated, before), after), 1)


def _file_system(folder: Path) -> str:
    """The type of the mount that ``folder`` is on."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in (folder, *folder.parents) if parent in mounts), "unknown")
