"""The store actor: the tables of all agents, their journal, and the segments that values lie in by reference.

    put      refused whole, or: rows in the tables, references held, a record in the journal, acknowledged once durable
    write    the same for further columns of rows that are there
    retire   a writer that is lost: refused from now on; its reports of the groups that it had put
    lease    rows of a policy under a fence that expires, once all of them are durable
    commit   the rows that an optimizer step used are consumed; their bytes are freed once the record is durable

Killed and started again with the same folders, the store continues with all that was acknowledged; rows that were
leased are READY.

If there is no room, on the disk or within the limits, callers wait: nothing is lost, and the console is notified.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgpack

from ...core.actor import Actor, endpoint
from ...core.errors import JournalError
from ...core.telemetry import get_logger
from ...core.waits import Wait
from ...transport.select import this_node
from ..columns.column_refs import ValueRef
from ..columns.store_client import segment_directories
from ..errors import StoreError, StoreFull
from ..messages import (
    KEPT_STEPS,
    GroupClosed,
    LeasedBatch,
    Selection,
    StoreApi,
    StoreStatistics,
    TableStatistics,
    UnjudgedSample,
)
from ..names import AgentName, PolicyName, Step
from ..run_events import RewardsLate, RunEvent, StoreBlocked, StoreUnblocked
from ..segments.segments import ByteRef, SegmentGrant, WriterMemory
from . import lost_bytes
from .column_waits import ColumnWaits
from .grants import GRANT, SEAL, Grants, grant_record, seal_record
from .judging import JUDGED, WITHDRAWN, Judging
from .segment_arena import SegmentArena
from .select_pool import SelectPool
from .store_journal import StoreJournal
from .store_setup import StoreSetup, table_schemas
from .tables import UNCHANGED, TableChange, Tables
from .writers import REPORT, RETIRE, Writers, report_of, report_record, retire_record

log = get_logger(__name__)

_EXPIRY_INTERVAL_S: Final = 10.0
# Commits signal free space; a disk that was cleared is found by polling.
_ROOM_INTERVAL_S: Final = 1.0
_MOST_ROWS: Final = 10_000
_CHUNK_BYTES: Final = 2**20


class Store(Actor, StoreApi):
    """Keeps the samples of all agents until they are trained, and journals each change before it is acknowledged.

    It is one class because each endpoint is one method, and all of them use the same tables and the same journal.
    """

    def __init__(self, setup: StoreSetup) -> None:
        self._setup = setup
        self._tables = Tables(setup.policies, table_schemas(setup.policies, setup.columns), order=setup.order)
        self._writers = Writers()
        self._grants = Grants()
        self._room = asyncio.Event()
        self._full: tuple[StoreFull, float] | None = None
        """The reason for which there is no room, and the time since which there is none."""
        self._leasing = {policy: asyncio.Lock() for policy in setup.policies.values()}
        self._waits = ColumnWaits(self._notify)
        self._judging = Judging(setup.columns, continues=setup.continues)
        self._puts = self._commits = self._written = self._late_rewards = 0

    async def on_start(self) -> None:
        self._moved_at = self.system.clock()
        self._node = this_node(self.system.directory)
        self._selects = SelectPool(self._setup.selects, self.system.run_blocking)
        self._journal = await self._open_journal()
        places = segment_directories(self.system.directory, self._setup.store_dir)
        self._arena = SegmentArena(places, self._setup.limits)
        lost = self._arena.recover(self._grants.writers, self._tables.live_refs(), self._grants.sizes)
        await self._begin_epoch()
        if lost:  # the machine was restarted
            rows = self._tables.rows_in(lost)
            log.error("rows lost with the memory they lay in", segments=len(lost), rows=rows)
            discarded = self._tables.discard(rows)
            there = [ref for ref in discarded.freed if ref[0] not in lost]
            await self._journal_change(replace(discarded, freed=there))
        self.background(self._expire(), "expiry")

    async def _open_journal(self) -> StoreJournal:
        """On a full disk a new journal waits for room, as all writers do."""
        while True:
            try:
                return StoreJournal.open(self._setup.store_dir / "samples.journal", self._read)
            except StoreFull as full:
                await self._wait_for_room(full)

    async def _begin_epoch(self) -> None:
        """Returns once the epoch of this start is in the journal; it waits for room too."""
        epoch = self._tables.begin_epoch()
        while True:
            try:
                await self._journal_change(epoch)
            except StoreFull as full:
                await self._wait_for_room(full)
            else:
                self._has_room()
                return

    async def on_stop(self) -> None:
        await self._journal.close()
        self._arena.close()

    def _read(self, record: bytes) -> None:
        """Applies one record of the journal, when the store starts."""
        kind, *what = msgpack.unpackb(record, strict_map_key=False)
        if kind in (GRANT, SEAL):
            self._grants.read(kind, what)
        elif kind == RETIRE:
            self._writers.retire(what[0])
            self._judging.retire(what[0])
            self._grants.retire(what[0])
        elif kind == REPORT:
            writer, report, samples = what
            self._writers.add(writer, report_of(report))
            if samples is not None:
                self._tables.apply(samples)
        elif kind in (JUDGED, WITHDRAWN):
            self._judging.apply(kind, what)
        else:
            self._tables.apply(record)

    def progress(self) -> int:
        """Puts, commits, and writes from outside the run."""
        return self._puts + self._commits + self._written

    def waits(self) -> list[Wait]:
        """Writers that wait for room, and leases that wait for external columns."""
        waits = self._waits.current()
        if self._full is not None:
            limit = f"store.room_timeout_s={self._setup.patience_s:g} ends it"
            waits.append(
                Wait(f"room for samples: {self._full[0]}", self.system.clock() - self._full[1], limit)
            )
        return waits

    def statistics(self) -> Mapping[str, float]:
        """Bytes of segments, of what rows refer to in them, and of the journal; rows that are ready and leased; puts
        and commits since the start, and rewards from outside that were too late; expressions that are evaluated and
        that wait."""
        arena, counts = self._arena.statistics(), self._tables.counts().values()
        return {
            "segment_bytes": arena.memory_bytes + arena.disk_bytes,
            "live_bytes": arena.live_bytes,
            "journal_bytes": self._journal.statistics().file_bytes,
            "rows_ready": sum(of_agent.ready for of_agent in counts),
            "rows_leased": sum(of_agent.leased for of_agent in counts),
            "puts": self._puts,
            "commits": self._commits,
            "late_rewards": self._late_rewards,
            "selects_running": self._selects.running,
            "selects_waiting": self._selects.waiting,
        }

    # ------------------------------------------------------------------ endpoints

    @endpoint
    async def grant(
        self,
        writer: str,
        number: int,
        at_least_bytes: int,
        finished: list[str],
        memory: WriterMemory | None = None,
    ) -> SegmentGrant:
        answered = self._grants.find(writer, number)
        if answered is not None and answered.size_bytes < at_least_bytes:
            # The request that it was for was given up before its answer came; nothing was written to it.
            finished, answered = [*finished, answered.segment], None
        if finished:
            sealing = seal_record(writer, finished)
            await self._durably(lambda: replace(UNCHANGED, record=sealing))
            self._arena.seal(writer, finished)
            self._room.set()
        if answered is not None and self._arena.granted().get(answered.segment) == writer:
            return answered
        while True:
            try:
                return await self._granted_durably(writer, number, at_least_bytes, memory)
            except StoreFull as full:
                await self._wait_for_room(full)

    @endpoint
    async def put(
        self, writer: str, parts: dict[str, dict[str, Any]], report: GroupClosed | None = None
    ) -> None:
        await self._durably(lambda: self._put(writer, parts, report))
        self._puts += 1
        self._moved_at = self.system.clock()

    @endpoint
    async def retire(self, writer: str) -> list[GroupClosed]:
        self._grants.retire(writer)
        self._writers.retire(writer)  # from now on; its puts before are durable or undone below
        self._judging.retire(writer)
        await self._durably(lambda: replace(UNCHANGED, record=retire_record(writer)))
        self._arena.seal(writer, [name for name, of in self._arena.granted().items() if of == writer])
        self._room.set()
        await self._journal.wait_settled()
        if lost := lost_bytes.lost_rows(self._tables, self._arena, self._writers, writer):
            log.warning("samples lost with their writer", writer=writer, rows=lost)
            await self._journal_change(self._tables.lose(lost))
        return self._writers.reports(writer)

    @endpoint
    async def lost_groups(self, writer: str) -> list[GroupClosed]:
        return self._writers.lost(writer)

    @endpoint
    async def give_back(self, policy: PolicyName, fence: int) -> None:
        self._tables.queue(policy).give_back(fence, "its samples could not be fetched")
        self._waits.rows_moved()

    @endpoint
    async def forget_reports(self, step: Step, kept: list[str] | None = None) -> None:
        self._writers.forget(step, kept or ())

    @endpoint
    async def write(self, writer: str, parts: dict[str, dict[str, Any]]) -> None:
        if self._judging.is_for(parts):
            await self._durably(lambda: self._judging.write(parts))
            self._judging.publish(name for columns in parts.values() for name in columns["sample_id"])
            for agent, names in self._judging.take_late().items():
                self._late_rewards += len(names)
                self._notify(RewardsLate(AgentName(agent), len(names), names[0]))
        else:
            await self._durably(lambda: self._hold_references(writer, self._tables.write(parts)))
        self._written += 1
        self._moved_at = self.system.clock()

    @endpoint
    async def offer(self, writer: str, samples: list[UnjudgedSample]) -> None:
        self._writers.check(writer)
        self._judging.offer(writer, samples, self.system.clock())

    @endpoint
    async def outside_rewards(self, writer: str) -> AsyncIterator[dict[str, float]]:
        async for rewards in self._judging.outside_rewards(writer):
            yield rewards

    @endpoint
    async def withdraw(self, writer: str, sample_ids: list[str]) -> None:
        await self._durably(lambda: self._judging.withdraw(writer, sample_ids))

    @endpoint
    async def lease(self, policy: PolicyName, policy_version: int, count: int) -> LeasedBatch:
        queue = self._tables.queue(policy)
        staleness = min(self._setup.max_staleness, policy_version)
        while True:
            async with self._leasing[policy]:  # in the order of the requests, also if the first has to wait
                await self._waits.until_written(queue, policy_version, count, staleness)
                deadline = self.system.clock() + self._setup.lease_s
                batch = queue.lease(policy_version, count, deadline, staleness)
            await self._journal.wait_settled()
            if queue.is_active(batch.fence):
                lost_bytes.check(self._writers, queue, batch)
                self._moved_at = self.system.clock()
                return batch
            # The disk had no room for some of its rows: they are gone, or not complete.

    @endpoint
    async def commit(self, policy: PolicyName, fences: list[int], policy_version: int) -> int:
        change = await self._durably(lambda: self._tables.commit(policy, fences, policy_version))
        self._commits += 1
        self._moved_at = self.system.clock()
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
        columns, rows = self._tables.scalar_columns(), partial(self._judging.with_rows, self._tables)
        return await self._selects.select(columns, rows, where, min(limit, _MOST_ROWS))

    @endpoint
    async def column(self, agent: AgentName, name: str, sample_ids: list[str]) -> dict[str, Any]:
        return {name: self._tables.table(agent).column(name, sample_ids)}

    @endpoint
    async def unjudged(self, agent: AgentName, columns: list[str]) -> dict[str, list[Any]]:
        return self._judging.unjudged(agent, columns)

    @endpoint
    async def trajectory(self, name: str) -> Selection:
        waiting = self._judging.scalars(self._tables.scalar_columns())
        return Selection(rows := self._tables.trajectory(name, waiting), len(rows))

    @endpoint
    async def table_statistics(self) -> dict[str, TableStatistics]:
        counts = self._tables.counts().items()
        return {agent: TableStatistics(of.ready, of.leased, of.consumed) for agent, of in counts}

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

    # ------------------------------------------------------------------ changes

    def _put(self, writer: str, parts: dict[str, dict[str, Any]], report: GroupClosed | None) -> TableChange:
        self._writers.check(writer)
        try:
            change = self._tables.put(parts)
        except StoreError:
            if self._tables.holds(parts):  # this store was killed between the journal and the acknowledgement
                return UNCHANGED
            raise
        held = self._hold_references(writer, change)
        return held if report is None else self._add_report(writer, held, report)

    def _add_report(self, writer: str, change: TableChange, report: GroupClosed) -> TableChange:
        """The same change with the report, in one record."""
        self._writers.add(writer, report)

        def undo() -> None:
            self._writers.remove(writer, report)
            change.undo()

        return replace(change, record=report_record(writer, report, change.record), undo=undo)

    def _hold_references(self, writer: str, change: TableChange) -> TableChange:
        """Holds the references that ``change`` brought. Raises StoreError if they are not ``writer``'s segments."""
        try:
            self._arena.check(writer, change.held)
        except StoreError:
            change.undo()
            raise
        self._arena.hold(change.held)
        self._waits.rows_moved()

        def undo() -> None:
            self._arena.release(change.held)
            change.undo()

        return replace(change, undo=undo)

    async def _durably(self, make: Callable[[], TableChange]) -> TableChange:
        """Returns the change that ``make`` has made, once it is in the journal. If there is no room for that, the
        change is undone, and made again when there is."""
        while True:
            change = make()
            if change.record is None:  # what it repeats may be on its way into the journal
                await self._journal.wait_settled()
                return change
            try:
                await self._journal_change(change)
            except StoreFull as full:
                await self._wait_for_room(full)
                continue
            self._has_room()
            return change

    async def _journal_change(self, change: TableChange) -> None:
        """Returns once ``change`` is in the journal. The references that it frees are released then, also if the caller
        was cancelled."""
        if change.record is None:
            return
        appended = self._journal.append(change.record, change.undo)
        appended.add_done_callback(lambda done: None if done.exception() else self._release(change.freed))
        await asyncio.shield(appended)

    def _release(self, freed: list[ValueRef]) -> None:
        self._arena.release(freed)
        if freed:
            self._room.set()

    async def _granted_durably(
        self, writer: str, number: int, at_least_bytes: int, memory: WriterMemory | None
    ) -> SegmentGrant:
        """Raises StoreFull if there is no room for a segment, or in the journal, and WriterRetired: nothing is granted
        then."""
        self._writers.check(writer)
        is_remote = memory is not None and memory.node != self._node
        grant = self._arena.grant(writer, at_least_bytes, memory if is_remote else None)
        # Now: a compaction may come before the grant is durable.
        self._grants.sizes[grant.segment] = grant.size_bytes
        give_up = partial(self._arena.seal, writer, [grant.segment])
        record = grant_record(writer, number, grant)
        try:
            await self._journal_change(replace(UNCHANGED, record=record, undo=give_up))
        except asyncio.CancelledError:  # the writer never gets the segment
            give_up()
            raise
        self._grants.add(writer, number, replace(grant, ended=[]))
        self._has_room()
        return grant

    async def _forget_old_steps(self) -> None:
        # Samples that a step waits for may come so much later (``LooseGroups``).
        before = self._tables.last_step - KEPT_STEPS - 2 * self._setup.max_staleness
        if before > self._tables.closed_before and self._tables.may_close(before):
            with suppress(StoreFull):  # the next commit tries again
                await self._journal_change(self._tables.close_steps(before))

    async def _compact(self) -> None:
        if not self._journal.compaction_is_due:
            return  # two commits of one moment asked for it
        grants = self._grants.records(self._arena.granted())
        judged, written = self._judging.records(), self._writers.records()
        try:
            await self._journal.compact([*grants, *written, *judged, *self._tables.snapshot()])
        except (StoreFull, JournalError) as problem:  # the journal is as it was, and keeps growing
            log.warning("journal not compacted", problem=str(problem))

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_S)
            expired = self._tables.expire(self.system.clock())
            self._waits.report_unjudged(self._judging.waiting(self.system.clock() - _EXPIRY_INTERVAL_S))
            if expired:
                self._waits.rows_moved()
                log.warning("leases expired: their rows are ready again", fences=expired)

    # ------------------------------------------------------------------ waits

    async def _wait_for_room(self, full: StoreFull) -> None:
        """Returns when it is worth another try. Raises StoreError if there has been no room for too long, and nothing
        has moved meanwhile: a wait for room that would never end."""
        now = self.system.clock()
        if self._full is None:
            self._full = full, now
            log.error("no room", problem=str(full))
            self._notify(StoreBlocked(str(full)))
        still_s = now - max(self._moved_at, self._full[1])
        if still_s > self._setup.patience_s:
            remedy = "free the disk"
            if full.by_its_own_limits:
                remedy = (
                    "the steps under way do not fit. Raise store.memory_bytes or store.disk_bytes, or lower "
                    "training.queries_per_step or max_staleness"
                )
            raise StoreError(
                f"{full}; for {still_s:.0f} s no sample came or was taken (store.room_timeout_s="
                f"{self._setup.patience_s:g}): {remedy}"
            )
        self._room.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_ROOM_INTERVAL_S):
                await self._room.wait()

    def _has_room(self) -> None:
        if self._full is not None:
            self._full = None
            log.info("there is room again")
            self._notify(StoreUnblocked())

    def _notify(self, event: RunEvent) -> None:
        if self._setup.console is not None:
            self._setup.console.tell_nowait("event", event)
