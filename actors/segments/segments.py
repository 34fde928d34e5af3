"""Bulk data between processes of one host, by reference: files that one process fills and others map.

    owner    makes a segment (``create``) and grants it to one writer
    writer   copies its buffers into it, one behind the other (``writer.py``), and sends ``ByteRef``s
    reader   maps it, read-only, and reads the bytes in place (``reader.py``)

A segment's bytes are written once, before any reader has a reference to them, and never change: nothing is locked. The
name of a segment can't be guessed, is never used again, and begins with the letter of its medium: tmpfs or disk. All
its space is reserved when it is made, so that writing can't fail for lack of space. A process that has mapped a removed
segment, or has an array in it, keeps its memory.
"""

import contextlib
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from ...core.durable.private_directory import check_private
from ...transport.errors import ForeignHandle

_NAME: Final = re.compile(r"([md])-[0-9a-f]{32}")


class ByteRef(NamedTuple):
    """A reference to ``size_bytes`` bytes, ``offset`` bytes into ``segment``. Their meaning is up to the holder."""

    segment: str
    offset: int
    size_bytes: int


class Medium(StrEnum):
    """The medium of a segment: the first letter of its name."""

    MEMORY = "m"
    DISK = "d"


@dataclass(frozen=True, slots=True)
class SegmentGrant:
    """A segment that one writer may fill. ``ended``: segments of a writer on another node that it may remove."""

    segment: str
    size_bytes: int
    ended: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WriterMemory:
    """The memory of a writer's own ``node``. ``place``: of its segments there; empty if it can't serve them. ``held``:
    those that it has."""

    node: str
    place: str
    held: list[str]


@dataclass(frozen=True, slots=True)
class SegmentDirectories:
    """The two directories of one owner's segments, both of mode 0700: ``memory`` on tmpfs, ``disk`` on a disk.
    ``place``: before the names of segments on another node than their owner (``far_segments.py``)."""

    memory: Path
    disk: Path
    place: str = ""

    def all(self) -> tuple[Path, Path]:
        """Both directories, memory first."""
        return self.memory, self.disk

    def directory(self, medium: Medium) -> Path:
        """The directory of the segments in that medium."""
        return self.memory if medium is Medium.MEMORY else self.disk

    def path(self, segment: str) -> Path:
        """The path of a segment, whose name may come from a peer. Raises ForeignHandle for an invalid name."""
        place, name = place_of(segment)
        match = _NAME.fullmatch(name)
        if match is None or place != self.place:
            raise ForeignHandle(segment, f"{self.memory} and {self.disk}", "invalid segment name")
        return self.directory(Medium(match[1])) / name

    def check(self) -> None:
        """Raises UnsafeDirectory unless both are this user's and closed to all others."""
        check_private(self.memory)
        check_private(self.disk)


def is_segment_name(name: str) -> bool:
    """True for a name, without a place, that ``new_name`` may have given."""
    return _NAME.fullmatch(name) is not None


def place_of(segment: str) -> tuple[str, str]:
    """The place in the name of a segment, empty if its owner has it, and the name without it."""
    place, _, name = segment.rpartition("/")
    return place, name


def is_remote(segment: str) -> bool:
    """True if the segment is in memory of its writer's node, not of its owner's."""
    return "/" in segment


def new_name(medium: Medium, place: str = "") -> str:
    """A name that can't be guessed; ``place``: of the writer's node, if the segment lies there."""
    name = f"{medium}-{secrets.token_hex(16)}"
    return f"{place}/{name}" if place else name


def create(directories: SegmentDirectories, medium: Medium, size_bytes: int, name: str = "") -> str:
    """Makes a segment of zeros, of mode 0600, with all its space reserved; returns its name, which is new if none is
    given.

    Raises OSError (ENOSPC: a full file system), and then leaves no file behind.
    """
    name = name or new_name(medium)
    path = directories.path(name)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return name


def open_segment(directories: SegmentDirectories, segment: str, flags: int) -> tuple[int, int]:
    """The descriptor and size of a segment. Raises ForeignHandle if it is missing, empty or another user's."""
    path = directories.path(segment)
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ForeignHandle(segment, str(path.parent), f"it can't be opened: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or not status.st_size:
        os.close(descriptor)
        raise ForeignHandle(
            segment, str(path.parent), "invalid segment: needs a file of this user, not empty"
        )
    return descriptor, status.st_size


def remove(directories: SegmentDirectories, segment: str) -> None:
    """Removes a segment, if it still exists. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        directories.path(segment).unlink()
