"""Maps segments, read-only, and reads their bytes in place."""

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...transport.errors import ForeignHandle
from .segments import ByteRef, SegmentDirectories, open_segment

Array = np.ndarray[Any, Any]


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
        descriptor, size_bytes = open_segment(self._directories, segment, os.O_RDONLY)
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
