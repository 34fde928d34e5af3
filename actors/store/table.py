"""One agent's table: a row's life as a state machine. Pure: no I/O, and the time comes in as an argument.

    WRITING ──required columns written──> READY ──lease──> LEASED ──commit──> CONSUMED
       │                                  │   ^               │
       └────────────discard───────────────┤   └──expiry, release, new epoch
                                          └──discard──> DISCARDED

Rules:
- a sample id is accepted once; its columns may come in several writes, each column once;
- a lease hands out the oldest READY rows of one policy version, or of a range (older versions first), under a
  fencing token; "oldest" is by arrival or, where the table is deterministic, by (step, query position, query, turn,
  trajectory), whatever order they arrived in. Table that come back take their old place;
- what an optimizer step used is committed with it, once: rows that are CONSUMED or DISCARDED never change again;
- rows are remembered, without their bulk, until their step is closed; then no row of it is accepted any more.

Everything is refused whole, with StoreError, before anything has changed. ``check_...`` decides, and the method that
carries out only changes state, so that replaying needs no decision, and what could not be journaled can be undone.
Leases are in no journal: their deadlines are readings of this process's clock, and an earlier epoch's are refused.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, get_args

from ..column_refs import ColumnRefs, packed
from ..errors import StoreError
from ..sample_id import SAMPLE_ID, SampleId
from .fences import Fences, Lease
from .row import ActiveLease, Commit, EndedRows, ReadyQueue, Row, RowCounts, Status
from .schema import Cell, CheckedColumns, Columns, Schema


class Table:
    def __init__(self, agent: str, schema: Schema, tokens: Fences, *, deterministic: bool = False) -> None:
        self.agent = agent
        self.schema = schema
        self.last_commit: Commit | None = None
        self._tokens = tokens
        self._deterministic = deterministic
        self._rows: dict[str, Row] = {}
        self._steps: dict[int, list[Row]] = defaultdict(list)
        self._queue = ReadyQueue()
        self._leases: dict[int, ActiveLease] = {}
        self._counts: dict[Status, int] = dict.fromkeys(get_args(Status), 0)
        self._writing: Counter[int] = Counter()
        """WRITING rows by policy version."""
        self._arrived = 0
        self._closed_before = 0

    # ------------------------------------------------------------------ writing

    def check_put(self, columns: Columns) -> CheckedColumns:
        """New rows, checked and as ``insert`` wants them.

        ``columns``: ``sample_id``, ``policy_version`` (ints), perhaps ``query_position`` (ints, 0 by default), and any
        of the schema's. Raises StoreError.
        """
        values = dict(columns)
        ids = self._check_ids(values.pop("sample_id", None))
        meta: CheckedColumns = {"sample_id": ids}
        if "policy_version" not in values:
            raise self._refused("a put lacks the column policy_version")
        for name in ("policy_version", "query_position"):
            if name in values:
                meta[name] = self._check_naturals(name, ids, values.pop(name))
        for sample_id in ids:
            match = SAMPLE_ID.fullmatch(sample_id)
            if match is None or match[1] == "eval":
                raise self._refused(
                    f"sample {sample_id!r} is not named {{step}}:{{query}}_{{turn}}_{{trajectory}}"
                )
            if int(match[1]) < self._closed_before:
                raise self._refused(f"sample {sample_id} is of step {match[1]}, which is closed")
        if not self._rows.keys().isdisjoint(ids):
            known = next(self._rows[sample_id] for sample_id in ids if sample_id in self._rows)
            raise self._refused(f"sample {known.sample_id} was written before and is {known.status}")
        return {**meta, **self.schema.check(self.agent, ids, values)}

    def insert(self, columns: CheckedColumns) -> None:
        """Adds rows that ``check_put`` passed, or that a snapshot holds (with None for cells that are empty)."""
        ids: Sequence[str] = columns["sample_id"]
        positions = columns.get("query_position") or repeat(0)
        nothing = [None] * len(ids)
        cells = zip(*(columns.get(name, nothing) for name in self.schema.names), strict=True)
        for sample_id, version, position, row_cells in zip(
            ids, columns["policy_version"], positions, cells, strict=False
        ):
            step = int(sample_id[: sample_id.index(":")])
            self._arrived += 1
            order: Any = self._arrived
            if self._deterministic:
                _, query, turn, trajectory = SampleId.parse(sample_id)
                order = (step, position, query, turn, trajectory)
            row = Row(sample_id, step, version, position, order, row_cells)
            self._rows[sample_id] = row
            self._steps[step].append(row)
            if None not in row_cells or self._is_complete(row):
                row.status = "ready"
                self._queue.push(row)
            else:
                self._writing[version] += 1
            self._counts[row.status] += 1

    def holds(self, columns: Columns) -> bool:
        """Whether these very rows are there, bytes and all: the put that brought them has come again."""
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
        """Undoes ``insert``. Leases of the rows end: whoever holds one can't commit it."""
        for sample_id in sample_ids:
            row = self._rows.pop(sample_id)
            self._withdraw(row)
            self._counts["writing"] -= 1
            self._writing[row.policy_version] -= 1
            self._steps[row.step].remove(row)

    def check_write(self, columns: Columns) -> CheckedColumns:
        """Further columns of rows that are there, checked. Raises StoreError."""
        values = dict(columns)
        ids = self._check_ids(values.pop("sample_id", None))
        rows = [self._known(sample_id) for sample_id in ids]
        checked = self.schema.check(self.agent, ids, values)
        for row in rows:
            if row.is_over:
                raise self._refused(f"sample {row.sample_id} is {row.status}: it takes no more columns")
            for name in checked:
                if row.cells[self.schema.index[name]] is not None:
                    raise self._refused(f"sample {row.sample_id}: column {name} was written already")
        return {"sample_id": ids, **checked}

    def fill(self, columns: CheckedColumns) -> None:
        """Writes cells that ``check_write`` passed; rows whose required columns are all written become READY."""
        rows = [self._rows[sample_id] for sample_id in columns["sample_id"]]
        for name in columns.keys() & self.schema.index.keys():
            for row, cell in zip(rows, columns[name], strict=True):
                self._set(row, name, cell)
        for row in rows:
            if row.status == "writing" and self._is_complete(row):
                self._move(row, "ready")

    def empty(self, columns: CheckedColumns) -> None:
        """Undoes ``fill``. Leases of rows that lack a required column again end."""
        for sample_id in columns["sample_id"]:
            row = self._rows[sample_id]
            for name in columns.keys() & self.schema.index.keys():
                self._set(row, name, None)
            if not self._is_complete(row):
                self._withdraw(row)

    # ------------------------------------------------------------------ leases

    def ready(self, policy_version: int, max_staleness: int = 0) -> int:
        """READY rows of the versions ``policy_version - max_staleness ... policy_version``."""
        return self._queue.count(policy_version - max_staleness, policy_version)

    def awaited(self, policy_version: int, count: int, max_staleness: int = 0) -> int:
        """How many WRITING rows a lease of ``count`` rows should wait for: it needs them, or they are of an older
        version than others that it would get, so that it would pass them over; 0: none, or there are too few anyway.
        """
        if not self._counts["writing"]:
            return 0
        ready = writing = 0
        for version in range(policy_version - max_staleness, policy_version + 1):
            ready += self._queue.count(version, version)
            if ready >= count:
                return writing
            writing += self._writing[version]
        return writing if ready + writing >= count else 0

    def first_awaited(self, policy_version: int, max_staleness: int = 0) -> tuple[str, list[str]]:
        """A row that ``awaited`` counts, and the required columns that it lacks."""
        row = next(
            row
            for row in self._rows.values()
            if row.status == "writing" and 0 <= policy_version - row.policy_version <= max_staleness
        )
        return row.sample_id, [self.schema.names[p] for p in self.schema.required if row.cells[p] is None]

    def lease(
        self, consumer: str, policy_version: int, count: int, deadline: float, max_staleness: int = 0
    ) -> Lease:
        """The oldest ``count`` READY rows of the versions ``policy_version - max_staleness ... policy_version``.

        ``consumer``: who takes them. ``deadline``: the reading of the clock at which ``advance`` puts them back.
        Raises StoreError where fewer are ready.
        """
        first = policy_version - max_staleness
        ready = self._queue.count(first, policy_version)
        if not 1 <= count <= ready:
            which = f"versions {first} to" if max_staleness else "version"
            raise self._refused(f"{count} rows of {which} {policy_version} were asked for, {ready} are ready")
        token = self._tokens.next()
        rows = self._queue.take(first, policy_version, count)
        for row in rows:
            row.status = "leased"
        self._counts["ready"] -= count
        self._counts["leased"] += count
        self._leases[token] = ActiveLease(consumer, deadline, rows)
        columns: dict[str, Sequence[Any] | ColumnRefs] = {
            "sample_id": [row.sample_id for row in rows],
            "policy_version": [row.policy_version for row in rows],
            "query_position": [row.query_position for row in rows],
        }
        cells = zip(*(row.cells for row in rows), strict=True)
        columns.update(zip(self.schema.names, map(packed, cells), strict=True))
        return Lease(self.agent, token, consumer, deadline, columns)

    def is_out(self, token: int) -> bool:
        """Whether the rows of the lease are still its own."""
        return token in self._leases

    def renew(self, token: int, deadline: float) -> None:
        """Moves the lease's deadline. Raises StoreError where it is not out any more."""
        self._out(token).deadline = deadline

    def advance(self, now: float) -> list[int]:
        """Ends the leases whose deadline has come: their rows are READY again. Returns their tokens."""
        expired = [token for token, lease in self._leases.items() if lease.deadline <= now]
        for token in expired:
            self._give_back(token, f"it expired, held by {self._leases[token].consumer}")
        return expired

    def next_deadline(self) -> float | None:
        """When ``advance`` has something to do; None: no lease is out."""
        return min((lease.deadline for lease in self._leases.values()), default=None)

    def release(self, consumer: str) -> list[int]:
        """Ends the leases of a consumer that is gone. Returns their tokens."""
        released = [token for token, lease in self._leases.items() if lease.consumer == consumer]
        for token in released:
            self._give_back(token, f"{consumer} is gone")
        return released

    def end_leases(self) -> None:
        """A new epoch: nobody holds a lease any more."""
        for token in list(self._leases):
            self._give_back(token, "a new epoch began")

    # ------------------------------------------------------------------ how rows end

    def check_commit(self, tokens: Sequence[int], optimizer_step: int) -> list[str] | None:
        """The sample ids that the optimizer step consumes; None where the same commit was carried out before.

        A lease past its deadline counts as out until ``advance`` has ended it: nobody else has its rows. Raises
        StoreError for a token that is not out, and for an optimizer step that does not follow the last one.
        """
        unique, last = tuple(sorted(set(tokens))), self.last_commit
        if last is not None and optimizer_step <= last.optimizer_step:
            if (optimizer_step, unique) == (last.optimizer_step, last.tokens):
                return None
            raise self._refused(
                f"optimizer step {optimizer_step} does not follow {last.optimizer_step}, which was committed with "
                f"{len(last.tokens)} leases, not these"
            )
        return [row.sample_id for token in unique for row in self._out(token).rows]

    def consume(self, commit: Commit, sample_ids: Sequence[str]) -> EndedRows:
        """Carries out what ``check_commit`` passed."""
        leases = {token: self._leases.pop(token) for token in commit.tokens if token in self._leases}
        for token in leases:
            self._tokens.end(token, f"optimizer step {commit.optimizer_step} committed it")
        rows = [self._rows[sample_id] for sample_id in sample_ids]
        for row in rows:
            row.optimizer_step = commit.optimizer_step
        ended = self._end(rows, "consumed", leases)
        self.last_commit = commit
        return ended

    def check_discard(self, sample_ids: Iterable[str]) -> list[str]:
        """Those of the rows that are not discarded yet. Raises StoreError for one that is unknown, out or consumed."""
        rows = [self._known(sample_id) for sample_id in dict.fromkeys(sample_ids)]
        for row in rows:
            if row.status in ("leased", "consumed"):
                raise self._refused(f"sample {row.sample_id} is {row.status}: it can't be discarded")
        return [row.sample_id for row in rows if row.status != "discarded"]

    def discard(self, sample_ids: Sequence[str]) -> EndedRows:
        """Carries out what ``check_discard`` passed."""
        return self._end([self._rows[sample_id] for sample_id in sample_ids], "discarded", {})

    def revive(self, ended: EndedRows) -> None:
        """Undoes ``consume`` or ``discard``: what was leased is leased again, under the tokens it was."""
        for row, cells in zip(ended.rows, ended.cells, strict=True):
            row.cells = cells
            row.optimizer_step = None
            self._move(row, "leased" if ended.leases else "writing")
            if not ended.leases and self._is_complete(row):
                self._move(row, "ready")
        for token in ended.leases:
            self._tokens.revive(token)
        self._leases |= ended.leases
        self.last_commit = ended.last_commit

    def check_close(self, before: int) -> None:
        """Raises StoreError while rows of steps earlier than ``before`` are neither consumed nor discarded."""
        left = [row for step in self._steps if step < before for row in self._steps[step] if not row.is_over]
        if left:
            raise self._refused(
                f"steps before {before} can't be closed: {len(left)} rows are left, among them {left[0].sample_id}, "
                f"which is {left[0].status}"
            )

    def close(self, before: int) -> list[Row]:
        """Forgets the rows of steps earlier than ``before``, and returns them; none of these steps is accepted any
        more."""
        self._closed_before = before
        rows = [row for step in list(self._steps) if step < before for row in self._steps.pop(step)]
        for row in rows:
            del self._rows[row.sample_id]
        return rows

    def reopen(self, before: int, rows: Iterable[Row]) -> None:
        """Undoes ``close``; ``before``: what it was earlier."""
        self._closed_before = before
        for row in rows:
            self._rows[row.sample_id] = row
            self._steps[row.step].append(row)

    def restore_counts(self, consumed: int, discarded: int, last_commit: Commit | None) -> None:
        """What a snapshot's rows don't tell: they lack those that are forgotten."""
        self._counts["consumed"], self._counts["discarded"] = consumed, discarded
        self.last_commit = last_commit

    # ------------------------------------------------------------------ looking

    def counts(self) -> RowCounts:
        return RowCounts(**self._counts)

    def rows(self) -> Iterator[Row]:
        """In the order of their arrival. To be read before the next change."""
        return iter(self._rows.values())

    def steps(self) -> Iterator[int]:
        """Those that have rows."""
        return (step for step, rows in self._steps.items() if rows)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._rows

    def rows_of_step(self, step: int) -> Sequence[Row]:
        return self._steps.get(step, ())

    # ------------------------------------------------------------------ inside

    def _is_complete(self, row: Row) -> bool:
        return all(row.cells[place] is not None for place in self.schema.required)

    def _set(self, row: Row, name: str, cell: Cell) -> None:
        place = self.schema.index[name]
        row.cells = (*row.cells[:place], cell, *row.cells[place + 1 :])

    def _move(self, row: Row, status: Status) -> None:
        self._counts[row.status] -= 1
        self._counts[status] += 1
        if row.status == "ready":
            self._queue.drop(row)
        elif row.status == "writing":
            self._writing[row.policy_version] -= 1
        if status == "ready":
            self._queue.push(row)
        elif status == "writing":
            self._writing[row.policy_version] += 1
        row.status = status

    def _end(self, rows: list[Row], status: Status, leases: dict[int, ActiveLease]) -> EndedRows:
        cells = [row.cells for row in rows]
        for row in rows:
            self._move(row, status)
            row.cells = tuple([None if type(cell) is tuple else cell for cell in row.cells])
        return EndedRows(rows, cells, leases, self.last_commit)

    def _withdraw(self, row: Row) -> None:
        """Back to WRITING, and to nobody's hands: what made it READY did not happen."""
        if row.status == "leased":
            token = next(token for token, lease in self._leases.items() if row in lease.rows)
            self._give_back(token, "rows of it could not be written to the journal")
        if row.status == "ready":
            self._move(row, "writing")

    def _give_back(self, token: int, why: str) -> None:
        for row in self._leases.pop(token).rows:
            self._move(row, "ready")
        self._tokens.end(token, why)

    def _out(self, token: int) -> ActiveLease:
        lease = self._leases.get(token)
        if lease is None:
            raise self._refused(f"no lease with token {token} is out: {self._tokens.why_not_out(token)}")
        return lease

    def _known(self, sample_id: str) -> Row:
        row = self._rows.get(sample_id)
        if row is None:
            raise self._refused(
                f"there is no sample {sample_id!r} (steps before {self._closed_before} are closed)"
            )
        return row

    def _check_ids(self, ids: Any) -> Sequence[str]:
        if ids is None or set(map(type, ids)) - {str}:
            raise self._refused("the column sample_id is missing or holds something else than strings")
        if len(set(ids)) != len(ids):
            twice = next(sample_id for place, sample_id in enumerate(ids) if sample_id in ids[:place])
            raise self._refused(f"sample {twice} comes twice in one write")
        return list(ids)

    def _check_naturals(self, name: str, ids: Sequence[str], values: Any) -> Sequence[int]:
        if len(values) != len(ids):
            raise self._refused(f"column {name} has {len(values)} values for {len(ids)} rows")
        if set(map(type, values)) - {int} or any(not 0 <= v < 2**63 for v in {*values}):
            raise self._refused(f"column {name} holds something else than whole numbers from 0 on")
        return list(values)

    def _refused(self, why: str) -> StoreError:
        return StoreError(f"table {self.agent}: {why}")
