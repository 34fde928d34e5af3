"""The rows of one policy on their way to the trainer. Pure: no I/O, and the time is an argument.

    WRITING ──required columns written──> READY ──lease──> LEASED ──commit──> CONSUMED
       │                                  │   ^               │
       └────────────discard───────────────┤   └──expiry, new epoch
                                          └──discard──> DISCARDED

Rules:
- rows may come from the tables of several agents: all agents that use the policy share one queue, its leases and its
  chain of commits;
- a lease takes the oldest READY rows of one policy version, or of a range (older versions first), under a fence.
  "Oldest" is by arrival or, with the order ``query``, by (step, query position, query, trajectory, turn, agent), in
  any order of arrival. In both the turns of an agent in a trajectory follow each other, since a group comes at once:
  the trainer computes those of a micro-batch together. Rows that come back take their old place;
- the rows that an optimizer step used are committed with it, once. CONSUMED and DISCARDED rows never change again.

``check_...`` decides and raises StoreError; the method that carries out only changes state, so that replaying needs no
decision, and a change that could not be journaled can be undone. Leases are in no journal: their deadlines are readings
of this process's clock, and the fences of an earlier epoch are refused.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, get_args

from ..columns.column_refs import ColumnRefs, pack_column
from ..errors import StoreError, TooFewRows
from ..messages import LeasedBatch
from ..names import PolicyName
from ..sample_id import SampleId
from .fences import Fences
from .row import Event, ReadyQueue, Row, RowCounts, Status, move
from .schema import Cell, Schema

LeaseOrder = Literal["arrival", "query"]

_STATUSES: Final[tuple[Status, ...]] = get_args(Status)


class Commit(NamedTuple):
    """``rows`` rows, leased under ``fences`` (sorted), that the optimizer step to ``policy_version`` has consumed."""

    policy_version: int
    fences: tuple[int, ...]
    rows: int


@dataclass(slots=True)
class ActiveLease:
    """``deadline``: a reading of the store's clock."""

    deadline: float
    rows: list[Row]


class EndedRows(NamedTuple):
    """Rows that were consumed or discarded, and all that is needed to undo it: their cells, from which the references
    are gone, the leases they were under, and the commit before."""

    event: Event
    rows: list[Row]
    cells: list[tuple[Cell, ...]]
    leases: dict[int, ActiveLease]
    last_commit: Commit | None


class PolicyQueue:
    def __init__(
        self, policy: PolicyName, schemas: Mapping[str, Schema], fences: Fences, order: LeaseOrder
    ) -> None:
        """``schemas``: by agent that uses the policy."""
        self.policy = policy
        self.agents = tuple(schemas)
        self.last_commit: Commit | None = None
        self._schemas = schemas
        self._fences = fences
        self._order = order
        self._arrived = 0
        self._ready = ReadyQueue()
        self._writing: dict[int, dict[Row, None]] = defaultdict(dict)
        """WRITING rows by policy version, in the order of their arrival."""
        self._leases: dict[int, ActiveLease] = {}
        self._counts: dict[str, dict[Status, int]] = {agent: dict.fromkeys(_STATUSES, 0) for agent in schemas}

    def counts(self, agent: str) -> RowCounts:
        """The numbers of an agent's rows by status."""
        return RowCounts(**self._counts[agent])

    # ------------------------------------------------------------------ rows of the tables

    def orders(self, agent: str, sample_ids: Sequence[str], query_positions: Sequence[int]) -> Iterable[Any]:
        """The places of new rows among the rows of their versions."""
        if self._order == "arrival":
            first = self._arrived + 1
            self._arrived += len(sample_ids)
            return range(first, self._arrived + 1)
        return [
            (step, position, query, trajectory, turn, agent)
            for (step, query, turn, trajectory), position in zip(
                map(SampleId.parse, sample_ids), query_positions, strict=True
            )
        ]

    def add(self, agent: str, rows: Sequence[Row]) -> None:
        """Takes new rows, READY or WRITING, of the agent's table."""
        ready = 0
        for row in rows:
            if row.status == "ready":
                self._ready.push(row)
                ready += 1
            else:
                self._writing[row.policy_version][row] = None
        counts = self._counts[agent]
        counts["ready"] += ready
        counts["writing"] += len(rows) - ready

    def remove(self, row: Row) -> None:
        """Undoes ``add`` for a row."""
        self.withdraw(row)
        self._leave_writing(row)
        self._counts[row.agent]["writing"] -= 1

    def complete(self, row: Row) -> None:
        """All required columns of a WRITING row are written."""
        self._move(row, "complete")

    def withdraw(self, row: Row) -> None:
        """Undoes READY: back to WRITING, and a lease of the row ends."""
        if row.status == "leased":
            fence = next(fence for fence, lease in self._leases.items() if row in lease.rows)
            self._give_back(fence, "rows of it could not be written to the journal")
        if row.status == "ready":
            self._move(row, "undo_complete")

    # ------------------------------------------------------------------ leases

    def ready(self, policy_version: int, max_staleness: int = 0) -> int:
        """READY rows of the versions ``policy_version - max_staleness ... policy_version``."""
        return self._ready.count(policy_version - max_staleness, policy_version)

    def awaited(self, policy_version: int, count: int, max_staleness: int = 0) -> int:
        """The number of WRITING rows that a lease of ``count`` rows should wait for: it needs them, or they are of an
        older version than others that it would get, so that it would pass them over. 0 if no row is WRITING, or if
        waiting for all of them would not be enough."""
        ready = writing = 0
        for version in range(policy_version - max_staleness, policy_version + 1) if self._writing else ():
            ready += self._ready.count(version, version)
            if ready >= count:
                return writing
            writing += len(self._writing.get(version, ()))
        return writing if ready + writing >= count else 0

    def first_awaited(self, policy_version: int, max_staleness: int = 0) -> tuple[str, str, list[str]]:
        """The oldest row that ``awaited`` counts: its agent, its sample id, and the required columns that it lacks."""
        versions = range(policy_version - max_staleness, policy_version + 1)
        row = next(row for version in versions for row in self._writing.get(version, ()))
        return row.agent, row.sample_id, self._schemas[row.agent].lacking(row.cells)

    def not_complete(self, policy_version: int, count: int, max_staleness: int, missing: int) -> StoreError:
        """The error of a lease whose rows were not complete in time."""
        agent, sample_id, lacking = self.first_awaited(policy_version, max_staleness)
        return self._refusal(
            f"{count} rows of version {policy_version} were asked for, and {missing} were not complete after "
            f"{self.external_timeout_s:g} s: sample {sample_id} of {agent} lacks {', '.join(lacking)}, which an "
            f"external writer has to write: is it still running? (agents.{agent}.columns.{lacking[0]}.timeout_s "
            "limits the wait)"
        )

    @property
    def external_timeout_s(self) -> float:
        """Seconds that the rows may wait for their external columns."""
        columns = [column for schema in self._schemas.values() for column in schema.awaited.values()]
        return max((column.timeout_s for column in columns), default=0.0)

    def lease(self, policy_version: int, count: int, deadline: float, max_staleness: int = 0) -> LeasedBatch:
        """The oldest ``count`` READY rows of the versions ``policy_version - max_staleness ... policy_version``.

        ``deadline``: the reading of the clock at which ``expire`` puts them back. Raises StoreError if fewer are ready.
        """
        first = policy_version - max_staleness
        ready = self._ready.count(first, policy_version)
        if not 1 <= count <= ready:
            which = f"versions {first} to" if max_staleness else "version"
            problem = f"{count} rows of {which} {policy_version} were asked for, {ready} are ready"
            raise TooFewRows(f"policy {self.policy}: {problem}")
        fence = self._fences.next()
        rows = self._ready.take(first, policy_version, count)
        move(rows, "lease")
        agents = [row.agent for row in rows]
        by_agent = {agent: agents.count(agent) for agent in dict.fromkeys(agents)}
        for agent, leased in by_agent.items():
            self._counts[agent]["ready"] -= leased
            self._counts[agent]["leased"] += leased
        self._leases[fence] = ActiveLease(deadline, rows)
        return LeasedBatch(fence, {"agent": agents, **self._columns(rows, tuple(by_agent))})

    def is_active(self, fence: int) -> bool:
        """True while the lease has its rows."""
        return fence in self._leases

    def give_back(self, fence: int, why: str) -> None:
        """Ends a lease, if it is active: its rows are READY again."""
        if fence in self._leases:
            self._give_back(fence, why)

    def expire(self, now: float) -> list[int]:
        """Ends the leases whose deadline has come: their rows are READY again. Returns their fences."""
        expired = [fence for fence, lease in self._leases.items() if lease.deadline <= now]
        for fence in expired:
            self._give_back(fence, "it expired")
        return expired

    def end_leases(self) -> None:
        """Ends all leases, as a new epoch begins."""
        for fence in list(self._leases):
            self._give_back(fence, "a new epoch began")

    # ------------------------------------------------------------------ how rows end

    def check_commit(self, fences: Sequence[int], policy_version: int) -> list[Row] | None:
        """The rows that the optimizer step to ``policy_version`` consumes; None if the same commit was carried out
        before.

        A lease past its deadline is active until ``expire`` has ended it: no other lease has its rows. Raises
        StoreError for a fence without an active lease, and for a version that does not follow the last one.
        """
        unique, last = tuple(sorted(set(fences))), self.last_commit
        if last is not None and policy_version <= last.policy_version:
            if (policy_version, unique) == (last.policy_version, last.fences):
                return None
            raise self._refusal(
                f"version {policy_version} does not follow {last.policy_version}, which was committed with "
                f"{len(last.fences)} leases, not these"
            )
        return [row for fence in unique for row in self._active(fence).rows]

    def commit(self, commit: Commit, rows: Sequence[Row]) -> EndedRows:
        """Carries out a commit that ``check_commit`` passed."""
        leases = {fence: self._leases.pop(fence) for fence in commit.fences}
        for fence in leases:
            self._fences.end(fence, f"version {commit.policy_version} was committed with it")
        return self._consume(commit, rows, "commit", leases)

    def replay_commit(self, commit: Commit, rows: Sequence[Row]) -> None:
        """Repeats a commit that the journal holds."""
        self._consume(commit, rows, "replay_commit", {})

    def discard(self, rows: Sequence[Row]) -> EndedRows:
        """Ends rows that are not trained."""
        return self._end(rows, "discard", {})

    def revive(self, ended: EndedRows) -> None:
        """Undoes ``commit`` or ``discard``: rows that were leased are leased again, under the same fences."""
        for row, cells in zip(ended.rows, ended.cells, strict=True):
            row.cells = cells
            row.optimizer_step = None
            if ended.event == "commit":
                self._move(row, "undo_commit")
            else:
                self._move(row, "undo_discard")
                if self._schemas[row.agent].is_complete(cells):
                    self._move(row, "complete")
        for fence in ended.leases:
            self._fences.undo_end(fence)
        self._leases |= ended.leases
        self.last_commit = ended.last_commit

    def restore_counts(self, agent: str, consumed: int, discarded: int) -> None:
        """Counts of a snapshot, whose rows lack those that are forgotten."""
        self._counts[agent] |= {"consumed": consumed, "discarded": discarded}

    # ------------------------------------------------------------------ inside

    def _move(self, row: Row, event: Event) -> None:
        before = row.status
        move((row,), event)
        counts = self._counts[row.agent]
        counts[before] -= 1
        counts[row.status] += 1
        if before == "ready":
            self._ready.drop(row)
        elif before == "writing":
            self._leave_writing(row)
        if row.status == "ready":
            self._ready.push(row)
        elif row.status == "writing":
            self._writing[row.policy_version][row] = None

    def _leave_writing(self, row: Row) -> None:
        rows = self._writing[row.policy_version]
        del rows[row]
        if not rows:
            del self._writing[row.policy_version]

    def _columns(self, rows: Sequence[Row], agents: tuple[str, ...]) -> dict[str, Sequence[Any] | ColumnRefs]:
        columns: dict[str, Sequence[Any] | ColumnRefs] = {
            "sample_id": [row.sample_id for row in rows],
            "policy_version": [row.policy_version for row in rows],
            "query_position": [row.query_position for row in rows],
        }
        names = self._schemas[agents[0]].names
        cells = [row.cells for row in rows]
        if len(agents) > 1:
            names, cells = self._align_cells(rows, agents)
        columns.update(zip(names, map(pack_column, zip(*cells, strict=True)), strict=True))
        return columns

    def _align_cells(
        self, rows: Sequence[Row], agents: tuple[str, ...]
    ) -> tuple[tuple[str, ...], list[tuple[Cell, ...]]]:
        """The names of all columns of the agents' tables, and the cells of each row in their order."""
        names = tuple(dict.fromkeys(name for agent in agents for name in self._schemas[agent].names))
        places = {agent: [self._schemas[agent].index.get(name) for name in names] for agent in agents}
        cells = [
            tuple([None if place is None else row.cells[place] for place in places[row.agent]])
            for row in rows
        ]
        return names, cells

    def _consume(
        self, commit: Commit, rows: Sequence[Row], event: Event, leases: dict[int, ActiveLease]
    ) -> EndedRows:
        ended = self._end(rows, event, leases)
        for row in rows:
            row.optimizer_step = commit.policy_version
        self.last_commit = commit
        return ended

    def _end(self, rows: Sequence[Row], event: Event, leases: dict[int, ActiveLease]) -> EndedRows:
        cells = [row.cells for row in rows]
        for row in rows:
            self._move(row, event)
            row.cells = tuple([None if type(cell) is tuple else cell for cell in row.cells])
        return EndedRows(event, [*rows], cells, leases, self.last_commit)

    def _give_back(self, fence: int, why: str) -> None:
        for row in self._leases.pop(fence).rows:
            self._move(row, "give_back")
        self._fences.end(fence, why)

    def _active(self, fence: int) -> ActiveLease:
        lease = self._leases.get(fence)
        if lease is None:
            raise self._refusal(f"no lease with fence {fence} is active: {self._fences.why_ended(fence)}")
        return lease

    def _refusal(self, why: str) -> StoreError:
        return StoreError(f"policy {self.policy}: {why}")
