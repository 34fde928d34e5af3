"""Bulk data between processes of one host, by reference: files that one process fills and others map.

    owner    makes a segment (``create``) and grants it to one writer
    writer   copies its buffers into it, one behind the other (``SegmentWriter``), and sends ``ByteRef``s
    reader   maps it, read-only, and reads the bytes in place (``SegmentReader``)

A segment's bytes are written once, before any reader has a reference to them, and never change: nothing is locked. The
name of a segment can't be guessed, is never used again, and begins with the letter of its medium: tmpfs or disk. All
its space is reserved when it is made, so that writing can't fail for lack of space. A process that has mapped a removed
segment, or has an array in it, keeps its memory.
"""

import contextlib
import mmap
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ...transport.errors import ForeignHandle
from ...transport.host_memory.block import check_directory
from .errors import SegmentFull

Array = np.ndarray[Any, Any]
Content = Array | bytes | bytearray | memoryview

# Bytes. Any dtype is aligned, and no two references share a cache line.
ALIGNMENT: Final = 64
_NAME: Final = re.compile(r"([md])-[0-9a-f]{32}")
_PADDING: Final = [bytes(size) for size in range(ALIGNMENT)]
_IOV_MAX: Final = 1024  # buffers of one pwritev(2), on Linux


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
        return self.memory, self.disk

    def directory(self, medium: Medium) -> Path:
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
        check_directory(self.memory)
        check_directory(self.disk)


def is_segment_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def place_of(segment: str) -> tuple[str, str]:
    """The place in the name of a segment, empty if its owner has it, and the name without it."""
    place, _, name = segment.rpartition("/")
    return place, name


def is_far(segment: str) -> bool:
    """True if the segment is in memory of its writer's node, not of its owner's."""
    return "/" in segment


def new_name(medium: Medium, place: str = "") -> str:
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


def _open(directories: SegmentDirectories, segment: str, flags: int) -> tuple[int, int]:
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


# --------------------------------------------------------------------------- writing


def packed_bytes(contents: Sequence[Content]) -> int:
    """Upper bound of the space that ``SegmentWriter.write`` needs for ``contents``, in bytes."""
    return sum(_size_bytes(content) + ALIGNMENT for content in contents)


class _Granted:
    """``unanswered``: writes whose references may still be on their way to the segment's owner."""

    __slots__ = ("descriptor", "end", "size_bytes", "unanswered")

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self.end = 0
        self.unanswered = 0


class SegmentWriter:
    """Fills the segments granted to this process, from their beginning to their end.

    try:
        refs = writer.write(arrays)
    except SegmentFull as full:
        writer.use(await store.grant(full.needed_bytes, finished=writer.take_finished()))
        refs = writer.write(arrays)
    try:
        await store.put(rows, refs)
    finally:
        writer.answered(refs)

    The owner seals ``finished`` even if it has no room for another segment.
    """

    def __init__(self, directories: SegmentDirectories) -> None:
        directories.check()
        self._directories = directories
        self._granted: dict[str, _Granted] = {}
        self._current: str | None = None

    def use(self, grant: SegmentGrant) -> None:
        """Makes this the current segment, for the next writes. Raises ForeignHandle if it does not exist as granted."""
        descriptor, size_bytes = _open(self._directories, grant.segment, os.O_RDWR)
        if size_bytes != grant.size_bytes:
            os.close(descriptor)
            directory = str(self._directories.path(grant.segment).parent)
            raise ForeignHandle(
                grant.segment, directory, f"it has {size_bytes} bytes, not {grant.size_bytes}"
            )
        self._granted[grant.segment] = _Granted(descriptor, size_bytes)
        self._current = grant.segment

    def write(self, contents: Sequence[Content]) -> list[ByteRef]:
        """Copies a batch into the current segment; returns the references in the order of ``contents``.

        ``answered`` must be called with them later. Raises SegmentFull if the batch does not fit (then the segment is
        finished), TypeError for arrays of objects and contents without bytes, and OSError; then nothing is written.
        """
        if not contents:
            return []
        granted = self._granted.get(self._current or "")
        if granted is None:
            raise SegmentFull(packed_bytes(contents), 0)
        refs, pieces, end = _lay_out(self._current or "", contents, granted.end)
        if end > granted.size_bytes:
            self._current = None  # finished; the space left stays unused
            raise SegmentFull(packed_bytes(contents), granted.size_bytes - granted.end)
        # Not through a mapping: that takes a page fault for every new page, which is cleared first (2x the time).
        _write_all(granted.descriptor, pieces, granted.end, end)
        granted.end = end
        granted.unanswered += 1
        return refs

    def answered(self, refs: Sequence[ByteRef]) -> None:
        """Notes that the put with the ``refs`` of one ``write`` has ended, with success or not."""
        granted = self._granted.get(refs[0].segment) if refs else None
        if granted is not None:
            granted.unanswered -= 1

    def take_finished(self) -> list[str]:
        """Closes and returns the segments that can be sealed: no more writes will come, and all are answered."""
        finished = [name for name, g in self._granted.items() if name != self._current and not g.unanswered]
        for name in finished:
            os.close(self._granted.pop(name).descriptor)
        return finished

    def drop(self, segment: str) -> None:
        """Closes a segment that its owner does not know any more; the next write may need a new grant."""
        granted = self._granted.pop(segment, None)
        if granted is not None:
            os.close(granted.descriptor)
        if self._current == segment:
            self._current = None

    def close(self) -> None:
        """Closes all segments; can be repeated. The caller notifies the owner that this writer has left."""
        for name in list(self._granted):
            self.drop(name)


def _size_bytes(content: Content) -> int:
    return content.nbytes if isinstance(content, np.ndarray | memoryview) else len(content)


def _lay_out(
    segment: str, contents: Sequence[Content], start: int
) -> tuple[list[ByteRef], list[Content], int]:
    """The references, the buffers to write from ``start`` (aligned) on, padding included, and their end."""
    refs: list[ByteRef] = []
    pieces: list[Content] = []
    end = start
    for content in contents:
        if isinstance(content, np.ndarray):
            if content.dtype.hasobject:
                raise TypeError(f"an array of {content.dtype} has no bytes of its own")
            if not content.flags.c_contiguous:
                content = np.ascontiguousarray(content)
            size_bytes = content.nbytes
        else:
            size_bytes = _size_bytes(content)
        refs.append(ByteRef(segment, end, size_bytes))
        pieces.append(content)
        end += size_bytes
        if padding := -size_bytes % ALIGNMENT:
            pieces.append(_PADDING[padding])
            end += padding
    return refs, pieces, end


def _write_all(descriptor: int, pieces: Sequence[Any], start: int, end: int) -> None:
    for first in range(0, len(pieces), _IOV_MAX):
        some = pieces[first : first + _IOV_MAX]
        is_last = first + _IOV_MAX >= len(pieces)
        size_bytes = end - start if is_last else sum(map(_size_bytes, some))
        written = os.pwritev(descriptor, some, start)
        if written < size_bytes:  # 2 GiB at once, or a signal
            rest = memoryview(b"".join(some))
            while written < size_bytes:
                written += os.pwrite(descriptor, rest[written:], start + written)
        start += size_bytes


# --------------------------------------------------------------------------- reading


class SegmentReader:
    """Maps segments at their first use. A mapping keeps the memory of a removed segment until ``forget_removed``, which
    is also called whenever another segment is mapped."""

    def __init__(self, directories: SegmentDirectories) -> None:
        directories.check()
        self._directories = directories
        self._mapped: dict[str, mmap.mmap] = {}

    def views(self, refs: Sequence[ByteRef]) -> list[memoryview]:
        """The bytes in place, read-only. Raises ForeignHandle if a reference is outside of a segment."""
        views = []
        for segment, offset, size_bytes in refs:
            memory = self._memory(segment, offset, size_bytes)
            views.append(memoryview(memory)[offset : offset + size_bytes])
        return views

    def arrays(self, refs: Sequence[ByteRef], dtype: "np.dtype[Any] | type[np.generic]") -> list[Array]:
        """As ``views``, each as a flat array. Raises ValueError if a size is not a multiple of that of ``dtype``."""
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise ValueError(f"invalid dtype {kind}: needs plain numbers")
        item_bytes, arrays = kind.itemsize, []
        for segment, offset, size_bytes in refs:
            memory = self._memory(segment, offset, size_bytes)
            count, rest = divmod(size_bytes, item_bytes)
            if rest:
                raise ValueError(f"{size_bytes} bytes are not a whole number of {kind}")
            arrays.append(np.frombuffer(memory, kind, count, offset))
        return arrays

    def read_chunks(self, refs: Sequence[ByteRef], chunk_bytes: int) -> Iterator[bytes]:
        """The bytes of all ``refs``, one behind the other, in chunks of ``chunk_bytes``; the last may be shorter.

        The segments are mapped before this returns, so they may be removed during the read. Raises as ``views`` does.
        """
        if chunk_bytes < 1:
            raise ValueError(f"chunks of {chunk_bytes} bytes: needs at least 1")
        return _chunks(self.views(refs), chunk_bytes)

    def forget_removed(self) -> None:
        """Drops the mappings of removed segments. Views of them stay valid and keep their memory."""
        for segment in [name for name in self._mapped if not self._directories.path(name).exists()]:
            del self._mapped[segment]

    def close(self) -> None:
        """Drops all mappings; can be repeated. Views stay valid."""
        self._mapped.clear()

    def _memory(self, segment: str, offset: int, size_bytes: int) -> mmap.mmap:
        memory = self._mapped.get(segment)
        if memory is None:
            memory = self._map(segment)
        if offset < 0 or size_bytes < 0 or offset + size_bytes > len(memory):
            outside = f"bytes {offset} to {offset + size_bytes} are outside of its {len(memory)} bytes"
            raise ForeignHandle(segment, str(self._directories.path(segment).parent), outside)
        return memory

    def _map(self, segment: str) -> mmap.mmap:
        self.forget_removed()
        descriptor, size_bytes = _open(self._directories, segment, os.O_RDONLY)
        try:
            memory = mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._mapped[segment] = memory
        return memory


def _chunks(views: Sequence[memoryview], chunk_bytes: int) -> Iterator[bytes]:
    chunk: list[memoryview] = []
    missing_bytes = chunk_bytes
    for view in views:
        start = 0
        while start < len(view):
            piece = view[start : start + missing_bytes]
            chunk.append(piece)
            start += len(piece)
            missing_bytes -= len(piece)
            if not missing_bytes:
                yield b"".join(chunk)
                chunk, missing_bytes = [], chunk_bytes
    if chunk:
        yield b"".join(chunk)


def remove(directories: SegmentDirectories, segment: str) -> None:
    """Removes a segment, if it still exists. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        directories.path(segment).unlink()
