"""The store actor: the tables of all agents, their journal, and the segments that their bulk lies in.

    put      refused whole, or: rows in the tables, blobs held, a record in the journal, answered once that is durable
    write    the same for further columns of rows that are there
    lease    rows to a consumer, under a fencing token that expires, once all of them are durable
    commit   what an optimizer step has used is consumed; its blobs are freed once the record is durable

Killed and started anew with the same folders it goes on with all that was acknowledged; what was leased is READY.

Where there is no room, on the disk or within the limits, whoever asks waits until there is: nothing is lost, and the
console is told.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgpack

from ...core.actor import Actor, endpoint
from ...core.errors import JournalError
from ...core.ref import ActorRef
from ...core.telemetry import get_logger
from ...transport.segments import ByteRef, SegmentGrant
from ..column_refs import ValueRef
from ..declared_columns import Column
from ..errors import StoreError, StoreFull
from ..messages import ConsoleApi, LeasedBatch, Selection, StoreStatistics, TableStatistics
from ..store_client import BULK, segment_places
from .query import select
from .schema import Schema
from .segment_arena import ArenaLimits, SegmentArena
from .store_journal import StoreJournal
from .tables import UNCHANGED, TableChange, Tables

log = get_logger(__name__)

# Kinds of records besides those of the tables, whose are below 16.
_GRANT: Final = 16  # writer, segment
_SEAL: Final = 17  # writer, segments
# Consumed rows stay to be looked at for so many steps.
_KEPT_STEPS: Final = 16
_EXPIRY_INTERVAL_S: Final = 10.0
# Room comes when rows are consumed, which is told here, or when somebody clears the disk, which is not.
_ROOM_INTERVAL_S: Final = 1.0
# Of a wait for columns from outside the person who runs it is told, once for each agent.
_TOLD_AFTER_S: Final = 10.0
_LEASE_S: Final = 24 * 3600.0
_PATIENCE_S: Final = 1800.0
_MOST_ROWS: Final = 10_000
_CHUNK_BYTES: Final = 2**20
_LIMITS: Final = ArenaLimits()


def training_columns() -> dict[str, Column]:
    """What the trainer needs of a sample; the ``reward`` is in every table."""
    tokens = Column(type="tokens", required=True)
    bulk = {
        name: tokens if dtype == "int32" else Column(type="tensor", required=True, dtype=dtype, shape=(None,))
        for name, dtype in BULK.items()
    }
    return {"version_changes": Column(type="str", required=True), **bulk}


class Store(Actor):
    """Fulfils ``StoreApi``."""

    def __init__(
        self,
        agents: list[str],
        memory: str,
        folder: str,
        max_staleness: int = 0,
        limits: ArenaLimits = _LIMITS,
        lease_s: float = _LEASE_S,
        deterministic: bool = False,
        console: ActorRef[ConsoleApi] | None = None,
        columns: dict[str, dict[str, Column]] | None = None,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """``memory``: a private directory on tmpfs; ``folder``: one on a disk, for the journal and for what does not
        fit into memory. ``max_staleness``: how many versions older than a policy the rows may be that it is given.
        ``lease_s``: seconds after which the rows of a lease are READY again. ``deterministic``: rows are leased in the
        order of their queries, not of their arrival. ``console``: hears of it when there is no room, and when there is
        again. ``columns``: by agent, those that the run declares beyond what training needs. ``patience_s``: seconds
        for which a store that is full by its own limits waits for a row to come or to be taken."""
        self._folder = Path(folder)
        self._max_staleness = max_staleness
        self._lease_s = lease_s
        own = columns or {}
        schemas = {agent: Schema({**training_columns(), **own.get(agent, {})}) for agent in agents}
        self._tables = Tables(schemas, deterministic=deterministic)
        self._arena = SegmentArena(segment_places(memory, folder), limits)
        self._granted: dict[str, str] = {}
        self._console = console
        self._room = asyncio.Event()
        self._full = False
        self._rows_moved = asyncio.Event()
        self._waits_told: set[str] = set()
        self._moved_at = asyncio.get_running_loop().time()
        self._patience_s = patience_s

    async def on_start(self) -> None:
        self._journal = StoreJournal.open(self._folder / "samples.journal", self._read)
        lost = self._arena.recover(self._granted, self._tables.live_refs())
        await self._written(self._tables.begin_epoch())
        if lost:  # the machine was restarted
            rows = self._tables.rows_in(lost)
            log.error("rows lost with the memory they lay in", segments=len(lost), rows=rows)
            discarded = self._tables.discard(rows)
            there = [bulk for bulk in discarded.freed if bulk[0] not in lost]
            await self._written(replace(discarded, freed=there))
        self.background(self._expire(), "expiry")

    async def on_stop(self) -> None:
        await self._journal.close()
        self._arena.close()

    def _read(self, record: bytes) -> None:
        """One record of the journal, when the store starts."""
        kind, *what = msgpack.unpackb(record, strict_map_key=False)
        if kind == _GRANT:
            writer, segment = what
            self._granted[segment] = writer
        elif kind == _SEAL:
            for segment in what[1]:
                self._granted.pop(segment, None)
        else:
            self._tables.apply(record)

    # ------------------------------------------------------------------ endpoints

    @endpoint(idempotent=True)
    async def grant(self, writer: str, at_least_bytes: int, finished: list[str]) -> SegmentGrant:
        if finished:
            sealing = msgpack.packb([_SEAL, writer, finished])
            await self._durably(lambda: replace(UNCHANGED, record=sealing))
            self._arena.seal(writer, finished)
            self._room.set()
        while True:
            try:
                return await self._granted_durably(writer, at_least_bytes)
            except StoreFull as full:
                self._refuse_where_it_is_too_small(full)
                await self._until_there_is_room(full)

    @endpoint
    async def put(self, writer: str, parts: dict[str, dict[str, Any]]) -> None:
        await self._durably(lambda: self._put(writer, parts))

    @endpoint
    async def write(self, writer: str, parts: dict[str, dict[str, Any]]) -> None:
        await self._durably(lambda: self._held(writer, self._tables.write(parts)))

    @endpoint
    async def lease(self, agent: str, policy_version: int, count: int) -> LeasedBatch:
        staleness = min(self._max_staleness, policy_version)
        while True:
            await self._until_written(agent, policy_version, count, staleness)
            deadline = asyncio.get_running_loop().time() + self._lease_s
            lease = self._tables.lease(agent, "trainer", policy_version, count, deadline, staleness)
            await self._journal.settled()
            if self._tables.table(agent).is_out(lease.token):
                self._moved_at = asyncio.get_running_loop().time()
                return LeasedBatch(lease.token, lease.columns)
            # The disk had no room for some of its rows: they are not there any more, or not complete.

    @endpoint
    async def commit(self, agent: str, tokens: list[int], optimizer_step: int) -> int:
        change = await self._durably(lambda: self._tables.commit(agent, tokens, optimizer_step))
        self._moved_at = asyncio.get_running_loop().time()
        await self._forget_old_steps()
        if self._journal.compaction_is_due:
            self.background(self._compact(), "compaction")
        return change.rows

    @endpoint
    async def fetch(self, refs: list[ByteRef]) -> AsyncIterator[bytes]:
        for chunk in self._arena.read_chunks(refs, _CHUNK_BYTES):
            yield chunk

    @endpoint
    async def select(self, where: str, limit: int) -> Selection:
        limit = min(limit, _MOST_ROWS)
        columns, rows = self._tables.scalar_columns(), self._tables.scalars()
        return await asyncio.to_thread(select, columns, rows, where, limit=limit)

    @endpoint
    async def trajectory(self, name: str) -> Selection:
        rows = self._tables.trajectory(name)
        return Selection(rows, len(rows))

    @endpoint
    async def table_statistics(self) -> dict[str, TableStatistics]:
        return {
            agent: TableStatistics(counts.ready, counts.leased, counts.consumed)
            for agent, counts in self._tables.counts().items()
        }

    @endpoint
    async def store_statistics(self) -> StoreStatistics:
        arena, journal = self._arena.statistics(), self._journal.statistics()
        return StoreStatistics(
            memory_bytes=arena.memory_bytes,
            disk_bytes=arena.disk_bytes,
            live_bytes=arena.live_bytes,
            journal_bytes=journal.file_bytes,
            compactions=journal.compactions,
        )

    # ------------------------------------------------------------------ inside

    async def _durably(self, make: Callable[[], TableChange]) -> TableChange:
        """What ``make`` has done, once that is in the journal. Where there is no room for that it is taken back, and
        done again when there is."""
        while True:
            change = make()
            if change.record is None:
                return change
            try:
                await self._written(change)
            except StoreFull as full:
                await self._until_there_is_room(full)
                continue
            self._has_room()
            return change

    async def _granted_durably(self, writer: str, at_least_bytes: int) -> SegmentGrant:
        """Raises StoreFull where there is no room for a segment, or in the journal: nothing is granted then."""
        grant = self._arena.grant(writer, at_least_bytes)
        give_up = partial(self._arena.seal, writer, [grant.segment])
        record = msgpack.packb([_GRANT, writer, grant.segment])
        try:
            await self._written(replace(UNCHANGED, record=record, undo=give_up))
        except asyncio.CancelledError:  # nobody will ever hear of the segment
            give_up()
            raise
        self._has_room()
        return grant

    def _put(self, writer: str, parts: dict[str, dict[str, Any]]) -> TableChange:
        try:
            change = self._tables.put(parts)
        except StoreError:
            if self._tables.holds(parts):  # this store was killed between writing them down and answering
                return UNCHANGED
            raise
        return self._held(writer, change)

    def _held(self, writer: str, change: TableChange) -> TableChange:
        """What ``writer`` has put or written, once its bytes are known to be its own."""
        try:
            self._arena.check(writer, change.held)
        except StoreError:
            change.undo()
            raise
        self._arena.hold(change.held)
        self._moved()

        def undo() -> None:
            self._arena.release(change.held)
            change.undo()

        return replace(change, undo=undo)

    def _refuse_where_it_is_too_small(self, full: StoreFull) -> None:
        """Raises StoreError where waiting for room would last for ever."""
        still_s = asyncio.get_running_loop().time() - self._moved_at
        if full.by_its_own_limits and still_s > self._patience_s:
            raise StoreError(
                f"{full}; for {still_s:.0f} s no sample came or was taken: the steps under way do not fit. Raise "
                "store.memory_bytes or store.disk_bytes, or lower training.queries_per_step or max_staleness"
            )

    async def _until_there_is_room(self, full: StoreFull) -> None:
        """Returns when it is worth another try."""
        if not self._full:
            self._full = True
            log.error("no room", problem=str(full))
            if self._console is not None:
                self._console.tell_nowait("event", "store_full", {"problem": str(full)})
        self._room.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_ROOM_INTERVAL_S):
                await self._room.wait()

    def _moved(self) -> None:
        self._moved_at = asyncio.get_running_loop().time()
        self._rows_moved.set()

    def _has_room(self) -> None:
        if self._full:
            self._full = False
            log.info("there is room again")
            if self._console is not None:
                self._console.tell_nowait("event", "store_has_room", {})

    async def _until_written(self, agent: str, policy_version: int, count: int, staleness: int) -> None:
        """Until the rows that a lease wants have what is written from outside. Raises StoreError when the columns'
        ``timeout_s`` is over."""
        table = self._tables.table(agent)
        if not table.awaited(policy_version, count, staleness):
            return
        timeout_s = max((column.timeout_s for column in table.schema.awaited.values()), default=0.0)
        try:
            async with asyncio.timeout(timeout_s):
                while missing := table.awaited(policy_version, count, staleness):
                    _, lacking = table.first_awaited(policy_version, staleness)
                    self._rows_moved.clear()
                    try:
                        async with asyncio.timeout(_TOLD_AFTER_S):
                            await self._rows_moved.wait()
                    except TimeoutError:
                        self._tell_of_the_wait(agent, missing, lacking)
        except TimeoutError:
            if not (missing := table.awaited(policy_version, count, staleness)):
                return  # in the last moment
            sample_id, lacking = table.first_awaited(policy_version, staleness)
            raise StoreError(
                f"table {agent}: {count} rows of version {policy_version} were asked for, and {missing} were not "
                f"complete after {timeout_s:g} s: sample {sample_id} lacks {', '.join(lacking)}, which somebody "
                f"outside of the run has to write; does it still run? (agents.{agent}.columns.{lacking[0]}.timeout_s "
                "is how long it may take)"
            ) from None

    def _tell_of_the_wait(self, agent: str, missing: int, lacking: Sequence[str]) -> None:
        if self._console is not None and agent not in self._waits_told:
            self._waits_told.add(agent)
            fields = {"agent": agent, "samples": missing, "columns": ", ".join(lacking)}
            self._console.tell_nowait("event", "columns_awaited", fields)

    def _release(self, freed: list[ValueRef]) -> None:
        self._arena.release(freed)
        if freed:
            self._room.set()

    def _grants(self) -> list[bytes]:
        return [msgpack.packb([_GRANT, writer, segment]) for segment, writer in self._arena.granted().items()]

    async def _forget_old_steps(self) -> None:
        before = self._tables.last_step - _KEPT_STEPS
        if before > self._tables.closed_before and self._tables.may_close(before):
            with suppress(StoreFull):  # the next commit tries again
                await self._written(self._tables.close_steps(before))

    async def _written(self, change: TableChange) -> None:
        """Once ``change`` is in the journal. What it frees is released then, whether or not anybody still waits."""
        if change.record is None:
            return
        appended = self._journal.append(change.record, change.undo)
        appended.add_done_callback(lambda done: None if done.exception() else self._release(change.freed))
        await asyncio.shield(appended)

    async def _compact(self) -> None:
        if not self._journal.compaction_is_due:
            return  # two commits of one moment have asked for it
        try:
            await self._journal.compact([*self._grants(), *self._tables.snapshot()])
        except (StoreFull, JournalError) as problem:  # the journal is as it was, and goes on growing
            log.warning("journal not compacted", problem=str(problem))

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_S)
            expired = self._tables.advance(asyncio.get_running_loop().time())
            if expired:
                self._rows_moved.set()
                log.warning("leases expired: their rows are ready again", tokens=expired)
