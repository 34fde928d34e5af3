"""Fills segments: copies buffers one behind the other, and returns references to them."""

import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ...transport.errors import ForeignHandle
from .errors import SegmentFull
from .segments import ByteRef, SegmentDirectories, SegmentGrant, open_segment

Content = np.ndarray[Any, Any] | bytes | bytearray | memoryview

# Bytes. Any dtype is aligned, and no two references share a cache line.
ALIGNMENT: Final = 64
_PADDING: Final = [bytes(size) for size in range(ALIGNMENT)]
_IOV_MAX: Final = 1024  # buffers of one pwritev(2), on Linux


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
        descriptor, size_bytes = open_segment(self._directories, grant.segment, os.O_RDWR)
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
