"""Files and folders of this user alone, and forcing them to the disk."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

FILE_MODE = 0o600
FOLDER_MODE = 0o700


def open_private(path: Path, mode: str) -> IO[Any]:
    """Opens a file as ``open`` does, texts as UTF-8. A new file has mode 0600, also with a umask that allows more.

    Raises OSError as ``open_descriptor`` does."""
    encoding = None if "b" in mode else "utf-8"
    # A Path's ``open`` has no opener.
    return open(path, mode, encoding=encoding, opener=lambda _, flags: open_descriptor(path, flags))


def open_descriptor(path: Path, flags: int) -> int:
    """Opens a file as ``os.open`` does. A new file has mode 0600, also with a umask that allows more.

    Raises OSError if ``path`` is a link: through a link that stands there already any other file could be written."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(
                errno.ELOOP, f"it is a link to {path.readlink()}, and is not followed", str(path)
            ) from None
        raise


def replace_private(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Writes a file of mode 0600 that appears as a whole or not at all. A link in its place is replaced too. Of several
    writers the last one's content stays. ``durable``: forces it to the disk before it appears. Raises OSError."""
    with draft_of(path) as draft:
        draft.write_bytes(content)
        if durable:
            sync(draft)


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Makes an empty file of mode 0600 beside ``path``, which takes its place at the end of the context; after an error
    it is removed. Raises OSError."""
    # A name of its own for each draft, which no file has: two writers with one name would rename each other's halves,
    # and the draft of a process that was killed may be a file of another user or another mode. A hidden name, as a
    # killed process leaves its draft behind.
    descriptor, name = tempfile.mkstemp(".tmp", f".{path.name}.", path.parent)
    os.close(descriptor)
    draft = Path(name)
    try:
        yield draft
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def make_private_folder(path: Path) -> None:
    """Makes a folder, and those above it that are missing, with mode 0700. One that exists stays as it is."""
    # One by one: ``mkdir(parents=True)`` gives its mode to the last folder only, and the others what the umask allows.
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def make_private(folder: Path) -> None:
    """Gives ``folder`` and all below it the modes of this user alone: a library has written there as the umask says."""
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink():
            path.chmod(FOLDER_MODE if path.is_dir() else FILE_MODE)


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
