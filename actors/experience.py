"""Samples on their way into the store and out of it: bulk lies in segments, and messages carry references to it.

rollout   ExperienceWriter.put(samples)      copies token lists into a segment, sends the columns
trainer   ExperienceReader.samples(leased)   maps the segments, and gives back samples
"""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..core.errors import SegmentFull
from ..core.ref import ActorRef
from ..transport.handle import DTYPE_BYTES
from ..transport.segments import BlobRef, SegmentPlaces, SegmentReader, SegmentWriter
from .messages import Leased, Sample, StoreApi
from .sample_id import SampleId

BULK: Final = {"prompt_tokens": "int32", "tokens": "int32", "logprobs": "float32", "group_rewards": "float64"}
"""The bulk columns of a sample, and their dtypes; each has one dimension."""

# A store that is full makes its writers wait until rows are consumed.
_ROOM_TIMEOUT_S: Final = 3600.0


def segment_places(memory: str | Path, folder: str | Path) -> SegmentPlaces:
    """``memory``: a run's private directory on tmpfs; ``folder``: the store's on a disk."""
    return SegmentPlaces(Path(memory) / "segments", Path(folder) / "segments")


class ExperienceWriter:
    """One process's way to put samples into a store on this host."""

    def __init__(self, store: ActorRef[StoreApi], name: str, places: SegmentPlaces) -> None:
        """``name``: of this writer, no two of a store's are equal. Raises UnsafeDirectory."""
        self._store = store
        self._name = name
        self._segments = SegmentWriter(places)
        self._granting = asyncio.Lock()
        self._grants = 0

    async def put(self, samples: Sequence[Sample]) -> None:
        """Adds the samples of a closed group, all or none. Raises RemoteError where the store refuses one, CallTimeout
        where it has had no room for an hour."""
        refs = await self._write([_array(sample, name) for sample in samples for name in BULK])
        try:
            await self._store.within(_ROOM_TIMEOUT_S).put(self._name, _columns(samples, refs))
        finally:
            self._segments.answered(refs)

    async def _write(self, contents: list[np.ndarray[Any, Any]]) -> list[BlobRef]:
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


def _array(sample: Sample, name: str) -> np.ndarray[Any, Any]:
    return np.asarray(getattr(sample, name), BULK[name])


def _columns(samples: Sequence[Sample], refs: Sequence[BlobRef]) -> dict[str, dict[str, Any]]:
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
        }
        for place, (name, dtype) in enumerate(BULK.items()):
            cells = [refs[number * len(BULK) + place] for number in numbers]
            sizes = [ref.size_bytes // DTYPE_BYTES[dtype] for ref in cells]
            # One write is in one segment.
            pieces = [[cells[0].segment, dtype, [ref.offset for ref in cells], [sizes]]]
            part[name] = {"pieces": pieces}
    return parts


class ExperienceReader:
    """One process's view of the samples that it has leased from a store on this host."""

    def __init__(self, places: SegmentPlaces) -> None:
        """Raises UnsafeDirectory."""
        self._segments = SegmentReader(places)

    def samples(self, agent: str, leased: Leased) -> list[Sample]:
        """In the order of the lease. Raises ForeignHandle where their bytes are not there."""
        columns, bulk = leased.columns, self.bulk(leased)
        scalars = ("sample_id", "policy_version", "reward", "query_position")
        rows = zip(*(columns[name] for name in scalars), strict=True)
        samples = []
        for number, (sample_id, version, reward, position) in enumerate(rows):
            named = SampleId.parse(sample_id)
            cells = {name: tuple(values[number].tolist()) for name, values in bulk.items()}
            samples.append(
                Sample(
                    sample_id=sample_id,
                    agent=agent,
                    step=named.step or 0,
                    policy_version=version,
                    group=named.group,
                    reward=reward,
                    query_position=position,
                    **cells,
                )
            )
        return samples

    def bulk(self, leased: Leased) -> dict[str, list[np.ndarray[Any, Any]]]:
        """The bulk columns of ``samples``: one flat, read-only array for each row, where its bytes lie. It keeps their
        memory. Raises ForeignHandle where they are not there."""
        return {name: self._values(leased.columns[name]) for name in BULK}

    def _values(self, packed: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
        values: list[np.ndarray[Any, Any]] = []
        for segment, dtype, offsets, dimensions in packed["pieces"]:
            item_bytes = DTYPE_BYTES[dtype]
            shapes = zip(*dimensions, strict=True)
            refs = [
                BlobRef(segment, offset, math.prod(shape) * item_bytes)
                for offset, shape in zip(offsets, shapes, strict=True)
            ]
            values += self._segments.arrays(refs, np.dtype(dtype))
        return values

    def forget_consumed(self) -> None:
        """Lets go of the memory of segments that the store has removed."""
        self._segments.forget_removed()

    def close(self) -> None:
        self._segments.close()
