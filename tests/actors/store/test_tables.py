"""The life of rows: a model against random writes, leases, ends, failures of the journal and crashes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flexmarl.actors.columns.column_refs import ValueRef, refs_of, unpack
from flexmarl.actors.errors import StoreError
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.sample_id import SampleId
from flexmarl.actors.store.policy_queue import LeaseOrder
from flexmarl.actors.store.tables import TableChange

from .ideal_rows import NAMES, REQUIRED, SOME_IDS, SOME_NAMES, Ideal, Ids, Keys, Lease, Rows
from .rows import AGENTS, ONE, OWN, Policies, make


class Life(RuleBasedStateMachine):
    """Two agents, each on a policy of its own or both on one. ``records``: with the state of the model when each was
    written, the newest last."""

    @initialize(policies=st.sampled_from([OWN, ONE]), order=st.sampled_from(["arrival", "query"]))
    def start(self, policies: Policies, order: LeaseOrder) -> None:
        self.policies, self.order = policies, order
        self.tables = make(policies, order)
        self.rows: Rows = {}
        self.closed_before = 0
        self.versions = dict.fromkeys(policies.values(), -1)
        self.commits: dict[PolicyName, tuple[list[int], int]] = {}
        self.totals: dict[str, int] = {
            f"{agent} {end}": 0 for agent in AGENTS for end in ("consumed", "discarded")
        }
        self.leases: dict[int, Lease] = {}
        self.records: list[tuple[bytes, Any]] = []
        self.changes: list[tuple[TableChange, Any, dict[int, Lease]]] = []
        self.compacted: list[bytes] = []
        self.now = 0.0
        self.last_fence = 0
        self.offset = 0
        self.ended_fences: list[tuple[PolicyName, int, str]] = []
        self.begin()

    # ------------------------------------------------------------------ keeping books

    def policy(self, agent: str) -> PolicyName:
        return self.policies[AgentName(agent)]

    def state(self) -> Any:
        return (
            dict(self.rows),
            self.closed_before,
            dict(self.versions),
            dict(self.commits),
            dict(self.totals),
        )

    def set_state(self, state: Any) -> None:
        rows, self.closed_before, versions, commits, totals = state
        self.rows, self.versions = dict(rows), dict(versions)
        self.commits, self.totals = dict(commits), dict(totals)

    def journaled(self, change: TableChange, before: Any, leases: dict[int, Lease]) -> None:
        assert change.record is not None
        self.records.append((change.record, self.state()))
        self.changes.append((change, before, leases))

    def begin(self) -> None:
        change = self.tables.begin_epoch()
        assert change.record is not None
        # Durable before anything else happens.
        self.compacted += [record for record, _ in self.records] + [change.record]
        self.base = self.state()
        self.records, self.changes = [], []

    def cells(self, name: str, count: int) -> list[Any]:
        if name != "tokens":
            return [f"{name}" if name == "note" else float(self.offset + n) for n in range(count)]
        self.offset += count
        return [("m-1", 64 * (self.offset + n), 8, "int32", (2,)) for n in range(count)]

    def over_by(self, keys: Keys, end: str) -> None:
        for key in keys:
            row = self.rows[key]
            assert row.over is None, "a row ends twice"
            cells = {name: cell for name, cell in row.cells.items() if type(cell) is not tuple}
            self.rows[key] = replace(row, cells=cells, over=end)
            self.totals[f"{row.agent} {end}"] += 1

    def ids(self, some: Ids) -> list[str]:
        return list(dict.fromkeys(f"{max(0, self.closed_before + step)}:{name}" for step, name in some))

    def is_closed(self, sample_id: str) -> bool:
        return int(sample_id[: sample_id.index(":")]) < self.closed_before

    def expect(self, refused: bool, act: Callable[[], TableChange]) -> TableChange | None:
        if refused:
            with pytest.raises(StoreError):
                act()
            return None
        return act()

    # ------------------------------------------------------------------ writing

    @rule(
        some=SOME_IDS,
        fresh=st.sampled_from([True, True, True, False]),
        agents=st.sampled_from([("a",), ("b",), ("a", "b"), ("b", "a")]),
        version=st.integers(0, 2),
        names=SOME_NAMES,
        position=st.integers(0, 2),
    )
    def put(
        self, some: Ids, agents: tuple[str, ...], version: int, names: set[str], position: int, fresh: bool
    ) -> None:
        ids = self.ids(some)
        if fresh:
            known = {sample_id for _, sample_id in self.rows}
            ids = [sample_id for sample_id in ids if sample_id not in known and not self.is_closed(sample_id)]
        parts: dict[str, dict[str, Any]] = {}
        new = []
        for agent in agents:
            columns = {name: self.cells(name, len(ids)) for name in sorted(names)}
            parts[agent] = {"sample_id": ids, "policy_version": [version] * len(ids), **columns}
            parts[agent]["query_position"] = [position] * len(ids)
            for place, sample_id in enumerate(ids):
                cells = {name: columns[name][place] for name in columns}
                new.append(Ideal(agent, sample_id, version, position, cells))
        refused = any((row.agent, row.sample_id) in self.rows for row in new) or any(
            self.is_closed(sample_id) for sample_id in ids
        )
        change = self.expect(refused, lambda: self.tables.put(parts))
        if change is not None:
            before = self.state()
            self.rows |= {(row.agent, row.sample_id): row for row in new}
            assert change.rows == len(new)
            assert change.held == [ref for row in new for ref in refs_of(row.cells.values())]
            self.journaled(change, before, {})

    @rule(
        data=st.data(),
        some=SOME_IDS,
        agent=st.sampled_from(AGENTS),
        names=st.sets(st.sampled_from(["reward", "tokens", "note"]), max_size=2),
    )
    def write(self, data: st.DataObject, some: Ids, agent: str, names: set[str]) -> None:
        open_ids = [i for of, i in self.rows if of == agent and self.rows[of, i].over is None]
        ids = (
            data.draw(st.lists(st.sampled_from(open_ids), unique=True, min_size=1))
            if open_ids
            else self.ids(some)
        )
        columns = {name: self.cells(name, len(ids)) for name in sorted(names)}
        rows = [self.rows.get((agent, sample_id)) for sample_id in ids]
        refused = any(row is None or row.over is not None or row.cells.keys() & names for row in rows)
        change = self.expect(refused, lambda: self.tables.write({agent: {"sample_id": ids, **columns}}))
        if change is not None:
            before = self.state()
            for place, row in enumerate(rows):
                assert row is not None
                cells = row.cells | {name: columns[name][place] for name in columns}
                self.rows[agent, row.sample_id] = replace(row, cells=cells)
            self.journaled(change, before, {})

    # ------------------------------------------------------------------ leases

    def leased(self) -> set[tuple[str, str]]:
        return {key for _, keys, _ in self.leases.values() for key in keys}

    def queue(self, policy: PolicyName, first: int, last: int) -> list[Ideal]:
        leased = self.leased()
        ready = [
            row
            for key, row in self.rows.items()
            if self.policy(row.agent) == policy
            and row.is_ready
            and key not in leased
            and first <= row.version <= last
        ]
        return sorted(ready, key=lambda row: (row.version, row.key if self.order == "query" else ()))

    @rule(data=st.data(), staleness=st.integers(0, 2), lasts=st.integers(1, 3), too_many=st.booleans())
    def lease(self, data: st.DataObject, staleness: int, lasts: int, too_many: bool) -> None:
        choices = [(policy, row.version) for policy in self.versions for row in self.queue(policy, 0, 2)]
        policy, version = data.draw(st.sampled_from([*choices, (next(iter(self.versions)), 0)]))
        queue = self.queue(policy, version - staleness, version)
        count = len(queue) + 1 if too_many else data.draw(st.integers(min(1, len(queue)), len(queue)))
        assert self.tables.queue(policy).ready(version, staleness) == len(queue)
        if not 1 <= count <= len(queue):
            with pytest.raises(
                StoreError, match=f"{count} rows of .* were asked for, {len(queue)} are ready"
            ):
                self.tables.lease(policy, version, count, 9.0, staleness)
            return
        batch = self.tables.lease(policy, version, count, self.now + lasts, staleness)
        assert batch.fence > self.last_fence
        self.last_fence = batch.fence
        rows = queue[:count]
        assert batch.columns["agent"] == [row.agent for row in rows]
        assert batch.columns["sample_id"] == [row.sample_id for row in rows]
        assert batch.columns["policy_version"] == [row.version for row in rows]
        tokens: list[ValueRef] = unpack(batch.columns["tokens"])
        assert tokens == [row.cells["tokens"] for row in rows]
        assert list(batch.columns["note"]) == [row.cells.get("note") for row in rows]
        assert set(batch.columns.get("only_b", [None])) == {None}
        self.leases[batch.fence] = (policy, [(row.agent, row.sample_id) for row in rows], self.now + lasts)

    @rule(passed=st.integers(0, 2))
    def time_passes(self, passed: int) -> None:
        self.now += passed
        gone = {fence: lease for fence, lease in self.leases.items() if lease[2] <= self.now}
        expired = self.tables.expire(self.now)
        assert sorted(fence for fences in expired.values() for fence in fences) == sorted(gone)
        for fence, (policy, _, _) in gone.items():
            self.ended_fences.append((policy, fence, "it expired"))
            del self.leases[fence]

    @precondition(lambda self: self.ended_fences)
    @rule(data=st.data())
    def a_late_acknowledgement_is_refused(self, data: st.DataObject) -> None:
        policy, fence, why = data.draw(st.sampled_from(self.ended_fences))
        with pytest.raises(StoreError, match=f"no lease with fence {fence} is active: {why}"):
            self.tables.commit(policy, [fence], self.versions[policy] + 1)

    # ------------------------------------------------------------------ ends

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        policy = data.draw(st.sampled_from(list(self.versions)))
        mine = sorted(fence for fence, lease in self.leases.items() if lease[0] == policy)
        fences = data.draw(st.lists(st.sampled_from(mine), unique=True, min_size=1)) if mine else []
        version = self.versions[policy] + 1
        before, leases = self.state(), {fence: self.leases[fence] for fence in fences}
        keys = [key for fence in sorted(fences) for key in self.leases.pop(fence)[1]]
        change = self.tables.commit(policy, [*fences, *fences], version)
        freed = [ref for key in keys for ref in refs_of(self.rows[key].cells.values())]
        assert (change.rows, change.freed) == (len(keys), freed)
        self.over_by(keys, "consumed")
        self.versions[policy], self.commits[policy] = version, (fences, len(keys))
        self.journaled(change, before, leases)

    @rule()
    def commit_again(self) -> None:
        for policy, (fences, rows) in self.commits.items():
            change = self.tables.commit(policy, fences, self.versions[policy])
            assert (change.record, change.rows, change.freed) == (None, rows, [])
            with pytest.raises(StoreError, match="does not follow"):
                self.tables.commit(policy, [*fences, 77], self.versions[policy])

    @rule(agent=st.sampled_from(AGENTS), data=st.data())
    def discard(self, agent: str, data: st.DataObject) -> None:
        mine = [sample_id for of, sample_id in self.rows if of == agent]
        ids = data.draw(st.lists(st.sampled_from([*mine, "0:nobody's_0_0"]), unique=True, max_size=3))
        rows = [self.rows.get((agent, sample_id)) for sample_id in ids]
        leased = self.leased()
        refused = any(
            row is None or row.over == "consumed" or (agent, row.sample_id) in leased for row in rows
        )
        change = self.expect(refused, lambda: self.tables.discard({agent: ids}))
        new = [row.sample_id for row in rows if row is not None and row.over is None]
        if change is not None:
            assert change.rows == len(new)
            assert (change.record is None) == (not new)
            if new:
                before = self.state()
                self.over_by([(agent, sample_id) for sample_id in new], "discarded")
                self.journaled(change, before, {})

    @rule(further=st.integers(0, 1))
    def close(self, further: int) -> None:
        step = self.closed_before + further
        old = {
            key: row for key, row in self.rows.items() if SampleId.parse(row.sample_id).step in range(step)
        }
        refused = step > self.closed_before and any(row.over is None for row in old.values())
        change = self.expect(refused, lambda: self.tables.close_steps(step))
        if change is not None and change.record is not None:
            before = self.state()
            assert change.rows == len(old)
            self.rows = {key: row for key, row in self.rows.items() if key not in old}
            self.closed_before = step
            self.journaled(change, before, {})

    # ------------------------------------------------------------------ what goes wrong

    @precondition(lambda self: self.changes)
    @rule(data=st.data())
    def the_disk_is_full(self, data: st.DataObject) -> None:
        """The newest changes are taken back, the last first; leases that depend on them end."""
        for _ in range(data.draw(st.integers(1, len(self.changes)))):
            change, before, leases = self.changes.pop()
            self.records.pop()
            change.undo()
            self.set_state(before)
            self.leases |= leases
            for fence, (policy, keys, _) in list(self.leases.items()):
                if not all((row := self.rows.get(key)) and row.is_ready for key in keys):
                    self.ended_fences.append((policy, fence, "rows of it could not be written"))
                    del self.leases[fence]

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """The store is started again with what its journal holds: all up to some record."""
        kept = data.draw(st.integers(0, len(self.records)))
        self.set_state(self.records[kept - 1][1] if kept else self.base)
        self.records = self.records[:kept]
        self.tables = make(self.policies, self.order)
        for record in [*self.compacted, *(record for record, _ in self.records)]:
            self.tables.apply(record)
        why = f"it is of epoch {self.tables.epoch}, the store is in epoch"
        self.ended_fences = [(policy, fence, why) for fence, (policy, _, _) in self.leases.items()]
        self.leases = {}
        self.agrees()
        self.begin()

    @rule()
    def compact(self) -> None:
        """A snapshot does not change with changes that are made while it is read."""
        snapshot = self.tables.snapshot()
        self.compacted, self.base = [], self.state()
        self.records, self.changes = [], []
        self.put([(0, NAMES[0])], ("a",), 0, {"reward", "tokens"}, 0, False)
        self.compacted = list(snapshot)

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def agrees(self) -> None:
        names = list(self.tables.scalar_columns())
        found = {(row[0], row[1]): dict(zip(names, row, strict=True)) for row in self.tables.scalars()}
        assert found.keys() == self.rows.keys()
        statuses: dict[str, list[str]] = {agent: [] for agent in AGENTS}
        leased = self.leased()
        for key, row in self.rows.items():
            status = row.over or ("ready" if row.is_ready else "writing")
            if key in leased:
                assert status == "ready", "a row that is leased is over, or lacks a column"
                status = "leased"
            statuses[row.agent].append(status)
            expected = (status, row.version, row.position, row.cells.get("reward"), row.cells.get("note"))
            seen = found[key]
            names_seen = ("status", "policy_version", "query_position", "reward", "note")
            assert tuple(seen[name] for name in names_seen) == expected
            assert (seen["optimizer_step"] is None) == (row.over != "consumed")
        for agent, counts in self.tables.counts().items():
            assert counts.writing == statuses[agent].count("writing")
            assert counts.ready == statuses[agent].count("ready")
            assert counts.leased == statuses[agent].count("leased")
            assert counts.consumed == self.totals[f"{agent} consumed"]
            assert counts.discarded == self.totals[f"{agent} discarded"]
        for policy in self.versions:
            self.waits_agree(policy)
        live = sorted(ref for row in self.rows.values() for ref in refs_of(row.cells.values()))
        assert sorted(self.tables.live_refs()) == live

    def waits_agree(self, policy: PolicyName) -> None:
        """A lease waits for rows of which it would get newer ones first, and for those that it needs."""
        open_rows = [
            row for row in self.rows.values() if self.policy(row.agent) == policy and row.over is None
        ]
        versions = sorted({row.version for row in open_rows})
        ready = [row.version for row in self.queue(policy, 0, max(versions, default=0))]
        for count in (1, len(ready), len(ready) + 1, len(open_rows) + 1):
            waits = [row.version for row in open_rows if not row.is_ready]
            if 1 <= count <= len(ready):
                newest = sorted(ready)[count - 1]
                waits = [version for version in waits if version < newest]
            elif count > len(ready) + len(waits):
                waits = []
            if versions and count:
                newest = versions[-1]
                queue = self.tables.queue(policy)
                assert queue.awaited(newest, count, newest) == len(waits)
                if waits:
                    agent, sample_id, lacking = queue.first_awaited(newest, newest)
                    assert self.rows[agent, sample_id].version == min(waits)
                    assert set(lacking) == REQUIRED - self.rows[agent, sample_id].cells.keys()


Life.TestCase.settings = settings(max_examples=75, stateful_step_count=50)
TestLife = Life.TestCase
