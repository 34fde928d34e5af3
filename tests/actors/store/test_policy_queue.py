"""Two agents on one policy: one queue over both tables, in one order, with one chain of commits."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.columns.declared_columns import Column
from flexmarl.actors.errors import StoreError
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.store.policy_queue import LeaseOrder
from flexmarl.actors.store.schema import Schema
from flexmarl.actors.store.tables import Tables

SHARED, OWN = PolicyName("shared"), PolicyName("judge")
POLICIES = {AgentName("solver"): SHARED, AgentName("checker"): SHARED, AgentName("judge"): OWN}
EXTERNAL = Column(type="float", required=True, written_by="external", timeout_s=7.0)
COLUMNS: dict[str, dict[str, Column]] = {
    "solver": {"plan": Column(type="str")},
    "checker": {"judged": EXTERNAL, "plan": Column(type="str")},
    "judge": {},
}


def make(order: LeaseOrder = "arrival") -> Tables:
    tables = Tables(POLICIES, {agent: Schema(COLUMNS[agent]) for agent in POLICIES}, order=order)
    tables.begin_epoch()
    return tables


def put(tables: Tables, agent: str, *ids: str, version: int = 0, **columns: list[Any]) -> None:
    rows: dict[str, Any] = {
        "sample_id": list(ids),
        "policy_version": [version] * len(ids),
        "reward": [1.0] * len(ids),
    }
    tables.put({agent: {**rows, **columns}})


def leased(tables: Tables, policy: PolicyName, count: int, version: int = 0) -> list[tuple[str, str]]:
    columns = tables.lease(policy, version, count, 10.0).columns
    return list(zip(columns["agent"], columns["sample_id"], strict=True))


def test_rows_of_both_agents_are_leased_in_the_order_of_their_arrival() -> None:
    tables = make()
    put(tables, "solver", "1:q_0_0")
    put(tables, "checker", "1:q_1_0", judged=[0.5])
    put(tables, "judge", "1:q_2_0")
    put(tables, "solver", "1:q_3_0", "1:q_4_0")
    assert leased(tables, SHARED, 3) == [
        ("solver", "1:q_0_0"),
        ("checker", "1:q_1_0"),
        ("solver", "1:q_3_0"),
    ]
    assert leased(tables, OWN, 1) == [("judge", "1:q_2_0")]
    counts = tables.counts()
    assert [(counts[agent].ready, counts[agent].leased) for agent in ("solver", "checker", "judge")] == [
        (1, 2),
        (0, 1),
        (0, 1),
    ]


@given(arrival=st.permutations([(agent, n) for agent in ("solver", "checker") for n in range(3)]))
def test_by_query_rows_of_both_agents_have_one_order_whatever_the_arrival(
    arrival: list[tuple[str, int]],
) -> None:
    tables = make("query")
    turns = {"solver": 0, "checker": 1}
    for agent, number in arrival:
        external: dict[str, Any] = {"judged": [0.5]} if agent == "checker" else {}
        put(tables, agent, f"1:q{number}_{turns[agent]}_0", query_position=[2 - number], **external)
    assert leased(tables, SHARED, 6) == [
        (agent, f"1:q{number}_{turns[agent]}_0") for number in (2, 1, 0) for agent in ("solver", "checker")
    ]


def test_by_query_the_turns_of_a_trajectory_follow_each_other() -> None:
    tables = make("query")
    rows = [(turn, trajectory) for turn in (1, 0, 2) for trajectory in (1, 0)]
    for turn, trajectory in rows:
        put(tables, "solver", f"1:q_{turn}_{trajectory}", query_position=[0])
    assert leased(tables, SHARED, 6) == [
        ("solver", f"1:q_{turn}_{trajectory}") for trajectory in (0, 1) for turn in (0, 1, 2)
    ]


def test_a_column_that_a_rows_table_lacks_is_none() -> None:
    tables = make()
    put(tables, "checker", "1:q_1_0", judged=[0.5], plan=["short"])
    put(tables, "solver", "1:q_0_0", plan=["long"])
    columns = tables.lease(SHARED, 0, 2, 10.0).columns
    assert list(columns["judged"]) == [0.5, None] and list(columns["plan"]) == ["short", "long"]


def test_a_commit_consumes_rows_of_both_agents_at_once() -> None:
    tables = make()
    put(tables, "solver", "1:q_0_0")
    put(tables, "checker", "1:q_1_0", judged=[0.5])
    put(tables, "judge", "1:q_2_0")
    fence = tables.lease(SHARED, 0, 2, 10.0).fence
    assert tables.commit(SHARED, [fence], 1).rows == 2
    found = [dict(zip(tables.scalar_columns(), row, strict=True)) for row in tables.scalars()]
    assert {(row["agent"], row["status"], row["optimizer_step"]) for row in found} == {
        ("solver", "consumed", 1),
        ("checker", "consumed", 1),
        ("judge", "ready", None),
    }
    # The chain is the policy's: another policy may commit the same version.
    own = tables.lease(OWN, 0, 1, 10.0).fence
    with pytest.raises(StoreError, match=f"policy shared: no lease with fence {own} is active"):
        tables.commit(SHARED, [own], 2)
    assert tables.commit(OWN, [own], 1).rows == 1


def test_a_lease_waits_for_the_external_columns_of_each_of_its_agents() -> None:
    tables = make()
    put(tables, "solver", "1:q_0_0")
    put(tables, "checker", "1:q_1_0")
    queue = tables.queue(SHARED)
    assert queue.awaited(0, 1) == 0, "the solver's row is enough"
    assert queue.awaited(0, 2) == 1
    assert queue.first_awaited(0) == ("checker", "1:q_1_0", ["judged"])
    assert queue.external_timeout_s == 7.0 and tables.queue(OWN).external_timeout_s == 0.0
    tables.write({"checker": {"sample_id": ["1:q_1_0"], "judged": [1.0]}})
    assert queue.awaited(0, 2) == 0 and queue.ready(0) == 2


@pytest.mark.parametrize("order", ["arrival", "query"])
def test_a_snapshot_keeps_the_order_over_both_tables(order: LeaseOrder) -> None:
    tables = make(order)
    for number in range(3):
        put(tables, "checker", f"1:q_{2 * number}_0", judged=[0.5])
        put(tables, "solver", f"1:q_{2 * number + 1}_0")
    again = Tables(POLICIES, {agent: Schema(COLUMNS[agent]) for agent in POLICIES}, order=order)
    for record in tables.snapshot():
        again.apply(record)
    again.begin_epoch()
    assert leased(again, SHARED, 6) == leased(tables, SHARED, 6)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(StoreError, match="there is no policy 'solver'; there are: shared, judge"):
        make().lease(PolicyName("solver"), 0, 1, 10.0)
