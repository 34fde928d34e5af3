"""One key's memory: a file of two slots, mapped by the process that owns it and by its readers.

    page 0    magic | bytes per slot | per slot: generation, version
    slot 0    one version's bucket
    slot 1    another version's bucket

The slots are written in turn, so the version published last stays whole while the next is written. A
slot's generation is a sequence lock: odd while it is written, even when it is published, never repeated.
A reader that finds the generation of its handle before and after copying has copied that version and no
other. Generations are aligned machine words stored by one instruction; x86-64 keeps stores and loads in
order, and on hosts that don't, the digest of what was read tells a mix from a whole version.

Neither torch nor any tensor is known here.
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
    """What this user may still write to the file system of ``directory``."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


class Arena:
    """A mapped arena file. ``memory`` is unmapped when the last reference to it (any view of it) goes."""

    def __init__(self, directory: Path, name: str, memory: mmap.mmap) -> None:
        self.directory = directory
        self.name = name
        self.memory = memory
        self._words = memoryview(memory)[:_PAGE].cast("Q")

    @classmethod
    def create(cls, directory: Path, name: str, slot_bytes: int) -> "Arena":
        """Makes, fills with zeros and maps a new file (mode 0600) with two slots of at least ``slot_bytes``.

        The memory is reserved afterwards: writing a slot can't run short of it. Raises ArenaSpace when it
        does not fit, and leaves no file behind when it raises.
        """
        stride = -(-max(slot_bytes, 1) // _PAGE) * _PAGE
        size = _PAGE + 2 * stride
        free = free_bytes(directory)
        if size > free:
            raise ArenaSpace(size, free, str(directory))
        path = directory / name
        descriptor = os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Without this a full file system would kill the writer by SIGBUS in the middle of a copy.
            os.posix_fallocate(descriptor, 0, size)
            # Not MAP_POPULATE: touching every page here would hold the GIL, for seconds where it is gigabytes.
            # The first copy touches them, in its thread.
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
        """Maps another process's arena. ``name`` comes from the network: it may only be in ``directory``.

        Raises ForeignHandle when it names anything else, FileNotFoundError when the file is gone.
        """
        if not _NAME.fullmatch(name):
            raise ForeignHandle(name, str(directory), "it is not the plain name of an arena file")
        try:
            descriptor = os.open(directory / name, _OPEN_FLAGS)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ForeignHandle(name, str(directory), f"it can't be opened: {error.strerror}") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size < _PAGE:
                raise ForeignHandle(name, str(directory), "it is no arena file")
            # Writable, because torch knows no read-only tensors; no reader writes or hands the map out.
            memory = mmap.mmap(descriptor, status.st_size)
        finally:
            os.close(descriptor)
        arena = cls(directory, name, memory)
        if arena._words[0] != _MAGIC or status.st_size != _PAGE + 2 * arena.slot_bytes:
            raise ForeignHandle(name, str(directory), "it is no arena file")
        return arena

    @property
    def slot_bytes(self) -> int:
        return self._words[1]

    def offset(self, slot: int) -> int:
        """The first byte of ``slot`` in ``memory``."""
        return _PAGE + slot * self.slot_bytes

    def generation(self, slot: int) -> int:
        """Odd while the slot is being written (or its writing was given up), even when it is published."""
        return self._words[8 + 8 * slot]

    def version(self, slot: int) -> int:
        return self._words[9 + 8 * slot]

    def begin(self, slot: int, version: int) -> None:
        """Takes the slot from its readers. The version goes first: who sees the generation change sees it."""
        self._words[9 + 8 * slot] = version
        self._words[8 + 8 * slot] = self.generation(slot) | 1

    def commit(self, slot: int) -> int:
        """Publishes what was written since ``begin`` and returns its generation."""
        generation = self.generation(slot) + 1
        self._words[8 + 8 * slot] = generation
        return generation

    def unlink(self) -> None:
        """Removes the file; whoever has it mapped keeps the memory."""
        (self.directory / self.name).unlink(missing_ok=True)
