"""Samples on their way into the store and out of it: bulk lies in segments, and messages carry references to it.

rollout   ExperienceWriter.put(samples)      copies token lists into a segment, sends the columns
trainer   ExperienceReader.samples(leased)   maps the segments, and gives back samples

A reader on another host, where the segments are not, has the store send the bytes.
"""

import asyncio
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..core.errors import ActorDead
from ..core.ref import ActorRef
from ..transport.errors import SegmentFull
from ..transport.handle import DTYPE_BYTES
from ..transport.segments import ByteRef, Content, SegmentDirectories, SegmentReader, SegmentWriter
from .declared_columns import MAX_STRING
from .errors import StoreError
from .messages import LeasedBatch, Sample, StoreApi
from .sample_id import SampleId

BULK: Final = {"prompt_tokens": "int32", "tokens": "int32", "logprobs": "float32", "group_rewards": "float64"}
"""The bulk columns of a sample, and their dtypes; each has one dimension.

``version_changes``, empty in most samples, is a short string of numbers: a further bulk column would cost every sample
a tenth of its way through the store.
"""

SCALARS: Final = ("sample_id", "policy_version", "query_position", "reward", "version_changes")
"""Its other columns."""

_TRAINING: Final = frozenset({*SCALARS, *BULK})
_UTF8: Final = "utf8"
# A store that is full makes its writers wait until rows are consumed.
_ROOM_TIMEOUT_S: Final = 24 * 3600.0
_CHUNK_TIMEOUT_S: Final = 60.0
_TRIES: Final = 4

Array = np.ndarray[Any, Any]


def segment_places(memory: str | Path, folder: str | Path) -> SegmentDirectories:
    """``memory``: a run's private directory on tmpfs; ``folder``: the store's on a disk."""
    return SegmentDirectories(Path(memory) / "segments", Path(folder) / "segments")


class ExperienceWriter:
    """One process's way to put samples into a store on this host."""

    def __init__(self, store: ActorRef[StoreApi], name: str, places: SegmentDirectories) -> None:
        """``name``: of this writer, no two of a store's are equal. Raises UnsafeDirectory."""
        self._store = store
        self._name = name
        self._segments = SegmentWriter(places)
        self._granting = asyncio.Lock()
        self._grants = 0

    async def put(self, samples: Sequence[Sample]) -> None:
        """Adds the samples of a closed group, all or none. Raises RemoteError where the store refuses one, CallTimeout
        where it has had no room for a day."""
        declared = _declared_bulk(samples)
        contents: list[Content] = [_array(sample, name) for sample in samples for name in BULK]
        refs = await self._write([*contents, *(content for content, _, _ in declared.values())])
        places = dict(zip(declared, refs[len(contents) :], strict=True))
        cells = {which: [*places[which], *declared[which][1:]] for which in declared}
        try:
            await self._put(_columns(samples, refs, cells))
        finally:
            self._segments.answered(refs)

    async def _put(self, parts: dict[str, dict[str, Any]]) -> None:
        """Again where the store dies meanwhile: it is restarted, or the next try fails too.

        The store knows a put that comes again by its bytes. Were ``put`` idempotent for the runtime, each answer would
        be written down once more, which is a tenth of the store's time.
        """
        store = self._store.within(_ROOM_TIMEOUT_S)
        for _ in range(_TRIES - 1):
            with suppress(ActorDead):
                return await store.put(self._name, parts)
        return await store.put(self._name, parts)

    async def _write(self, contents: Sequence[Content]) -> list[ByteRef]:
        while True:
            grants = self._grants
            try:
                return self._segments.write(contents)
            except SegmentFull as full:
                async with self._granting:
                    if self._grants == grants:  # else another put has got one meanwhile
                        finished = self._segments.take_finished()
                        store = self._store.within(_ROOM_TIMEOUT_S)
                        self._segments.use(await store.grant(self._name, full.needed_bytes, finished))
                        self._grants += 1

    def close(self) -> None:
        self._segments.close()


def _array(sample: Sample, name: str) -> Array:
    return np.asarray(getattr(sample, name), BULK[name])


def _declared_bulk(samples: Sequence[Sample]) -> dict[tuple[int, str], tuple[Content, str, list[int]]]:
    """What of the samples' declared columns does not lie in a row, with its dtype and shape: by sample and column."""
    found: dict[tuple[int, str], tuple[Content, str, list[int]]] = {}
    for number, sample in enumerate(samples):
        for name, value in sample.columns.items():
            if isinstance(value, np.ndarray):
                found[number, name] = (value.reshape(-1), value.dtype.name, [*value.shape])
            elif isinstance(value, str) and len(value) > MAX_STRING:
                text = value.encode()
                found[number, name] = (text, _UTF8, [len(text)])
    return found


def _columns(
    samples: Sequence[Sample], refs: Sequence[ByteRef], declared_bulk: dict[tuple[int, str], list[Any]]
) -> dict[str, dict[str, Any]]:
    """By agent, as ``Tables.put`` wants them."""
    rows: dict[str, list[int]] = {}
    for number, sample in enumerate(samples):
        rows.setdefault(sample.agent, []).append(number)
    parts: dict[str, dict[str, Any]] = {}
    for agent, numbers in rows.items():
        own = [samples[number] for number in numbers]
        part = parts[agent] = {
            "sample_id": [sample.sample_id for sample in own],
            "policy_version": [sample.policy_version for sample in own],
            "query_position": [sample.query_position for sample in own],
            "reward": [sample.reward for sample in own],
            "version_changes": [
                " ".join(map(str, s.version_changes)) if s.version_changes else "" for s in own
            ],
        }
        for place, (name, dtype) in enumerate(BULK.items()):
            cells = [refs[number * len(BULK) + place] for number in numbers]
            sizes = [ref.size_bytes // DTYPE_BYTES[dtype] for ref in cells]
            # One write is in one segment.
            pieces = [[cells[0].segment, dtype, [ref.offset for ref in cells], [sizes]]]
            part[name] = {"refs": pieces}
        for name in dict.fromkeys(name for sample in own for name in sample.columns):
            part[name] = [
                declared_bulk.get((number, name), samples[number].columns.get(name)) for number in numbers
            ]
    return parts


class ExperienceReader:
    """One process's view of the samples that it has leased from a store, on this host or another."""

    def __init__(self, store: ActorRef[StoreApi], places: SegmentDirectories | None) -> None:
        """``places``: of the store's segments; None, or directories that are not on this host: the store sends what is
        read. Raises UnsafeDirectory."""
        self._store = store
        self._segments: SegmentReader | None = None
        if places is not None and all(path.is_dir() for path in places.all()):
            self._segments = SegmentReader(places)

    async def samples(self, agent: str, leased: LeasedBatch) -> list[Sample]:
        """In the order of the lease, without the columns that the run declares: ``columns`` has those. Raises
        ForeignHandle where their bytes are not there."""
        columns, bulk = leased.columns, await self.bulk(leased)
        rows = zip(*(columns[name] for name in SCALARS), strict=True)
        samples = []
        for number, (sample_id, version, position, reward, changes) in enumerate(rows):
            named = SampleId.parse(sample_id)
            cells: dict[str, Any] = {name: tuple(values[number].tolist()) for name, values in bulk.items()}
            samples.append(
                Sample(
                    sample_id=sample_id,
                    agent=agent,
                    step=named.step or 0,
                    policy_version=version,
                    group=named.group,
                    reward=reward,
                    query_position=position,
                    version_changes=tuple(map(int, changes.split())),
                    **cells,
                )
            )
        return samples

    async def bulk(self, leased: LeasedBatch) -> dict[str, list[Array]]:
        """The bulk columns of ``samples``: one flat, read-only array for each row, where its bytes lie. It keeps their
        memory. Raises ForeignHandle where they are not there, StoreError where the store does not send them."""
        columns = {name: leased.columns[name] for name in BULK}
        source = await self._source(columns.values())
        return {
            name: [
                array
                for segment, dtype, offsets, shapes in _runs(column)
                for array in source.arrays(_refs(segment, dtype, offsets, shapes), np.dtype(dtype))
            ]
            for name, column in columns.items()
        }

    async def columns(self, leased: LeasedBatch) -> dict[str, list[Any]]:
        """The columns that the run declares, by name: of each row what its workflow wrote, or somebody outside, as
        ``Sample.columns`` has it, or None. Arrays are read-only. Raises as ``bulk`` does."""
        columns = {name: column for name, column in leased.columns.items() if name not in _TRAINING}
        source = await self._source(columns.values())
        return {name: _declared(column, source) for name, column in columns.items()}

    async def _source(self, columns: Iterable[Any]) -> "SegmentReader | _Sent":
        """Where the bytes of the columns are to be read: of all of them at once, for one question to the store."""
        if self._segments is not None:
            return self._segments
        refs: dict[ByteRef, int] = {}
        for column in columns:
            for segment, dtype, offsets, shapes in _runs(column):
                item_bytes = _ITEM_BYTES[dtype]
                refs |= dict.fromkeys(_refs(segment, dtype, offsets, shapes), item_bytes)
        # Large items first: then all are aligned.
        ordered = sorted(refs, key=refs.__getitem__, reverse=True)
        return await _sent(self._store, ordered) if ordered else _Sent([], memoryview(b""))

    def forget_consumed(self) -> None:
        """Lets go of the memory of segments that the store has removed."""
        if self._segments is not None:
            self._segments.forget_removed()

    def close(self) -> None:
        if self._segments is not None:
            self._segments.close()


# --------------------------------------------------------------------------- bulk, as leases and the store tell it

_ITEM_BYTES: Final = {**DTYPE_BYTES, _UTF8: 1}
_Run = tuple[str, str, Sequence[int], Sequence[tuple[int, ...]]]


def _runs(column: Any) -> Iterator[_Run]:
    """Segment, dtype, offsets and shapes of what is bulk in a leased column, in the order of its rows."""
    if isinstance(column, dict):
        for segment, dtype, offsets, dimensions in column["refs"]:
            shapes = list(zip(*dimensions, strict=True)) if dimensions else [()] * len(offsets)
            yield segment, dtype, offsets, shapes
    else:
        for cell in column:
            if isinstance(cell, list | tuple):
                segment, offset, _, dtype, shape = cell
                yield segment, dtype, [offset], [tuple(shape)]


def _refs(
    segment: str, dtype: str, offsets: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> list[ByteRef]:
    item_bytes = _ITEM_BYTES[dtype]
    return [
        ByteRef(segment, offset, math.prod(shape) * item_bytes)
        for offset, shape in zip(offsets, shapes, strict=True)
    ]


def _declared(column: Any, source: "SegmentReader | _Sent") -> list[Any]:
    bulk = (
        value
        for segment, dtype, offsets, shapes in _runs(column)
        for value in _shaped(source, dtype, _refs(segment, dtype, offsets, shapes), shapes)
    )
    if isinstance(column, dict):
        return list(bulk)
    return [next(bulk) if isinstance(cell, list | tuple) else cell for cell in column]


def _shaped(
    source: "SegmentReader | _Sent", dtype: str, refs: Sequence[ByteRef], shapes: Sequence[tuple[int, ...]]
) -> list[Any]:
    if dtype == _UTF8:
        return [array.tobytes().decode() for array in source.arrays(refs, np.uint8)]
    arrays = source.arrays(refs, np.dtype(dtype))
    return [array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True)]


class _Sent:
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


async def _sent(store: ActorRef[StoreApi], refs: Sequence[ByteRef]) -> _Sent:
    """Raises StoreError where the store sends more or less than it was asked for."""
    memory, end = bytearray(sum(ref.size_bytes for ref in refs)), 0
    async for chunk in store.within(_CHUNK_TIMEOUT_S).fetch([*refs]):
        if end + len(chunk) > len(memory):
            raise StoreError(f"the store sends more than the {len(memory)} bytes that it was asked for")
        memory[end : end + len(chunk)] = chunk
        end += len(chunk)
    if end != len(memory):
        raise StoreError(f"the store has sent {end} bytes of {len(memory)}")
    return _Sent(refs, memoryview(memory).toreadonly())
