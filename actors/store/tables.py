"""The tables of all agents with the queues of their policies, and the records of what happened to them. Pure, as
``policy_queue.py`` is.

    change = tables.put({"solver": {"sample_id": [...], ...}})     # refused whole, or done
    await journal.append(change.record, change.undo)               # only then it is acknowledged

Applied in order to new tables of the same schemas, the records lead to the same rows, up to any of them; rows that were
leased are READY then.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Final

import msgpack

from ..columns.column_refs import ValueRef, refs_of
from ..columns.declared_columns import META, common_types
from ..errors import ProtocolViolation, StoreError
from ..messages import LeasedBatch
from ..names import AgentName, PolicyName
from ..sample_id import SAMPLE_ID_FORM, TRAJECTORY_FORM, SampleId, TrajectoryName
from .fences import Fences
from .policy_queue import Commit, EndedRows, LeaseOrder, PolicyQueue
from .row import Row, RowCounts
from .schema import CheckedColumns, Columns, Schema
from .table import Table
from .table_records import Kind, PolicySnapshot, ids_by_agent, pack_record, packed_columns


@dataclass(frozen=True, slots=True)
class TableChange:
    """The effect of an operation. ``record``: for the journal; None if nothing changed, because it was done before.
    ``undo``: takes it back, in memory; of several changes, the last first. ``rows``: how many it was about.
    ``held``: the references that rows have since. ``freed``: the references that they had, to be released once the
    record is durable."""

    record: bytes | None
    undo: Callable[[], None]
    rows: int
    held: list[ValueRef]
    freed: list[ValueRef]


def _nothing() -> None: ...


UNCHANGED: Final = TableChange(None, _nothing, 0, [], [])


class Tables:
    """``order``: in which rows are leased (``policy_queue.py``).

    It is one class because an event of a row changes its table, its policy's queue and its writer's bytes together.

    Raises ConfigError if two agents declare a column of one name with different types.
    """

    def __init__(
        self,
        policies: Mapping[AgentName, PolicyName],
        schemas: Mapping[AgentName, Schema],
        *,
        order: LeaseOrder = "arrival",
    ) -> None:
        """``policies``: the policy of each agent; ``schemas``: of each agent's table."""
        self._fences = Fences()
        self._queues = {
            policy: PolicyQueue(
                policy,
                {str(agent): schemas[agent] for agent, of in policies.items() if of == policy},
                self._fences,
                order,
            )
            for policy in dict.fromkeys(policies.values())
        }
        self._tables = {
            str(agent): Table(agent, schemas[agent], self._queues[policy])
            for agent, policy in policies.items()
        }
        self.closed_before = 0
        """Rows of earlier steps are forgotten, and none is accepted any more."""
        self.columns = common_types({agent: schema.columns for agent, schema in schemas.items()})
        """Type by name of all declared columns."""

    # ------------------------------------------------------------------ changes for the journal

    def begin_epoch(self) -> TableChange:
        """Once, when the store has started and its journal is read; nothing can be leased before it is durable."""
        epoch = self._fences.epoch + 1
        self._begin_epoch(epoch)
        return TableChange(pack_record(Kind.EPOCH, epoch), _nothing, 0, [], [])

    @property
    def epoch(self) -> int:
        """The number of this start of the store, from 1 on; 0 before it has begun."""
        return self._fences.epoch

    def put(self, parts: Mapping[str, Columns]) -> TableChange:
        """New rows by agent, all or none. Raises StoreError: see ``Table.check_put``."""
        checked = [(agent, self.table(agent).check_put(columns)) for agent, columns in parts.items()]
        record = pack_record(
            Kind.PUT, [(agent, packed_columns(columns, parts[agent])) for agent, columns in checked]
        )
        for agent, columns in checked:
            self._tables[agent].insert(columns)
        return self._write_change(record, checked, partial(self._undo_put, checked))

    def holds(self, parts: Mapping[str, Columns]) -> bool:
        """True if a put of just these rows was done before."""
        try:
            return all(self.table(agent).holds(columns) for agent, columns in parts.items())
        except StoreError:  # not valid rows
            return False

    def write(self, parts: Mapping[str, Columns]) -> TableChange:
        """Further columns of rows by agent, all or none. Raises StoreError: see ``Table.check_write``."""
        checked = [(agent, self.table(agent).check_write(columns)) for agent, columns in parts.items()]
        record = pack_record(
            Kind.WRITE, [(agent, packed_columns(columns, parts[agent])) for agent, columns in checked]
        )
        for agent, columns in checked:
            self._tables[agent].fill(columns)
        return self._write_change(record, checked, partial(self._undo_write, checked))

    def commit(self, policy: PolicyName, fences: Sequence[int], policy_version: int) -> TableChange:
        """The rows leased under ``fences`` were used by the optimizer step to ``policy_version``, the policy's next.
        The same commit again changes nothing and has the same ``rows``. Raises StoreError: see
        ``PolicyQueue.check_commit``."""
        queue = self.queue(policy)
        rows = queue.check_commit(fences, policy_version)
        if rows is None:
            assert queue.last_commit is not None
            return TableChange(None, _nothing, queue.last_commit.rows, [], [])
        commit = Commit(policy_version, tuple(sorted(set(fences))), len(rows))
        record = pack_record(
            Kind.COMMIT, policy, policy_version, commit.fences, [*ids_by_agent(rows).items()]
        )
        return self._end_change(record, [(queue, queue.commit(commit, rows))])

    def discard(self, parts: Mapping[str, Sequence[str]]) -> TableChange:
        """Discards rows, by agent, all or none; those that are discarded already don't matter. Raises StoreError: see
        ``Table.check_discard``."""
        checked = [(agent, self.table(agent).check_discard(ids)) for agent, ids in parts.items()]
        checked = [(agent, rows) for agent, rows in checked if rows]
        if not checked:
            return UNCHANGED
        record = pack_record(
            Kind.DISCARD, [*ids_by_agent(row for _, rows in checked for row in rows).items()]
        )
        queues = [(self._tables[agent].queue, rows) for agent, rows in checked]
        return self._end_change(record, [(queue, queue.discard(rows)) for queue, rows in queues])

    def lose(self, parts: Mapping[str, Sequence[str]]) -> TableChange:
        """Discards rows, by agent, and forgets them: rows of the same names may come again. Raises as ``discard``."""
        change = self.discard(parts)
        forgotten = {agent: self._tables[agent].forget(ids) for agent, ids in parts.items()}

        def undo() -> None:
            self._undo_close(self.closed_before, forgotten)
            change.undo()

        record = pack_record(Kind.LOSE, [(agent, [*ids]) for agent, ids in parts.items()])
        return replace(change, record=record, undo=undo)

    @property
    def last_step(self) -> int:
        """The newest step that has a row; -1 without rows."""
        return max((step for table in self._tables.values() for step in table.steps()), default=-1)

    def may_close(self, before: int) -> bool:
        """True if every row of the steps earlier than ``before`` is consumed or discarded."""
        try:
            for table in self._tables.values():
                table.check_close(before)
        except StoreError:
            return False
        return True

    def close_steps(self, before: int) -> TableChange:
        """Forgets the rows of the steps earlier than ``before``; rows that still come for these steps are refused.
        Raises StoreError unless all of them are consumed or discarded."""
        if before <= self.closed_before:
            return UNCHANGED
        for table in self._tables.values():
            table.check_close(before)
        earlier, self.closed_before = self.closed_before, before
        forgotten = {agent: table.close(before) for agent, table in self._tables.items()}
        undo = partial(self._undo_close, earlier, forgotten)
        return TableChange(pack_record(Kind.CLOSE, before), undo, sum(map(len, forgotten.values())), [], [])

    def apply(self, record: bytes) -> None:
        """Repeats the change of a record. Raises StoreError if it does not fit the tables: the config has changed."""
        try:
            kind, *what = msgpack.unpackb(record, strict_map_key=False)
            _APPLY[kind](self, *what)
        except (ValueError, TypeError, KeyError, ProtocolViolation) as error:
            raise StoreError(f"a record of the journal does not fit this run: {error!r}") from error

    def snapshot(self) -> Iterator[bytes]:
        """The records that lead new tables to the state of this moment; later changes do not affect them."""
        head = [pack_record(Kind.EPOCH, self.epoch)] if self.epoch else []
        if self.closed_before:
            head.append(pack_record(Kind.CLOSE, self.closed_before))
        return chain(
            head,
            *[
                PolicySnapshot(queue, [self._tables[agent] for agent in queue.agents])
                for queue in self._queues.values()
            ],
        )

    # ------------------------------------------------------------------ leases

    def table(self, agent: str) -> Table:
        """Raises StoreError for an unknown agent."""
        if agent not in self._tables:
            raise StoreError(f"there is no table for agent {agent!r}; there are: {', '.join(self._tables)}")
        return self._tables[agent]

    def queue(self, policy: PolicyName) -> PolicyQueue:
        """Leases and what else is in no journal. Raises StoreError for an unknown policy."""
        if policy not in self._queues:
            raise StoreError(f"there is no policy {policy!r}; there are: {', '.join(self._queues)}")
        return self._queues[policy]

    def lease(
        self, policy: PolicyName, policy_version: int, count: int, deadline: float, max_staleness: int = 0
    ) -> LeasedBatch:
        """See ``PolicyQueue.lease``."""
        return self.queue(policy).lease(policy_version, count, deadline, max_staleness)

    def expire(self, now: float) -> dict[PolicyName, list[int]]:
        """Ends the leases whose deadline has come: their fences by policy."""
        expired = {policy: queue.expire(now) for policy, queue in self._queues.items()}
        return {policy: fences for policy, fences in expired.items() if fences}

    # ------------------------------------------------------------------ looking

    def counts(self) -> dict[str, RowCounts]:
        """The numbers of rows by status, by agent."""
        return {agent: table.counts() for agent, table in self._tables.items()}

    def live_refs(self) -> Iterator[ValueRef]:
        """The references of all rows, once for each row. To be read before the next change."""
        for _, row in self._all_rows():
            yield from refs_of(row.cells)

    def rows_in(self, segments: set[str]) -> dict[str, list[str]]:
        """Sample ids, by agent, of the rows with references into these segments."""
        found: dict[str, list[str]] = {}
        for agent, row in self._all_rows():
            if any(ref[0] in segments for ref in refs_of(row.cells)):
                found.setdefault(agent, []).append(row.sample_id)
        return found

    def trajectory(self, name: str, waiting: Iterable[tuple[Any, ...]] = ()) -> list[dict[str, Any]]:
        """The samples of a trajectory in all tables and ``waiting``, turn by turn: their columns as in ``scalars``.

        ``name``: the trajectory's, or the id of one of its samples; a text that may be read as both is the id, if there
        is such a sample. Raises StoreError if it is neither, or has no samples here.
        """
        wanted = self._trajectory_name(name)
        step = -1 if wanted.step is None else wanted.step
        names = [*self.scalar_columns()]
        found = [
            (sample.turn, self._scalars_of(row, self._scalar_places(table)))
            for table in self._tables.values()
            for row in table.rows_of_step(step)
            if (sample := SampleId.parse(row.sample_id)).trajectory_name == wanted
        ] + [
            (sample.turn, values)
            for values in waiting
            if (sample := SampleId.parse(values[names.index("sample_id")])).trajectory_name == wanted
        ]
        if not found:
            hint = f"steps before {self.closed_before} are forgotten, evaluations never come here"
            raise StoreError(f"neither a sample nor a trajectory {name!r} is in the store ({hint})")
        return [dict(zip(names, row, strict=True)) for _, row in sorted(found, key=lambda item: item[0])]

    def scalar_columns(self) -> dict[str, str]:
        """Type by name of what ``scalars`` gives."""
        text = ("agent", "sample_id", "group", "query", "status")
        meta = {name: "str" if name in text else "int" for name in META}
        return meta | {name: kind for name, kind in self.columns.items() if kind not in ("tokens", "tensor")}

    def scalars(self) -> Iterator[tuple[Any, ...]]:
        """All rows that are there now and not forgotten, each in the order of ``scalar_columns``; None for columns
        that are not written or that the agent lacks, and for strings stored by reference. May be read while rows
        change: each row is as it is when it is read."""
        found = [(self._scalar_places(table), list(table.rows())) for table in self._tables.values()]
        return (self._scalars_of(row, places) for places, rows in found for row in rows)

    # ------------------------------------------------------------------ inside

    def _trajectory_name(self, text: str) -> TrajectoryName:
        if any(text in table for table in self._tables.values()):
            return SampleId.parse(text).trajectory_name
        try:
            return TrajectoryName.parse(text)
        except StoreError:
            raise StoreError(
                f"{text!r} is neither a sample id, {SAMPLE_ID_FORM}, nor a trajectory's name, {TRAJECTORY_FORM}"
            ) from None

    def _all_rows(self) -> Iterator[tuple[str, Row]]:
        return ((agent, row) for agent, table in self._tables.items() for row in table.rows())

    def _scalar_places(self, table: Table) -> list[int | None]:
        """For each name of ``scalar_columns`` behind those of META: its place among the cells of the table's rows; None
        if the agent lacks it."""
        return [table.schema.index.get(name) for name in list(self.scalar_columns())[len(META) :]]

    def _scalars_of(self, row: Row, places: Sequence[int | None]) -> tuple[Any, ...]:
        sample, cells = SampleId.parse(row.sample_id), row.cells
        found = [None if place is None else cells[place] for place in places]
        return (
            row.agent,
            row.sample_id,
            row.step,
            sample.group,
            sample.query,
            sample.turn,
            sample.trajectory,
            row.policy_version,
            row.query_position,
            row.status,
            row.optimizer_step,
            *[None if type(cell) is tuple else cell for cell in found],
        )

    def _write_change(
        self, record: bytes, checked: list[tuple[str, CheckedColumns]], undo: Callable[[], None]
    ) -> TableChange:
        held = list(
            chain.from_iterable(refs_of(cells) for _, columns in checked for cells in columns.values())
        )
        return TableChange(record, undo, sum(len(columns["sample_id"]) for _, columns in checked), held, [])

    def _end_change(self, record: bytes, ended: list[tuple[PolicyQueue, EndedRows]]) -> TableChange:
        freed = [ref for _, what in ended for cells in what.cells for ref in refs_of(cells)]
        rows = sum(len(what.rows) for _, what in ended)
        return TableChange(record, partial(_undo_ended, ended), rows, [], freed)

    def _undo_put(self, parts: list[tuple[str, CheckedColumns]]) -> None:
        for agent, columns in parts:
            self._tables[agent].remove(columns["sample_id"])

    def _undo_write(self, parts: list[tuple[str, CheckedColumns]]) -> None:
        for agent, columns in parts:
            self._tables[agent].empty(columns)

    def _undo_close(self, before: int, forgotten: dict[str, list[Row]]) -> None:
        self.closed_before = before
        for agent, rows in forgotten.items():
            self._tables[agent].reopen(before, rows)

    # ------------------------------------------------------------------ applying records

    def _begin_epoch(self, epoch: int) -> None:
        self._fences.begin(epoch)
        for queue in self._queues.values():
            queue.end_leases()

    def _apply_put(self, parts: list[Any]) -> None:
        for agent, columns in parts:
            self.table(agent).insert(self._restore(agent, columns))

    def _apply_write(self, parts: list[Any]) -> None:
        for agent, columns in parts:
            self.table(agent).fill(self._restore(agent, columns))

    def _restore(self, agent: str, columns: dict[str, Any]) -> CheckedColumns:
        meta = {name: columns.pop(name) for name in META if name in columns}
        return meta | self.table(agent).schema.restore(columns)

    def _apply_commit(self, policy: PolicyName, version: int, fences: list[int], parts: list[Any]) -> None:
        rows = self._rows_of(parts)
        self.queue(policy).replay_commit(Commit(version, tuple(fences), len(rows)), rows)

    def _apply_discard(self, parts: list[Any]) -> None:
        for agent, ids in parts:
            self.table(agent).queue.discard(self._rows_of([(agent, ids)]))

    def _apply_lose(self, parts: list[Any]) -> None:
        self._apply_discard(parts)
        for agent, ids in parts:
            self.table(agent).forget(ids)

    def _rows_of(self, parts: list[Any]) -> list[Row]:
        return [self.table(agent)[sample_id] for agent, ids in parts for sample_id in ids]

    def _apply_close(self, before: int) -> None:
        self.closed_before = before
        for table in self._tables.values():
            table.close(before)

    def _apply_counts(self, agent: str, consumed: int, discarded: int) -> None:
        self.table(agent).queue.restore_counts(agent, consumed, discarded)

    def _apply_last_commit(self, policy: PolicyName, last: list[Any] | None) -> None:
        commit = None if last is None else Commit(last[0], tuple(last[1]), last[2])
        self.queue(policy).last_commit = commit


def _undo_ended(ended: list[tuple[PolicyQueue, EndedRows]]) -> None:
    for queue, what in ended:
        queue.revive(what)


_APPLY: Final[dict[int, Callable[..., None]]] = {
    Kind.EPOCH: Tables._begin_epoch,
    Kind.PUT: Tables._apply_put,
    Kind.WRITE: Tables._apply_write,
    Kind.COMMIT: Tables._apply_commit,
    Kind.DISCARD: Tables._apply_discard,
    Kind.LOSE: Tables._apply_lose,
    Kind.CLOSE: Tables._apply_close,
    Kind.COUNTS: Tables._apply_counts,
    Kind.LAST_COMMIT: Tables._apply_last_commit,
}
