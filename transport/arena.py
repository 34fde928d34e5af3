"""One key's memory: a file of two slots, mapped by the process that owns it and by its readers.

    page 0    magic | bytes per slot | per slot: generation, version
    slot 0    one version's bucket
    slot 1    another version's bucket

The slots are written in turn, so the version published last stays whole while the next is written. A
slot's generation is a sequence lock: odd while it is written, even when it is published, never repeated.
A reader that finds the generation of its handle before and after copying has copied exactly that version.
Generations are aligned machine words stored by one instruction. x86-64 keeps stores and loads in order; on
other machines the digest of the copied bytes detects a mix of versions.

The module works on bytes, without torch.
"""

import errno
import mmap
import os
import re
import stat
from pathlib import Path
from typing import Final

from .errors import ArenaSpace, ForeignHandle, UnsafeDirectory

_PAGE: Final = 4096
_MAGIC: Final = int.from_bytes(b"flexarn1", "little")
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.arena")
_OPEN_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


def check_directory(directory: Path) -> None:
    """Raises UnsafeDirectory unless ``directory`` is this user's and closed to all others (mode 0700)."""
    if not directory.is_dir():
        raise UnsafeDirectory(str(directory), "it is not a directory")
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise UnsafeDirectory(str(directory), f"it belongs to user {status.st_uid}, not {os.geteuid()}")
    if status.st_mode & 0o077:
        raise UnsafeDirectory(str(directory), f"its mode is {stat.S_IMODE(status.st_mode):04o}, not 0700")


def free_bytes(directory: Path) -> int:
    """Free bytes for this user in the file system of ``directory``."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


class Arena:
    """A mapped arena file. ``memory`` is unmapped with the last reference to it or to a view of it."""

    def __init__(self, directory: Path, name: str, memory: mmap.mmap) -> None:
        self.directory = directory
        self.name = name
        self.memory = memory
        self._words = memoryview(memory)[:_PAGE].cast("Q")

    @classmethod
    def create(cls, directory: Path, name: str, slot_bytes: int) -> "Arena":
        """Creates and maps a new file of zeros (mode 0600) with two slots of at least ``slot_bytes``.

        All its memory is reserved, so that writing a slot can't fail for lack of memory. Raises ArenaSpace if it does
        not fit, and leaves no file behind if it raises.
        """
        stride = -(-max(slot_bytes, 1) // _PAGE) * _PAGE
        size = _PAGE + 2 * stride
        free = free_bytes(directory)
        if size > free:
            raise ArenaSpace(size, free, str(directory))
        path = directory / name
        descriptor = os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Without this, a full file system would kill the writer with SIGBUS in the middle of a copy.
            os.posix_fallocate(descriptor, 0, size)
            # Not MAP_POPULATE: touching every page here would hold the GIL, for seconds if there are gigabytes.
            # The first copy touches the pages, in its thread.
            memory = mmap.mmap(descriptor, size)
        except OSError as error:
            path.unlink()
            if error.errno == errno.ENOSPC:
                raise ArenaSpace(size, free_bytes(directory), str(directory)) from error
            raise
        finally:
            os.close(descriptor)
        arena = cls(directory, name, memory)
        arena._words[1] = stride
        arena._words[0] = _MAGIC
        return arena

    @classmethod
    def open(cls, directory: Path, name: str) -> "Arena":
        """Maps another process's arena. ``name`` comes from the network and must be that of a file in ``directory``.

        Raises ForeignHandle if it names anything else, FileNotFoundError if the file was removed.
        """
        if not _NAME.fullmatch(name):
            raise ForeignHandle(name, str(directory), "invalid name: needs the plain name of an arena file")
        try:
            descriptor = os.open(directory / name, _OPEN_FLAGS)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ForeignHandle(name, str(directory), f"it can't be opened: {error.strerror}") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size < _PAGE:
                raise ForeignHandle(name, str(directory), "invalid arena file")
            # Writable, because torch has no read-only tensors; readers don't write, and keep the map to themselves.
            memory = mmap.mmap(descriptor, status.st_size)
        finally:
            os.close(descriptor)
        arena = cls(directory, name, memory)
        if arena._words[0] != _MAGIC or status.st_size != _PAGE + 2 * arena.slot_bytes:
            raise ForeignHandle(name, str(directory), "invalid arena file")
        return arena

    @property
    def slot_bytes(self) -> int:
        return self._words[1]

    def offset(self, slot: int) -> int:
        """The first byte of ``slot`` in ``memory``."""
        return _PAGE + slot * self.slot_bytes

    def generation(self, slot: int) -> int:
        """Odd while the slot is written, and after an unfinished write; even when it is published."""
        return self._words[8 + 8 * slot]

    def version(self, slot: int) -> int:
        return self._words[9 + 8 * slot]

    def begin(self, slot: int, version: int) -> None:
        """Marks the slot as being written. The version is stored first, so that it is seen with the generation."""
        self._words[9 + 8 * slot] = version
        self._words[8 + 8 * slot] = self.generation(slot) | 1

    def commit(self, slot: int) -> int:
        """Publishes the bytes written since ``begin`` and returns their generation."""
        generation = self.generation(slot) + 1
        self._words[8 + 8 * slot] = generation
        return generation

    def unlink(self) -> None:
        """Removes the file; processes that have mapped it keep the memory."""
        (self.directory / self.name).unlink(missing_ok=True)
