"""Bulk data between processes of one host, by reference: files that one process fills and others map.

    owner    makes a segment (``create``) and grants it to one writer
    writer   copies its buffers into it, one behind the other (``SegmentWriter``), and sends ``ByteRef``s
    reader   maps it, read-only, and looks at the bytes where they lie (``SegmentReader``)

A segment's bytes are written once, before anybody is told where they are, and never change: nothing is locked. Its
name can't be guessed, is never used again, and says which of two directories it is in: one on tmpfs, one on a disk.
Space is taken when it is made, so that filling it can't fail for want of room. Who has a removed segment mapped, or
looks at an array in it, keeps its memory.
"""

import contextlib
import mmap
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from .arena import check_directory
from .errors import ForeignHandle, SegmentFull

Array = np.ndarray[Any, Any]
Content = Array | bytes | bytearray | memoryview

# Any dtype is aligned, and no two blobs share a cache line.
ALIGNMENT: Final = 64
_NAME: Final = re.compile(r"([md])-[0-9a-f]{32}")
_PADDING: Final = [bytes(size) for size in range(ALIGNMENT)]
_IOV_MAX: Final = 1024  # buffers of one pwritev(2), on Linux


class ByteRef(NamedTuple):
    """Where bytes lie: ``size_bytes`` of them, ``offset`` bytes into ``segment``. What they mean is the holder's."""

    segment: str
    offset: int
    size_bytes: int


class Medium(StrEnum):
    """The first letter of a segment's name."""

    MEMORY = "m"
    DISK = "d"


@dataclass(frozen=True, slots=True)
class SegmentGrant:
    """A segment that one writer may fill."""

    segment: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentDirectories:
    """The two directories of one owner's segments, both of mode 0700. ``memory``: on tmpfs."""

    memory: Path
    disk: Path

    def all(self) -> tuple[Path, Path]:
        return self.memory, self.disk

    def directory(self, medium: Medium) -> Path:
        return self.memory if medium is Medium.MEMORY else self.disk

    def path(self, segment: str) -> Path:
        """Raises ForeignHandle where ``segment``, which may come from a peer, is no segment's name."""
        match = _NAME.fullmatch(segment)
        if match is None:
            raise ForeignHandle(segment, f"{self.memory} and {self.disk}", "it is no segment's name")
        return self.directory(Medium(match[1])) / segment

    def check(self) -> None:
        """Raises UnsafeDirectory unless both are this user's and closed to all others."""
        check_directory(self.memory)
        check_directory(self.disk)


def is_segment_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def create(directories: SegmentDirectories, medium: Medium, size_bytes: int) -> str:
    """Makes a segment of zeros and mode 0600, and returns its name. All its space is taken at once.

    Raises OSError (ENOSPC: a full file system), and leaves no file behind then.
    """
    name = f"{medium}-{secrets.token_hex(16)}"
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
    """The descriptor and the size of a segment. Raises ForeignHandle where it is none of this user's, or gone."""
    path = directories.path(segment)
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ForeignHandle(segment, str(path.parent), f"it can't be opened: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or not status.st_size:
        os.close(descriptor)
        raise ForeignHandle(segment, str(path.parent), "it is no segment of this user")
    return descriptor, status.st_size


# --------------------------------------------------------------------------- writing


def packed_bytes(contents: Sequence[Content]) -> int:
    """What ``SegmentWriter.write`` needs for ``contents``, at most."""
    return sum(_size_bytes(content) + ALIGNMENT for content in contents)


class _Granted:
    """``unanswered``: writes whose references the owner of the segment may still be about to get."""

    __slots__ = ("descriptor", "end", "size_bytes", "unanswered")

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self.end = 0
        self.unanswered = 0


class SegmentWriter:
    """Fills the segments that this process is granted, from their beginning to their end.

    try:
        refs = writer.write(arrays)
    except SegmentFull as full:
        writer.use(await store.grant(full.needed_bytes, finished=writer.take_finished()))
        refs = writer.write(arrays)
    try:
        await store.put(rows, refs)
    finally:
        writer.answered(refs)

    The owner seals ``finished`` whether or not it has room for another segment.
    """

    def __init__(self, directories: SegmentDirectories) -> None:
        directories.check()
        self._directories = directories
        self._granted: dict[str, _Granted] = {}
        self._current: str | None = None

    def use(self, grant: SegmentGrant) -> None:
        """Writes go here from now on. Raises ForeignHandle where there is no such segment."""
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
        """Copies a batch into the current segment: references in the order of ``contents``.

        Raises SegmentFull where they don't fit (the segment is finished then), TypeError for arrays of objects and
        contents that are no bytes, and OSError. Nothing counts as written where it raises; otherwise ``answered`` is to
        be called with what it returned.
        """
        if not contents:
            return []
        granted = self._granted.get(self._current or "")
        if granted is None:
            raise SegmentFull(packed_bytes(contents), 0)
        refs, pieces, end = _lay_out(self._current or "", contents, granted.end)
        if end > granted.size_bytes:
            self._current = None  # finished, with what is left of it
            raise SegmentFull(packed_bytes(contents), granted.size_bytes - granted.end)
        # Not through a mapping: that would clear every fresh page first, and take a fault for it (2x the time).
        _write_all(granted.descriptor, pieces, granted.end, end)
        granted.end = end
        granted.unanswered += 1
        return refs

    def answered(self, refs: Sequence[ByteRef]) -> None:
        """The put that the ``refs`` of one ``write`` were made for has ended, well or not: no message of it is left."""
        granted = self._granted.get(refs[0].segment) if refs else None
        if granted is not None:
            granted.unanswered -= 1

    def take_finished(self) -> list[str]:
        """The segments that can be sealed: nothing more will be written to them, and nothing is unanswered."""
        finished = [name for name, g in self._granted.items() if name != self._current and not g.unanswered]
        for name in finished:
            os.close(self._granted.pop(name).descriptor)
        return finished

    def drop(self, segment: str) -> None:
        """Forgets a segment that its owner does not know (any more): what is written next needs a grant."""
        granted = self._granted.pop(segment, None)
        if granted is not None:
            os.close(granted.descriptor)
        if self._current == segment:
            self._current = None

    def close(self) -> None:
        """Can be repeated. The owner is to be told that this writer has left."""
        for name in list(self._granted):
            self.drop(name)


def _size_bytes(content: Content) -> int:
    return content.nbytes if isinstance(content, np.ndarray | memoryview) else len(content)


def _lay_out(
    segment: str, contents: Sequence[Content], start: int
) -> tuple[list[ByteRef], list[Content], int]:
    """Where each goes, what is to be written from ``start`` on, and where that ends. ``start`` is aligned."""
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
    """Maps segments at their first use. A mapping is kept until its segment is removed, and with it the memory:
    ``forget_removed`` after rows were consumed; it happens by itself when another segment is mapped."""

    def __init__(self, directories: SegmentDirectories) -> None:
        directories.check()
        self._directories = directories
        self._mapped: dict[str, mmap.mmap] = {}

    def views(self, refs: Sequence[ByteRef]) -> list[memoryview]:
        """The bytes, read-only, where they lie. Raises ForeignHandle where a reference is into nothing."""
        views = []
        for segment, offset, size_bytes in refs:
            memory = self._memory(segment, offset, size_bytes)
            views.append(memoryview(memory)[offset : offset + size_bytes])
        return views

    def arrays(self, refs: Sequence[ByteRef], dtype: "np.dtype[Any] | type[np.generic]") -> list[Array]:
        """As ``views``, each as a flat array. Raises ValueError where one is not a whole number of ``dtype``."""
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise ValueError(f"bytes are no {kind}")
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

        They are mapped before this returns: they may be removed while they are read. Raises as ``views`` does.
        """
        if chunk_bytes < 1:
            raise ValueError(f"chunks of {chunk_bytes} bytes")
        return _chunks(self.views(refs), chunk_bytes)

    def forget_removed(self) -> None:
        """Lets go of the segments that their owner has removed. Views of them stay good and keep their memory."""
        for segment in [name for name in self._mapped if not self._directories.path(name).exists()]:
            del self._mapped[segment]

    def close(self) -> None:
        """Can be repeated. Views stay good."""
        self._mapped.clear()

    def _memory(self, segment: str, offset: int, size_bytes: int) -> mmap.mmap:
        memory = self._mapped.get(segment)
        if memory is None:
            memory = self._map(segment)
        if offset < 0 or size_bytes < 0 or offset + size_bytes > len(memory):
            where = f"bytes {offset} to {offset + size_bytes} of {len(memory)}"
            raise ForeignHandle(segment, str(self._directories.path(segment).parent), f"it has no {where}")
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
    """Removes a segment; nothing happens where it is gone. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        directories.path(segment).unlink()
