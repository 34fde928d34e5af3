"""Samples on their way into the store and out of it: arrays lie in segments, messages carry references to them.

rollout   ExperienceWriter.put(samples)     copies token lists into a segment, sends the columns
trainer   ExperienceReader.samples(batch)   maps the segments, and returns samples

The segments of a writer on another host than the store are on its own host. Readers elsewhere get the bytes over the
network: from that writer (``segments/far_segments.py``), or from the store if they are on its host.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from ...core.errors import ActorDead, UnsafeDirectory
from ...core.ref import ActorRef
from ...core.system import ActorSystem
from ...core.telemetry import get_logger
from ...transport.remote.bulk import Bulk
from ...transport.select import this_node
from ..errors import SamplesUnreachable, StoreFull
from ..messages import WORK_TIMEOUT_S, GroupClosed, LeasedBatch, Sample, StoreApi, Truncation
from ..names import AgentName
from ..sample_id import SampleId
from ..segments.errors import PieceLost, SegmentFull
from ..segments.far_segments import RemoteSegmentReader, WriterNode
from ..segments.reader import SegmentReader
from ..segments.segments import ByteRef, SegmentDirectories, SegmentGrant, is_remote, place_of
from ..segments.writer import Content, SegmentWriter, packed_bytes
from .column_refs import ITEM_BYTES, UTF8, ColumnRefs, pack_flat, runs, segments
from .declared_columns import MAX_STRING
from .sample_sources import SEND_TIMEOUT_S, Array, Fetched, Places, Sent, Source, declared_values, fetch_bytes

ARRAY_COLUMNS: Final = {
    "prompt_tokens": "int32",
    "tokens": "int32",
    "logprobs": "float32",
}
"""The columns of a sample that are stored by reference, and their dtypes; each has one dimension.

``version_changes`` and ``truncation``, empty in most samples, are short strings of numbers: a further array would cost
every sample a tenth of its way through the store.
"""

SCALAR_COLUMNS: Final = (
    "sample_id",
    "policy_version",
    "query_position",
    "reward",
    "advantage",
    "group_size",
    "temperature",
    "truncation",
    "version_changes",
)
"""The columns of a sample that lie in its row, besides its agent."""

_TRAINING: Final = frozenset({"agent", *SCALAR_COLUMNS, *ARRAY_COLUMNS})
# A store that is restarted reads its journal, well below a second; on a busy machine it may be given up several times.
_STORE_RESTARTS_S: Final = 30.0
_PAUSE_S: Final = 0.05
_ROOM_S: Final = 1.0
# As long as a full store waits by default (``StoreSetup.patience_s``).
_NO_ROOM_S: Final = 1800.0
_FOLDER: Final = "samples"
log = get_logger(__name__)

Result = TypeVar("Result")


def segment_directories(runtime_dir: str | Path, store_dir: str | Path) -> SegmentDirectories:
    """``runtime_dir``: a run's private directory on tmpfs; ``store_dir``: the store's folder on a disk."""
    return SegmentDirectories(Path(runtime_dir) / "segments", Path(store_dir) / "segments")


def writer_node(system: ActorSystem, name: str, replaces: str, *, encrypted: bool) -> WriterNode:
    """The node of a writer. ``replaces``: the beginning of the names of its earlier lives."""
    bulk = Bulk.of(system, encrypted=encrypted)
    return WriterNode(this_node(system.directory), system.directory / _FOLDER, name, bulk, replaces)


def far_reader(system: ActorSystem, *, encrypted: bool) -> RemoteSegmentReader | None:
    """Reads what lies on other nodes; None if the system does not reach them."""
    bulk = Bulk.of(system, encrypted=encrypted)
    return (
        None if bulk is None else RemoteSegmentReader(system.directory / _FOLDER, bulk, system.run_blocking)
    )


async def through_restarts(call: Callable[[], Awaitable[Result]]) -> Result:
    """Repeats a call if the store dies meanwhile; returns its result. Raises ActorDead if the store is not restarted in
    time."""
    loop = asyncio.get_running_loop()
    give_up_at: float | None = None
    while True:
        began = loop.time()
        try:
            return await call()
        except ActorDead:
            now = loop.time()
            # A call may wait for room for hours: the time counts from the loss that ended the wait.
            if give_up_at is None or now - began >= _STORE_RESTARTS_S:
                give_up_at = now + _STORE_RESTARTS_S
            elif now >= give_up_at:
                raise
        await asyncio.sleep(_PAUSE_S)


class ExperienceWriter:
    """Puts one process's samples into a store: into memory of its own node."""

    def __init__(
        self,
        store: ActorRef[StoreApi],
        name: str,
        directories: SegmentDirectories,
        node: WriterNode | None = None,
    ) -> None:
        """``name``: of this writer, unique among all that the store ever had. ``directories``: of the store's segments,
        if it is on this node, as it is with ``node`` None."""
        self._store = store
        self._name = name
        self._directories = directories
        self._node = node
        self._segments: SegmentWriter | None = None
        self._granting = asyncio.Lock()
        self._grants = 0
        """Grants that this writer has got."""

    async def put(self, samples: Sequence[Sample], report: GroupClosed | None = None) -> None:
        """Adds the samples of a closed group, all or none, and with them its report. Raises StoreError if the store
        refuses one, WriterRetired if it accepts nothing more from this writer, CallTimeout if it has had no room for a
        day, StoreFull if this writer's own host has had none for half an hour."""
        contents: list[Content] = [
            np.asarray(getattr(sample, name), dtype)
            for name, dtype in ARRAY_COLUMNS.items()
            for sample in samples
        ]
        declared = _declared_contents(samples)
        contents += [content for content, _, _ in declared.values()]
        refs = await self._write(contents)
        try:
            await self._put(_parts(samples, refs, declared), report)
        finally:
            if self._segments is not None:
                self._segments.answered(refs)

    async def _put(self, parts: dict[str, dict[str, Any]], report: GroupClosed | None) -> None:
        """Repeats a put if the store dies meanwhile: it is restarted, or the next try fails too.

        Each try waits for the connection, so a busy machine's pauses may cost several. The store recognises a repeated
        put by its bytes.
        """
        store = self._store.within(WORK_TIMEOUT_S)
        await through_restarts(lambda: store.put(self._name, parts, report))

    async def _write(self, contents: Sequence[Content]) -> list[ByteRef]:
        while True:
            grants = self._grants
            try:
                if self._segments is None:
                    raise SegmentFull(packed_bytes(contents), 0)
                return self._segments.write(contents)
            except SegmentFull as full:
                async with self._granting:
                    if self._grants == grants:  # else another put has got one meanwhile
                        await self._take_grant(full.needed_bytes)

    async def _take_grant(self, needed_bytes: int) -> None:
        """Raises UnsafeDirectory, and StoreFull if this host has had no room for half an hour."""
        finished = [] if self._segments is None else self._segments.take_finished()
        node = self._node
        give_up_at: float | None = None
        while True:
            grant = await self._grant(needed_bytes, finished)
            try:
                if node is not None and is_remote(grant.segment):
                    node.make(grant)
                break
            except OSError as error:
                if node is None or error.errno not in StoreFull.ERRNOS:
                    raise
                now = asyncio.get_running_loop().time()
                give_up_at = give_up_at or now + _NO_ROOM_S
                if now >= give_up_at:
                    problem = (
                        f"{error.strerror}, for {_NO_ROOM_S:g} s; free memory of this host, or lower "
                        "store.memory_bytes"
                    )
                    raise StoreFull(node.folder, grant.size_bytes, problem) from error
                log.warning("no room for samples on this host: waiting", problem=str(error))
                finished = [grant.segment]
                await asyncio.sleep(_ROOM_S)
        if self._segments is None:  # by now the store has made the directories
            is_there = node is not None and is_remote(grant.segment)
            self._segments = SegmentWriter(node.directories if node and is_there else self._directories)
        self._segments.use(grant)

    async def _grant(self, needed_bytes: int, finished: list[str]) -> SegmentGrant:
        """Repeats the request, under the same number, if the store dies meanwhile: its answer may have been lost."""
        store = self._store.within(WORK_TIMEOUT_S)
        memory = None if self._node is None else self._node.memory()
        grant = await through_restarts(
            lambda: store.grant(self._name, self._grants, needed_bytes, finished, memory)
        )
        self._grants += 1
        return grant

    def close(self) -> None:
        """Ends the writing, and removes this writer's segments on a node of its own. The caller notifies the store."""
        if self._segments is not None:
            self._segments.close()
        if self._node is not None:
            self._node.close()


_Where = tuple[int, str]
"""A declared value: the sample's number and the column."""


def _declared_contents(samples: Sequence[Sample]) -> dict[_Where, tuple[Content, str, list[int]]]:
    """Declared values that are stored by reference: bytes, dtype and shape."""
    found: dict[_Where, tuple[Content, str, list[int]]] = {}
    for number, sample in enumerate(samples):
        for name, value in sample.columns.items():
            if isinstance(value, np.ndarray):
                found[number, name] = (value.reshape(-1), value.dtype.name, [*value.shape])
            elif isinstance(value, str) and len(value) > MAX_STRING:
                text = value.encode()
                found[number, name] = (text, UTF8, [len(text)])
    return found


def _parts(
    samples: Sequence[Sample],
    refs: Sequence[ByteRef],
    declared: Mapping[_Where, tuple[Content, str, list[int]]],
) -> dict[str, dict[str, Any]]:
    """The columns of a put by agent. ``refs``: of the array columns, one column behind the other, then of
    ``declared``."""
    count = len(samples)
    arrays = {name: refs[n * count : (n + 1) * count] for n, name in enumerate(ARRAY_COLUMNS)}
    by_reference = {
        where: [*ref, dtype, shape]
        for ref, (where, (_, dtype, shape)) in zip(
            refs[len(ARRAY_COLUMNS) * count :], declared.items(), strict=True
        )
    }
    numbers: dict[str, list[int]] = {}
    for number, sample in enumerate(samples):
        numbers.setdefault(sample.agent, []).append(number)
    return {
        agent: {
            **_scalars([samples[number] for number in own]),
            **{
                name: pack_flat([of_all[number] for number in own], ARRAY_COLUMNS[name])
                for name, of_all in arrays.items()
            },
            **_declared_cells(samples, own, by_reference),
        }
        for agent, own in numbers.items()
    }


def _scalars(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    columns = {name: [getattr(sample, name) for sample in samples] for name in SCALAR_COLUMNS}
    columns["version_changes"] = [
        " ".join(map(str, changes)) if changes else "" for changes in columns["version_changes"]
    ]
    columns["truncation"] = [_written(truncation) for truncation in columns["truncation"]]
    return columns


def _written(truncation: Truncation | None) -> str:
    """``top_k``, ``top_p`` and ``min_p``, or empty."""
    return "" if truncation is None else f"{truncation.top_k} {truncation.top_p!r} {truncation.min_p!r}"


def _truncation_of(written: str) -> Truncation | None:
    if not written:
        return None
    top_k, top_p, min_p = written.split()
    return Truncation(int(top_k), float(top_p), float(min_p))


def _declared_cells(
    samples: Sequence[Sample], numbers: Sequence[int], by_reference: Mapping[_Where, list[Any]]
) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for number in numbers for name in samples[number].columns)
    return {
        name: [by_reference.get((number, name), samples[number].columns.get(name)) for number in numbers]
        for name in names
    }


class ExperienceReader:
    """Reads samples of a store, on this host or another: those that one process has leased, and columns of any."""

    def __init__(
        self,
        store: ActorRef[StoreApi],
        directories: SegmentDirectories | None,
        far: RemoteSegmentReader | None = None,
    ) -> None:
        """``directories``: of the store's segments; if None, or if they are not on this host at the first read, the
        store sends the bytes. ``far``: reads what lies on the nodes of other writers."""
        self._store = store
        self._directories = directories
        self._far = far
        self._segments: SegmentReader | None = None
        self._bytes_from_hosts = 0

    def statistics(self) -> dict[str, float]:
        """``store_bytes_from_hosts``: of samples that lie on other hosts, as far as any were read."""
        got = self._bytes_from_hosts
        return {"store_bytes_from_hosts": float(got)} if got else {}

    async def samples(self, batch: LeasedBatch) -> list[Sample]:
        """The samples in the order of the lease, without the columns that the run declares (``columns``). Raises
        ForeignHandle if their bytes are gone, UnsafeDirectory."""
        columns, arrays = batch.columns, await self.arrays(batch)
        rows = zip(columns["agent"], *(columns[name] for name in SCALAR_COLUMNS), strict=True)
        samples = []
        for number, (agent, *scalars) in enumerate(rows):
            sample_id, version, position, reward, advantage, size, temperature, cut, changes = scalars
            named = SampleId.parse(sample_id)
            cells: dict[str, Any] = {name: tuple(values[number].tolist()) for name, values in arrays.items()}
            samples.append(
                Sample(
                    sample_id=sample_id,
                    agent=agent,
                    step=named.step or 0,
                    policy_version=version,
                    group=named.group,
                    reward=reward,
                    advantage=advantage,
                    group_size=size,
                    query_position=position,
                    version_changes=tuple(map(int, changes.split())),
                    temperature=temperature,
                    truncation=_truncation_of(cut),
                    **cells,
                )
            )
        return samples

    async def arrays(self, batch: LeasedBatch) -> dict[str, list[Array]]:
        """The array columns of ``samples``: one flat, read-only array for each row, as a view of the segment, whose
        memory it keeps. Raises ForeignHandle if the bytes are gone, StoreError if the store does not send them."""
        columns = {name: batch.columns[name] for name in ARRAY_COLUMNS}
        source = await self._source(columns.values())
        return {
            name: [array for run in runs(column) for array in source.arrays(run.refs, np.dtype(run.dtype))]
            for name, column in columns.items()
        }

    async def columns(self, batch: LeasedBatch, names: Collection[str] | None = None) -> dict[str, list[Any]]:
        """The columns that the run declares, by name: for each row the value that its workflow or an external writer
        wrote, as ``Sample.columns`` has it, or None. ``names``: those that are wanted; None: all. Arrays are read-only.
        Raises as ``arrays`` does."""
        columns = {
            name: column
            for name, column in batch.columns.items()
            if name not in _TRAINING and (names is None or name in names)
        }
        source = await self._source(columns.values())
        return {name: declared_values(column, source) for name, column in columns.items()}

    async def column(self, agent: AgentName, name: str, sample_ids: Sequence[str]) -> list[Any]:
        """One column of samples that need no lease, a value for each, as ``columns`` has it. Raises as ``arrays`` does,
        and StoreError for an unknown agent, column or sample, or if the samples are trained meanwhile."""
        found = await self._store.within(SEND_TIMEOUT_S).column(agent, name, [*sample_ids])
        return declared_values(found[name], await self._source([found[name]]))

    async def _source(self, columns: Iterable[Sequence[Any] | ColumnRefs]) -> Source:
        """The source of the columns' bytes: the segments, one answer of the store for all of them, or their writers'
        memory. Raises SamplesUnreachable."""
        columns = list(columns)
        places = {place_of(name)[0] for column in columns for name in segments(column)}
        if places <= {""}:
            return await self._stored(columns)
        refs = [ref for column in columns for run in runs(column) for ref in run.refs]
        sources: dict[str, Source] = {}
        for place in places - {""}:
            here = [ref for ref in refs if place_of(ref.segment)[0] == place]
            sources[place] = await self._far_source(place, here)
        if "" in places:
            sources[""] = await self._stored(columns)
        return Places(sources)

    async def _far_source(self, place: str, refs: Sequence[ByteRef]) -> Source:
        if self._far is None:
            raise SamplesUnreachable(
                f"{len(refs)} values are in memory of {place}, which this process does not reach"
            )
        if (directories := self._far.local_directories(place)) is not None:
            try:
                return SegmentReader(directories)
            except UnsafeDirectory as gone:  # its writer has ended at this moment
                raise SamplesUnreachable(str(gone)) from gone
        try:
            found = await self._far.fetch(place, refs, SEND_TIMEOUT_S)
        except PieceLost as lost:
            raise SamplesUnreachable(str(lost)) from lost
        self._bytes_from_hosts += sum(map(len, found.values()))
        return Fetched(found)

    async def _stored(self, columns: Iterable[Sequence[Any] | ColumnRefs]) -> SegmentReader | Sent:
        """The source of what lies on the store's node."""
        if (places := self._directories) is not None and all(path.is_dir() for path in places.all()):
            self._segments = SegmentReader(places)
        self._directories = None
        if self._segments is not None:
            return self._segments
        item_bytes: dict[ByteRef, int] = {}
        for column in columns:
            for run in runs(column):
                if not place_of(run.refs[0].segment)[0]:
                    item_bytes |= dict.fromkeys(run.refs, ITEM_BYTES[run.dtype])
        # Large items first: then all are aligned.
        ordered = sorted(item_bytes, key=item_bytes.__getitem__, reverse=True)
        if not ordered:
            return Sent([], memoryview(b""))
        self._bytes_from_hosts += sum(ref.size_bytes for ref in ordered)
        return await fetch_bytes(self._store, ordered)

    def forget_consumed(self) -> None:
        """Unmaps the segments that the store has removed."""
        if self._segments is not None:
            self._segments.forget_removed()

    def close(self) -> None:
        """Unmaps all segments; arrays that were read stay valid."""
        if self._segments is not None:
            self._segments.close()
