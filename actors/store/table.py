"""One agent's table: what its rows hold, by sample id and by step. Pure, as ``policy_queue.py`` is, which knows what
becomes of the rows.

Rules:
- a sample id is accepted once; its columns may come in several writes, each column once;
- rows are remembered, without what they held by reference, until their step is closed; then no row of it is accepted.

``check_...`` decides and raises StoreError before anything has changed; the method that carries out only changes state.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..columns.column_refs import ColumnRefs, pack_column
from ..errors import StoreError
from ..sample_id import SAMPLE_ID_FORM, step_of, training_step
from .policy_queue import PolicyQueue
from .row import Row, RowCounts, Status
from .schema import Cell, CheckedColumns, Columns, Schema


class Table:
    def __init__(self, agent: str, schema: Schema, queue: PolicyQueue) -> None:
        """``queue``: of the agent's policy."""
        self.agent = agent
        self.schema = schema
        self.queue = queue
        self._rows: dict[str, Row] = {}
        self._steps: dict[int, list[Row]] = defaultdict(list)
        self._closed_before = 0

    # ------------------------------------------------------------------ writing

    def check_put(self, columns: Columns) -> CheckedColumns:
        """New rows, checked, as ``insert`` takes them.

        ``columns``: ``sample_id``, ``policy_version`` (ints), perhaps ``query_position`` (ints, 0 by default), and any
        of the schema's. Raises StoreError.
        """
        values = dict(columns)
        ids = self._check_ids(values.pop("sample_id", None))
        meta: CheckedColumns = {"sample_id": ids}
        if "policy_version" not in values:
            raise self._refusal("a put lacks the column policy_version")
        for name in ("policy_version", "query_position"):
            if name in values:
                meta[name] = self._check_naturals(name, ids, values.pop(name))
        for sample_id, step in zip(ids, map(training_step, ids), strict=True):
            if step is None:
                raise self._refusal(f"sample {sample_id!r} is not named {SAMPLE_ID_FORM}")
            if step < self._closed_before:
                raise self._refusal(f"sample {sample_id} is of step {step}, which is closed")
        if not self._rows.keys().isdisjoint(ids):
            known = next(self._rows[sample_id] for sample_id in ids if sample_id in self._rows)
            raise self._refusal(f"sample {known.sample_id} was written before and is {known.status}")
        return {**meta, **self.schema.check(self.agent, ids, values)}

    def insert(self, columns: CheckedColumns) -> None:
        """Adds rows that ``check_put`` passed, or that a snapshot holds (with None for cells that are empty)."""
        ids: Sequence[str] = columns["sample_id"]
        positions = columns.get("query_position") or [0] * len(ids)
        orders = self.queue.orders(self.agent, ids, positions)
        nothing = [None] * len(ids)
        cells = zip(*(columns.get(name, nothing) for name in self.schema.names), strict=True)
        rows = []
        for sample_id, version, position, order, row_cells in zip(
            ids, columns["policy_version"], positions, orders, cells, strict=True
        ):
            step = step_of(sample_id)
            is_complete = None not in row_cells or self.schema.is_complete(row_cells)
            status: Status = "ready" if is_complete else "writing"
            row = Row(self.agent, sample_id, step, version, position, order, row_cells, status)
            self._rows[sample_id] = row
            self._steps[step].append(row)
            rows.append(row)
        self.queue.add(self.agent, rows)

    def holds(self, columns: Columns) -> bool:
        """True if these very rows are there, bytes and all: the put that brought them was sent again."""
        values = dict(columns)
        ids = self._check_ids(values.pop("sample_id", None))
        rows = [row for sample_id in ids if (row := self._rows.get(sample_id)) is not None]
        if len(rows) != len(ids) or values.pop("policy_version", None) != [
            row.policy_version for row in rows
        ]:
            return False
        values.pop("query_position", None)
        return all(
            [row.cells[self.schema.index[name]] for row in rows] == list(cells)
            for name, cells in self.schema.check(self.agent, ids, values).items()
        )

    def remove(self, sample_ids: Iterable[str]) -> None:
        """Undoes ``insert``. Leases of the rows end: they can't be committed."""
        for sample_id in sample_ids:
            row = self._rows.pop(sample_id)
            self.queue.remove(row)
            self._steps[row.step].remove(row)

    def check_write(self, columns: Columns) -> CheckedColumns:
        """Further columns of rows that are there, checked. Raises StoreError."""
        values = dict(columns)
        ids = self._check_ids(values.pop("sample_id", None))
        rows = [self._row_of(sample_id) for sample_id in ids]
        checked = self.schema.check(self.agent, ids, values)
        for row in rows:
            if row.is_over:
                raise self._refusal(f"sample {row.sample_id} is {row.status}: it takes no more columns")
            for name in checked:
                if row.cells[self.schema.index[name]] is not None:
                    raise self._refusal(f"sample {row.sample_id}: column {name} was written already")
        return {"sample_id": ids, **checked}

    def fill(self, columns: CheckedColumns) -> None:
        """Writes cells that ``check_write`` passed; rows with all required columns written become READY."""
        rows = [self._rows[sample_id] for sample_id in columns["sample_id"]]
        for name in columns.keys() & self.schema.index.keys():
            for row, cell in zip(rows, columns[name], strict=True):
                self._set(row, name, cell)
        for row in rows:
            if row.status == "writing" and self.schema.is_complete(row.cells):
                self.queue.complete(row)

    def empty(self, columns: CheckedColumns) -> None:
        """Undoes ``fill``. Leases of rows that lack a required column again end."""
        for sample_id in columns["sample_id"]:
            row = self._rows[sample_id]
            for name in columns.keys() & self.schema.index.keys():
                self._set(row, name, None)
            if not self.schema.is_complete(row.cells):
                self.queue.withdraw(row)

    # ------------------------------------------------------------------ discarding, forgetting

    def check_discard(self, sample_ids: Iterable[str]) -> list[Row]:
        """The rows among these that are not discarded yet. Raises StoreError for one that is unknown, leased or
        consumed."""
        rows = [self._row_of(sample_id) for sample_id in dict.fromkeys(sample_ids)]
        for row in rows:
            if row.status in ("leased", "consumed"):
                raise self._refusal(f"sample {row.sample_id} is {row.status}: it can't be discarded")
        return [row for row in rows if row.status != "discarded"]

    def check_close(self, before: int) -> None:
        """Raises StoreError while rows of steps earlier than ``before`` are neither consumed nor discarded."""
        left = [row for step in self._steps if step < before for row in self._steps[step] if not row.is_over]
        if left:
            raise self._refusal(
                f"steps before {before} can't be closed: {len(left)} rows are left, among them {left[0].sample_id}, "
                f"which is {left[0].status}"
            )

    def close(self, before: int) -> list[Row]:
        """Forgets the rows of steps earlier than ``before``, and returns them; these steps accept no more rows."""
        self._closed_before = before
        rows = [row for step in list(self._steps) if step < before for row in self._steps.pop(step)]
        for row in rows:
            del self._rows[row.sample_id]
        return rows

    def forget(self, sample_ids: Iterable[str]) -> list[Row]:
        """Removes discarded rows, so that rows of the same names may come, and returns them; ``reopen`` undoes it."""
        rows = [self._rows.pop(sample_id) for sample_id in sample_ids]
        for row in rows:
            self._steps[row.step].remove(row)
        return rows

    def reopen(self, before: int, rows: Iterable[Row]) -> None:
        """Undoes ``close``; ``before``: the argument of the ``close`` before it."""
        self._closed_before = before
        for row in rows:
            self._rows[row.sample_id] = row
            self._steps[row.step].append(row)

    # ------------------------------------------------------------------ looking

    def counts(self) -> RowCounts:
        """The numbers of the agent's rows by status."""
        return self.queue.counts(self.agent)

    def rows(self) -> Iterator[Row]:
        """In the order of their arrival. To be read before the next change."""
        return iter(self._rows.values())

    def column(self, name: str, sample_ids: Sequence[str]) -> Sequence[Cell] | ColumnRefs:
        """The cells of these rows, in this order, packed if all are references. Raises StoreError for an unknown column
        or row."""
        place = self.schema.index.get(name)
        if place is None:
            raise self._refusal(f"unknown column {name!r}; there are: {', '.join(self.schema.names)}")
        return pack_column([self._row_of(sample_id).cells[place] for sample_id in sample_ids])

    def steps(self) -> Iterator[int]:
        """The steps that have rows."""
        return (step for step, rows in self._steps.items() if rows)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._rows

    def __getitem__(self, sample_id: str) -> Row:
        return self._rows[sample_id]

    def rows_of_step(self, step: int) -> Sequence[Row]:
        """The rows of a step that are not forgotten, in the order of their arrival; empty for an unknown step."""
        return self._steps.get(step, ())

    # ------------------------------------------------------------------ inside

    def _set(self, row: Row, name: str, cell: Cell) -> None:
        place = self.schema.index[name]
        row.cells = (*row.cells[:place], cell, *row.cells[place + 1 :])

    def _row_of(self, sample_id: str) -> Row:
        row = self._rows.get(sample_id)
        if row is None:
            raise self._refusal(
                f"there is no sample {sample_id!r} (steps before {self._closed_before} are closed)"
            )
        return row

    def _check_ids(self, ids: Any) -> Sequence[str]:
        if ids is None or set(map(type, ids)) - {str}:
            raise self._refusal("the column sample_id is missing or has values that are not strings")
        if len(set(ids)) != len(ids):
            twice = next(sample_id for place, sample_id in enumerate(ids) if sample_id in ids[:place])
            raise self._refusal(f"sample {twice} comes twice in one write")
        return list(ids)

    def _check_naturals(self, name: str, ids: Sequence[str], values: Any) -> Sequence[int]:
        if len(values) != len(ids):
            raise self._refusal(f"column {name} has {len(values)} values for {len(ids)} rows")
        if set(map(type, values)) - {int} or any(not 0 <= v < 2**63 for v in {*values}):
            raise self._refusal(f"column {name} has values that are not whole numbers from 0 on")
        return list(values)

    def _refusal(self, why: str) -> StoreError:
        return StoreError(f"table {self.agent}: {why}")
