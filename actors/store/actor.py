"""The store actor: the tables of all agents, their journal, and the segments that their bulk lies in.

    put      refused whole, or: rows in the tables, blobs held, a record in the journal, answered once that is durable
    lease    rows to a consumer, under a fencing token that expires
    commit   what an optimizer step has used is consumed; its blobs are freed once the record is durable

Killed and started anew with the same folders it goes on with all that was acknowledged; what was leased is READY.
"""

import asyncio
from pathlib import Path
from typing import Any, Final

import msgpack

from ...core.actor import Actor, endpoint
from ...core.errors import StoreError, StoreFull
from ...core.telemetry import get_logger
from ...transport.segments import BlobRef, SegmentGrant
from ..experience import BULK, segment_places
from ..messages import Leased, Selection, StoreStatistics, TableStatistics
from .blobs import ArenaLimits, BlobArena
from .journal import StoreJournal
from .query import select
from .schema import Column, Schema
from .tables import Change, Tables

log = get_logger(__name__)

# Kinds of records besides those of the tables, whose are below 16.
_GRANT: Final = 16  # writer, segment
_SEAL: Final = 17  # writer, segments
# Consumed rows stay to be looked at for so many steps.
_KEPT_STEPS: Final = 16
_EXPIRY_INTERVAL_S: Final = 10.0
_LEASE_S: Final = 24 * 3600.0
_MOST_ROWS: Final = 10_000
_LIMITS: Final = ArenaLimits()


def training_columns() -> dict[str, Column]:
    """What the trainer needs of a sample; the ``reward`` is in every table."""
    tokens = Column(type="tokens", required=True)
    return {
        name: tokens if dtype == "int32" else Column(type="tensor", required=True, dtype=dtype, shape=(None,))
        for name, dtype in BULK.items()
    }


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
    ) -> None:
        """``memory``: a private directory on tmpfs; ``folder``: one on a disk, for the journal and for what does not
        fit into memory. ``max_staleness``: how many versions older than a policy the rows may be that it is given.
        ``lease_s``: seconds after which the rows of a lease are READY again. ``deterministic``: rows are leased in the
        order of their queries, not of their arrival."""
        self._folder = Path(folder)
        self._max_staleness = max_staleness
        self._lease_s = lease_s
        schemas = {agent: Schema(training_columns()) for agent in agents}
        self._tables = Tables(schemas, deterministic=deterministic)
        self._arena = BlobArena(segment_places(memory, folder), limits)
        self._granted: dict[str, str] = {}
        self._room = asyncio.Event()

    async def on_start(self) -> None:
        self._journal = StoreJournal.open(self._folder / "samples.journal", self._read)
        lost = self._arena.recover(self._granted, self._tables.live_blobs())
        await self._log(self._tables.begin_epoch())
        if lost:  # the machine was restarted
            rows = self._tables.rows_in(lost)
            log.error("rows lost with the memory they lay in", segments=len(lost), rows=rows)
            await self._log(self._tables.discard(rows))
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
            await self._journal.append(msgpack.packb([_SEAL, writer, finished]))
            self._arena.seal(writer, finished)
            self._room.set()
        while True:
            try:
                grant = self._arena.grant(writer, at_least_bytes)
            except StoreFull:
                self._room.clear()
                await self._room.wait()
                continue
            await self._journal.append(msgpack.packb([_GRANT, writer, grant.segment]))
            return grant

    @endpoint(idempotent=True)
    async def put(self, writer: str, parts: dict[str, dict[str, Any]]) -> None:
        try:
            change = self._tables.put(parts)
        except StoreError:
            if self._tables.holds(parts):  # this store was killed between writing them down and answering
                return
            raise
        try:
            self._arena.check(writer, change.held)
        except StoreError:
            change.undo()
            raise
        self._arena.hold(change.held)

        def undo() -> None:
            self._arena.release(change.held)
            change.undo()

        assert change.record is not None
        await self._journal.append(change.record, undo)

    @endpoint
    async def lease(self, agent: str, policy_version: int, count: int) -> Leased:
        deadline = asyncio.get_running_loop().time() + self._lease_s
        staleness = min(self._max_staleness, policy_version)
        lease = self._tables.lease(agent, "trainer", policy_version, count, deadline, staleness)
        return Leased(lease.token, lease.columns)

    @endpoint
    async def commit(self, agent: str, tokens: list[int], optimizer_step: int) -> int:
        change = self._tables.commit(agent, tokens, optimizer_step)
        await self._log(change)
        self._forget_old_steps()
        if self._journal.compaction_is_due:
            self.background(self._journal.compact([*self._grants(), *self._tables.snapshot()]), "compaction")
        return change.rows

    @endpoint
    async def select(self, where: str, limit: int) -> Selection:
        limit = min(limit, _MOST_ROWS)
        columns, rows = self._tables.scalar_columns(), self._tables.scalars()
        return await asyncio.to_thread(select, columns, rows, where, limit=limit)

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

    async def _log(self, change: Change) -> None:
        """Waits until what has happened is durable; then what it freed may go."""
        if change.record is not None:
            await self._journal.append(change.record, change.undo)
            self._release(change.freed)

    def _release(self, freed: list[BlobRef]) -> None:
        self._arena.release(freed)
        if freed:
            self._room.set()

    def _grants(self) -> list[bytes]:
        return [msgpack.packb([_GRANT, writer, segment]) for segment, writer in self._arena.granted().items()]

    def _forget_old_steps(self) -> None:
        before = self._tables.last_step - _KEPT_STEPS
        if before > self._tables.closed_before and self._tables.may_close(before):
            change = self._tables.close_steps(before)
            assert change.record is not None
            self._journal.append(change.record, change.undo)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_S)
            expired = self._tables.advance(asyncio.get_running_loop().time())
            if expired:
                log.warning("leases expired: their rows are ready again", tokens=expired)
