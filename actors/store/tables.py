"""The tables of all agents, and the records that tell what happened to them. Pure, as ``table.py`` is.

    change = tables.put({"solver": {"sample_id": [...], ...}})     # refused whole, or done
    await journal.append(change.record, change.undo)               # only then it is acknowledged

A record is MessagePack of plain data: ``[kind, ...]``. Applied in order to new tables of the same schemas, the records
lead to the same rows, whichever of them the last is; rows that were leased are READY then.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import chain, islice
from typing import Any, Final

import msgpack

from ..column_refs import ValueRef, packed, refs_of
from ..declared_columns import META, common_types
from ..errors import StoreError
from ..sample_id import SampleId, TrajectoryName
from .fences import Fences, Lease
from .row import Commit, EndedRows, Row, RowCounts
from .schema import CheckedColumns, Columns, Schema
from .table import Table

# Table of one record of a snapshot.
_CHUNK: Final = 256


class _Kind(IntEnum):
    EPOCH = 1  # epoch
    PUT = 2  # [[agent, columns], ...]
    WRITE = 3  # [[agent, columns], ...]
    COMMIT = 4  # agent, optimizer step, tokens, sample ids
    DISCARD = 5  # [[agent, sample ids], ...]
    CLOSE = 6  # before
    COUNTS = 7  # agent, consumed, discarded, last commit or None


@dataclass(frozen=True, slots=True)
class TableChange:
    """What an operation did. ``record``: for the journal; None where nothing changed, because it was done before.
    ``undo``: takes it back, in memory; of several changes, the last first. ``rows``: how many it was about.
    ``held``: the blobs that rows refer to since. ``freed``: those they don't refer to any more, to be released once
    the record is durable."""

    record: bytes | None
    undo: Callable[[], None]
    rows: int
    held: list[ValueRef]
    freed: list[ValueRef]


def _nothing() -> None: ...


UNCHANGED: Final = TableChange(None, _nothing, 0, [], [])


class Tables:
    """``deterministic``: leases go by what a sample is, not by when it came (``table.py``).

    Raises ConfigError where two agents declare a column of one name with different types.
    """

    def __init__(self, schemas: Mapping[str, Schema], *, deterministic: bool = False) -> None:
        self._tokens = Fences()
        self._tables = {
            agent: Table(agent, schema, self._tokens, deterministic=deterministic)
            for agent, schema in schemas.items()
        }
        self.closed_before = 0
        """Table of earlier steps are forgotten, and none is accepted any more."""
        self.columns = common_types({agent: schema.columns for agent, schema in schemas.items()})
        """Type by name of all declared columns."""

    # ------------------------------------------------------------------ what the journal is told

    def begin_epoch(self) -> TableChange:
        """Once, when the store has started and its journal is read; leases are given out only after it is durable."""
        epoch = self._tokens.epoch + 1
        self._begin_epoch(epoch)
        return TableChange(_pack(_Kind.EPOCH, epoch), _nothing, 0, [], [])

    @property
    def epoch(self) -> int:
        return self._tokens.epoch

    def put(self, parts: Mapping[str, Columns]) -> TableChange:
        """New rows by agent, all or none. Raises StoreError: see ``Table.check_put``."""
        checked = [(agent, self.table(agent).check_put(columns)) for agent, columns in parts.items()]
        record = _pack(_Kind.PUT, [(agent, _packed(columns, parts[agent])) for agent, columns in checked])
        for agent, columns in checked:
            self._tables[agent].insert(columns)
        return self._written(record, checked, partial(self._undo_put, checked))

    def holds(self, parts: Mapping[str, Columns]) -> bool:
        """Whether a put of just these rows is done already."""
        try:
            return all(self.table(agent).holds(columns) for agent, columns in parts.items())
        except StoreError:  # they are no rows at all
            return False

    def write(self, parts: Mapping[str, Columns]) -> TableChange:
        """Further columns of rows by agent, all or none. Raises StoreError: see ``Table.check_write``."""
        checked = [(agent, self.table(agent).check_write(columns)) for agent, columns in parts.items()]
        record = _pack(_Kind.WRITE, [(agent, _packed(columns, parts[agent])) for agent, columns in checked])
        for agent, columns in checked:
            self._tables[agent].fill(columns)
        return self._written(record, checked, partial(self._undo_write, checked))

    def commit(self, agent: str, tokens: Sequence[int], optimizer_step: int) -> TableChange:
        """The rows leased under ``tokens`` were used by the optimizer step, which is the agent's next. The same commit
        again changes nothing and has the same ``rows``. Raises StoreError: see ``Table.check_commit``."""
        table = self.table(agent)
        ids = table.check_commit(tokens, optimizer_step)
        if ids is None:
            assert table.last_commit is not None
            return TableChange(None, _nothing, table.last_commit.rows, [], [])
        commit = Commit(optimizer_step, tuple(sorted(set(tokens))), len(ids))
        record = _pack(_Kind.COMMIT, agent, commit.optimizer_step, commit.tokens, ids)
        return self._ended(record, [(table, table.consume(commit, ids))])

    def discard(self, parts: Mapping[str, Sequence[str]]) -> TableChange:
        """Table, by agent, that will never be used, all or none; those that are discarded already don't matter. Raises
        StoreError: see ``Table.check_discard``."""
        checked = [(agent, self.table(agent).check_discard(ids)) for agent, ids in parts.items()]
        checked = [(agent, ids) for agent, ids in checked if ids]
        if not checked:
            return UNCHANGED
        record = _pack(_Kind.DISCARD, checked)
        ended = [(self._tables[agent], self._tables[agent].discard(ids)) for agent, ids in checked]
        return self._ended(record, ended)

    @property
    def last_step(self) -> int:
        """The newest step that has a row; -1 where there is none."""
        return max((step for table in self._tables.values() for step in table.steps()), default=-1)

    def may_close(self, before: int) -> bool:
        """Whether every row of the steps earlier than ``before`` is consumed or discarded."""
        try:
            for table in self._tables.values():
                table.check_close(before)
        except StoreError:
            return False
        return True

    def close_steps(self, before: int) -> TableChange:
        """Every row of the steps earlier than ``before`` is consumed or discarded: they are forgotten, and what still
        comes for these steps is refused. Raises StoreError where there are others."""
        if before <= self.closed_before:
            return UNCHANGED
        for table in self._tables.values():
            table.check_close(before)
        earlier, self.closed_before = self.closed_before, before
        forgotten = {agent: table.close(before) for agent, table in self._tables.items()}
        undo = partial(self._undo_close, earlier, forgotten)
        return TableChange(_pack(_Kind.CLOSE, before), undo, sum(map(len, forgotten.values())), [], [])

    def apply(self, record: bytes) -> None:
        """Repeats what a record tells. Raises StoreError where it does not fit the tables: the config has changed."""
        try:
            kind, *what = msgpack.unpackb(record, strict_map_key=False)
            _APPLY[kind](self, *what)
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"a record of the journal does not fit this run: {error!r}") from error

    def snapshot(self) -> Iterator[bytes]:
        """The records that lead new tables to the state of this moment, whatever happens while they are read."""
        head = [_pack(_Kind.EPOCH, self.epoch)] if self.epoch else []
        if self.closed_before:
            head.append(_pack(_Kind.CLOSE, self.closed_before))
        return chain(head, *[_Frozen(table) for table in self._tables.values()])

    # ------------------------------------------------------------------ leases

    def table(self, agent: str) -> Table:
        """For what the journal is not told: leases, counts. Raises StoreError."""
        if agent not in self._tables:
            raise StoreError(f"there is no table for agent {agent!r}; there are: {', '.join(self._tables)}")
        return self._tables[agent]

    def lease(
        self,
        agent: str,
        consumer: str,
        policy_version: int,
        count: int,
        deadline: float,
        max_staleness: int = 0,
    ) -> Lease:
        """See ``Table.lease``."""
        return self.table(agent).lease(consumer, policy_version, count, deadline, max_staleness)

    def advance(self, now: float) -> dict[str, list[int]]:
        """Ends the leases whose deadline has come: their tokens by agent."""
        expired = {agent: table.advance(now) for agent, table in self._tables.items()}
        return {agent: tokens for agent, tokens in expired.items() if tokens}

    # ------------------------------------------------------------------ looking

    def counts(self) -> dict[str, RowCounts]:
        return {agent: table.counts() for agent, table in self._tables.items()}

    def live_refs(self) -> Iterator[ValueRef]:
        """What rows refer to, once for each row. To be read before the next change."""
        for _, row in self._all_rows():
            yield from refs_of(row.cells)

    def rows_in(self, segments: set[str]) -> dict[str, list[str]]:
        """Sample ids, by agent, of the rows with bulk in these segments of the arena."""
        found: dict[str, list[str]] = {}
        for agent, row in self._all_rows():
            if any(bulk[0] in segments for bulk in refs_of(row.cells)):
                found.setdefault(agent, []).append(row.sample_id)
        return found

    def trajectory(self, name: str) -> list[dict[str, Any]]:
        """Its samples in all tables, turn by turn: their columns as ``scalars`` gives them, by name.

        ``name``: the trajectory's, or the id of one of its samples; what may be read as both is the id, if there is
        such a sample. Raises StoreError where it is neither, or nothing of it is here.
        """
        wanted = self._trajectory_name(name)
        step = -1 if wanted.step is None else wanted.step
        found = [
            (sample.turn, self._plain(agent, row))
            for agent, table in self._tables.items()
            for row in table.rows_of_step(step)
            if (sample := SampleId.parse(row.sample_id)).trajectory_name == wanted
        ]
        if not found:
            hint = f"steps before {self.closed_before} are forgotten, evaluations never come here"
            raise StoreError(f"neither a sample nor a trajectory {name!r} is in the store ({hint})")
        names = self.scalar_columns()
        return [{name: row.get(name) for name in names} for _, row in sorted(found, key=lambda item: item[0])]

    def scalar_columns(self) -> dict[str, str]:
        """Type by name of what ``scalars`` gives."""
        text = ("agent", "sample_id", "group", "query", "status")
        meta = {name: "str" if name in text else "int" for name in META}
        return meta | {name: kind for name, kind in self.columns.items() if kind not in ("tokens", "tensor")}

    def scalars(self) -> list[tuple[Any, ...]]:
        """All rows that are not forgotten, each in the order of ``scalar_columns``; None for what is not written, for
        strings that are bulk, and for columns that the agent lacks."""
        names = self.scalar_columns()
        return [tuple(map(self._plain(agent, row).get, names)) for agent, row in self._all_rows()]

    # ------------------------------------------------------------------ inside

    def _trajectory_name(self, text: str) -> TrajectoryName:
        if any(text in table for table in self._tables.values()):
            return SampleId.parse(text).trajectory_name
        try:
            return TrajectoryName.parse(text)
        except StoreError:
            raise StoreError(
                f"{text!r} is neither a sample id, {{step}}:{{query}}_{{turn}}_{{trajectory}}, nor a trajectory's "
                "name, {step}:{query}_{trajectory}"
            ) from None

    def _all_rows(self) -> Iterator[tuple[str, Row]]:
        return ((agent, row) for agent, table in self._tables.items() for row in table.rows())

    def _plain(self, agent: str, row: Row) -> dict[str, Any]:
        sample = SampleId.parse(row.sample_id)
        meta = (
            agent,
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
        )
        plain: dict[str, Any] = dict(zip(META, meta, strict=True))
        for (name, column), cell in zip(self._tables[agent].schema.columns.items(), row.cells, strict=True):
            if not column.is_by_reference:
                plain[name] = None if type(cell) is tuple else cell
        return plain

    def _written(
        self, record: bytes, checked: list[tuple[str, CheckedColumns]], undo: Callable[[], None]
    ) -> TableChange:
        held = list(
            chain.from_iterable(refs_of(cells) for _, columns in checked for cells in columns.values())
        )
        return TableChange(record, undo, sum(len(columns["sample_id"]) for _, columns in checked), held, [])

    def _ended(self, record: bytes, ended: list[tuple[Table, EndedRows]]) -> TableChange:
        freed = [ref for _, what in ended for cells in what.cells for ref in refs_of(cells)]
        rows = sum(len(what.rows) for _, what in ended)
        return TableChange(record, partial(self._undo_ended, ended), rows, [], freed)

    def _undo_put(self, parts: list[tuple[str, CheckedColumns]]) -> None:
        for agent, columns in parts:
            self._tables[agent].remove(columns["sample_id"])

    def _undo_write(self, parts: list[tuple[str, CheckedColumns]]) -> None:
        for agent, columns in parts:
            self._tables[agent].empty(columns)

    def _undo_ended(self, ended: list[tuple[Table, EndedRows]]) -> None:
        for table, what in ended:
            table.revive(what)

    def _undo_close(self, before: int, forgotten: dict[str, list[Row]]) -> None:
        self.closed_before = before
        for agent, rows in forgotten.items():
            self._tables[agent].reopen(before, rows)

    # ------------------------------------------------------------------ applying records

    def _begin_epoch(self, epoch: int) -> None:
        self._tokens.begin(epoch)
        for table in self._tables.values():
            table.end_leases()

    def _apply_put(self, parts: list[Any]) -> None:
        for agent, columns in parts:
            self.table(agent).insert(self._restored(agent, columns))

    def _apply_write(self, parts: list[Any]) -> None:
        for agent, columns in parts:
            self.table(agent).fill(self._restored(agent, columns))

    def _restored(self, agent: str, columns: dict[str, Any]) -> CheckedColumns:
        meta = {name: columns.pop(name) for name in META if name in columns}
        return meta | self.table(agent).schema.restore(columns)

    def _apply_commit(self, agent: str, optimizer_step: int, tokens: list[int], ids: list[str]) -> None:
        self.table(agent).consume(Commit(optimizer_step, tuple(tokens), len(ids)), ids)

    def _apply_discard(self, parts: list[Any]) -> None:
        for agent, ids in parts:
            self.table(agent).discard(ids)

    def _apply_close(self, before: int) -> None:
        self.closed_before = before
        for table in self._tables.values():
            table.close(before)

    def _apply_counts(self, agent: str, consumed: int, discarded: int, last: list[Any] | None) -> None:
        commit = None if last is None else Commit(last[0], tuple(last[1]), last[2])
        self.table(agent).restore_counts(consumed, discarded, commit)


_APPLY: Final[dict[int, Callable[..., None]]] = {
    _Kind.EPOCH: Tables._begin_epoch,
    _Kind.PUT: Tables._apply_put,
    _Kind.WRITE: Tables._apply_write,
    _Kind.COMMIT: Tables._apply_commit,
    _Kind.DISCARD: Tables._apply_discard,
    _Kind.CLOSE: Tables._apply_close,
    _Kind.COUNTS: Tables._apply_counts,
}


class _Frozen:
    """A table's state at the time this is made, as records."""

    def __init__(self, table: Table) -> None:
        self._agent = table.agent
        self._names = table.schema.names
        self._counts, self._last_commit = table.counts(), table.last_commit
        self._rows = [
            (row.sample_id, row.policy_version, row.query_position, *row.cells) for row in table.rows()
        ]
        self._discarded = [row.sample_id for row in table.rows() if row.status == "discarded"]
        self._consumed: dict[int, list[str]] = {}
        for row in table.rows():
            if row.optimizer_step is not None:
                self._consumed.setdefault(row.optimizer_step, []).append(row.sample_id)

    def __iter__(self) -> Iterator[bytes]:
        names = ("sample_id", "policy_version", "query_position", *self._names)
        rows = iter(self._rows)
        while chunk := list(islice(rows, _CHUNK)):
            columns = dict(zip(names, zip(*chunk, strict=True), strict=True))
            yield _pack(_Kind.PUT, [(self._agent, _packed(columns))])
        for optimizer_step, ids in self._consumed.items():
            yield _pack(_Kind.COMMIT, self._agent, optimizer_step, (), ids)
        if self._discarded:
            yield _pack(_Kind.DISCARD, [[self._agent, self._discarded]])
        counts = self._counts
        yield _pack(_Kind.COUNTS, self._agent, counts.consumed, counts.discarded, self._last_commit)


def _packed(columns: Mapping[str, Sequence[Any]], given: Columns | None = None) -> Columns:
    """``given``: as they came; those that came packed are told so."""
    came = {} if given is None else {name: cells for name, cells in given.items() if isinstance(cells, dict)}
    return {name: came[name] if name in came else packed(cells) for name, cells in columns.items()}


def _pack(kind: _Kind, *what: Any) -> bytes:
    """Raises StoreError for text that is no Unicode, and integers of more than 64 bits, in places nobody looks at."""
    try:
        record: bytes = msgpack.packb([int(kind), *what])
    except (ValueError, OverflowError) as error:
        raise StoreError(f"what is to be written can't be packed: {error}") from error
    return record
