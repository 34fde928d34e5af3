"""Private folders (0700) for sockets, keys and shared memory.

Every process that uses such a folder holds a shared lock on it (flock(2)), which the kernel releases however the
process ends. A folder whose lock is free was left behind by killed processes: the next process of the same user that
makes a folder beside it removes it.
"""

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from ..errors import UnsafeDirectory
from ..telemetry import get_logger

log = get_logger(__name__)

# The number of the process that makes it comes before the random part.
_NAME = re.compile(r"flexmarl-\d+-\w+")


class PrivateDirectory:
    """A new folder, in use until ``remove``. Raises OSError."""

    def __init__(self, base: Path | None = None) -> None:
        """``base``: the folder that holds it; None: the system's for temporary files."""
        base = Path(tempfile.gettempdir()) if base is None else base
        _remove_left_behind(base)
        draft = Path(tempfile.mkdtemp(prefix=f".flexmarl-{os.getpid()}-", dir=base))
        self._lock: int | None = _open(draft)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        # Only now has the directory a name that others look for: it is locked before.
        self.path = draft.rename(base / draft.name[1:])

    def remove(self) -> None:
        """Removes the folder with all its files. Can be repeated."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


@asynccontextmanager
async def private_directory(base: Path) -> AsyncIterator[Path]:
    """A new private folder, removed at the end with all its files."""
    directory = PrivateDirectory(base)
    try:
        yield directory.path
    finally:
        directory.remove()


def use_with_others(path: Path) -> None:
    """This process uses a folder that another one has made, until it ends."""
    with suppress(OSError):  # that process has ended, and the folder with it
        fcntl.flock(_open(path), fcntl.LOCK_SH | fcntl.LOCK_NB)


def check_private(path: Path) -> None:
    """Raises UnsafeDirectory if another user may have access to a folder, or it does not exist; OSError."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise UnsafeDirectory(path, "it does not exist", "make it, with mode 0700") from None
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafeDirectory(path, "it is a file", "name a folder")
    if status.st_uid != os.geteuid():
        raise UnsafeDirectory(
            path, f"it belongs to user {status.st_uid}, not {os.geteuid()}", "name a folder of this user"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077 or mode & 0o700 != 0o700:
        problem = f"its mode is {mode:04o}: other users may reach its files"
        if not mode & 0o077:
            problem = f"its mode is {mode:04o}: this user can't make files in it"
        raise UnsafeDirectory(path, problem, f"`chmod 700 {path}`")


def _remove_left_behind(base: Path) -> None:
    """Removes the folders in ``base`` whose processes have all ended."""
    with suppress(OSError), os.scandir(base) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):  # it is in use
                    _remove_unused(Path(entry.path))


def _remove_unused(path: Path) -> None:
    """Raises OSError if the folder is in use."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_uid == os.geteuid():
            shutil.rmtree(path)
            log.info("the folder of processes that were killed is removed", folder=str(path))
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
