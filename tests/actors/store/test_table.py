"""The life of a row: a model against random puts, leases and commits, and what is refused."""

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flexmarl.actors.messages import Sample
from flexmarl.actors.store.actor import Store
from flexmarl.actors.store.table import Table
from flexmarl.core.errors import RemoteError, StoreError
from flexmarl.core.system import ActorSystem

ROW = Sample("q0_0_0", "a", 1, 0, "q0", 1.0, (1.0, 0.0), (1, 2), (3, 4), (-0.1, -0.2))


class Life(RuleBasedStateMachine):
    """Every row is handed out once, by version, oldest first; nothing refused changes anything; a version whose
    rows were consumed takes no more."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table("a")
        self.ready: dict[int, list[str]] = {version: [] for version in range(4)}
        self.versions: dict[str, int] = {}
        self.last_consumed = -1
        self.leased: dict[int, list[str]] = {}
        self.written = self.consumed = 0

    def add(self, rows: list[Sample]) -> None:
        self.table.check(rows)
        self.table.put(rows)

    @rule(version=st.integers(0, 3), count=st.integers(1, 4))
    def put(self, version: int, count: int) -> None:
        ids = [f"row {self.written + n}" for n in range(count)]
        rows = [replace(ROW, sample_id=name, policy_version=version) for name in ids]
        if version <= self.last_consumed:
            with pytest.raises(StoreError, match=f"is of version {version}, whose step was committed"):
                self.add(rows)
            return
        self.written += count
        self.add(rows)
        self.ready[version] += ids
        self.versions |= dict.fromkeys(ids, version)

    @rule(data=st.data())
    def put_again(self, data: st.DataObject) -> None:
        there = [row for rows in (*self.ready.values(), *self.leased.values()) for row in rows]
        if there:
            known = data.draw(st.sampled_from(there))
            fresh = replace(ROW, sample_id="new", policy_version=99)
            with pytest.raises(StoreError, match=f"sample {known} was written before"):
                self.add([fresh, replace(ROW, sample_id=known, policy_version=99)])

    @rule(version=st.integers(0, 2), count=st.integers(0, 6))
    def lease(self, version: int, count: int) -> None:
        ready = self.ready.get(version, [])
        if not 1 <= count <= len(ready):
            with pytest.raises(
                StoreError, match=f"{count} rows of version {version} .* {len(ready)} are ready"
            ):
                self.table.lease(version, count)
            return
        batch = self.table.lease(version, count)
        assert [row.sample_id for row in batch.samples] == ready[:count]
        assert {row.policy_version for row in batch.samples} == {version}
        assert batch.token not in self.leased
        self.leased[batch.token] = ready[:count]
        del ready[:count]

    @rule(data=st.data(), also_unknown=st.booleans())
    def commit(self, data: st.DataObject, also_unknown: bool) -> None:
        tokens = data.draw(st.lists(st.sampled_from(sorted(self.leased)), unique=True)) if self.leased else []
        if also_unknown:
            with pytest.raises(StoreError, match="no lease with token 999999 is out"):
                self.table.commit([*tokens, 999999])
            return
        rows = [row for token in tokens for row in self.leased.pop(token)]
        assert self.table.commit(tokens) == len(rows)
        self.consumed += len(rows)
        self.last_consumed = max([self.last_consumed, *(self.versions[row] for row in rows)])
        for token in tokens:
            with pytest.raises(StoreError, match=f"no lease with token {token}"):
                self.table.commit([token])

    @invariant()
    def agrees(self) -> None:
        statistics = self.table.statistics()
        assert statistics.ready == sum(map(len, self.ready.values()))
        assert statistics.leased == sum(map(len, self.leased.values()))
        assert statistics.consumed == self.consumed


TestLife = Life.TestCase


@pytest.mark.parametrize("row", [replace(ROW, tokens=(), logprobs=()), replace(ROW, logprobs=(-0.1,))])
def test_a_malformed_sample_is_named(row: Sample) -> None:
    with pytest.raises(StoreError, match="sample q0_0_0 has"):
        Table("a").check([row])


async def test_the_actor_takes_a_group_whole_or_not_at_all(system: ActorSystem) -> None:
    ref = await system.add(Store(["a", "b"]), "store")
    other = replace(ROW, agent="b")
    await ref.ask("put", [ROW, other])
    with pytest.raises(RemoteError, match="table b: sample q0_0_0 was written before"):
        await ref.ask("put", [replace(ROW, sample_id="q0_0_1"), other])
    with pytest.raises(RemoteError, match="no table for agent 'c'; there are: a, b"):
        await ref.ask("put", [replace(ROW, agent="c")])
    assert (await ref.api.table_statistics())["a"].ready == 1
    leased = await ref.api.lease("a", 0, 1)
    assert leased.samples == (ROW,)
    assert await ref.api.commit("a", [leased.token]) == 1
