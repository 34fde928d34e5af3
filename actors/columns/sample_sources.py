"""Sources of the bytes of leased samples: segments of this node, an answer of the store, memory of their writers."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from ...core.ref import ActorRef
from ..errors import StoreError
from ..messages import StoreApi
from ..segments.segments import ByteRef, place_of
from .column_refs import UTF8, ColumnRefs, is_packed, is_ref, runs

SEND_TIMEOUT_S: Final = 60.0
"""Deadline of a chunk, and of a fetch from another host."""

Array = np.ndarray[Any, Any]


class Source(Protocol):
    """Gives the bytes that references stand for, from one kind of place."""

    def arrays(self, refs: Sequence[ByteRef], dtype: "np.dtype[Any] | type[np.generic]") -> list[Array]:
        """As ``SegmentReader.arrays``, of references into one segment."""
        ...


class Places:
    """Sources by place."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources

    def arrays(self, refs: Sequence[ByteRef], dtype: "np.dtype[Any] | type[np.generic]") -> list[Array]:
        """As ``Source.arrays``."""
        return self._sources[place_of(refs[0].segment)[0]].arrays(refs, dtype)


class Fetched:
    """Bytes that their writer has sent. Segments are aligned, and so are their pieces."""

    def __init__(self, found: Mapping[ByteRef, memoryview]) -> None:
        self._found = found

    def arrays(self, refs: Sequence[ByteRef], dtype: "np.dtype[Any] | type[np.generic]") -> list[Array]:
        """As ``Source.arrays``."""
        kind = np.dtype(dtype)
        return [np.frombuffer(self._found[ref] if ref.size_bytes else b"", kind) for ref in refs]


class Sent:
    """Bytes that the store has sent: those of ``refs``, one behind the other."""

    def __init__(self, refs: Sequence[ByteRef], memory: memoryview) -> None:
        self._memory = memory
        self._offsets: dict[ByteRef, int] = {}
        end = 0
        for ref in refs:
            self._offsets[ref] = end
            end += ref.size_bytes

    def arrays(self, refs: Sequence[ByteRef], dtype: "np.dtype[Any] | type[np.generic]") -> list[Array]:
        """As ``SegmentReader.arrays``."""
        kind = np.dtype(dtype)
        return [
            np.frombuffer(self._memory, kind, ref.size_bytes // kind.itemsize, self._offsets[ref])
            for ref in refs
        ]


async def fetch_bytes(store: ActorRef[StoreApi], refs: Sequence[ByteRef]) -> Sent:
    """The bytes of ``refs``, from the store. Raises StoreError if it sends more or fewer bytes than were asked for."""
    memory, end = bytearray(sum(ref.size_bytes for ref in refs)), 0
    async for chunk in store.within(SEND_TIMEOUT_S).fetch([*refs]):
        if end + len(chunk) > len(memory):
            raise StoreError(f"the store sends more than the {len(memory)} bytes that were asked for")
        memory[end : end + len(chunk)] = chunk
        end += len(chunk)
    if end != len(memory):
        raise StoreError(f"the store has sent {end} bytes of {len(memory)}")
    return Sent(refs, memoryview(memory).toreadonly())


def declared_values(column: Sequence[Any] | ColumnRefs, source: Source) -> list[Any]:
    """The values of a declared column, in the order of its rows. Arrays are read-only."""
    values = (value for run in runs(column) for value in _shaped(source, run.dtype, run.refs, run.shapes))
    if is_packed(column):
        return list(values)
    return [next(values) if is_ref(cell) else cell for cell in column]


def _shaped(
    source: Source, dtype: str, refs: Sequence[ByteRef], shapes: Sequence[tuple[int, ...]]
) -> list[Any]:
    if dtype == UTF8:
        return [array.tobytes().decode() for array in source.arrays(refs, np.uint8)]
    arrays = source.arrays(refs, np.dtype(dtype))
    return [array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True)]
