"""Rows of tables, found by trajectory, expression, segment and content."""

from flexmarl.actors.sample_id import SampleId, TrajectoryName
from flexmarl.actors.store.query import select
from flexmarl.actors.store.tables import Tables

from .rows import columns, make


def test_a_sample_leads_to_its_trajectory_in_all_tables_and_back() -> None:
    tables = make()
    tables.put({"a": columns("1:q_1_0_2", "1:q_1_10_2", "1:q_0_2"), "b": columns("1:q_1_2_2", "2:q_1_2_2")})
    trajectory = tables.trajectory("1:q_1_2_2")
    assert [(row["agent"], row["sample_id"]) for row in trajectory] == [
        ("a", "1:q_1_0_2"),
        ("b", "1:q_1_2_2"),
        ("a", "1:q_1_10_2"),
    ]
    assert {SampleId.parse(row["sample_id"]).trajectory_name for row in trajectory} == {
        TrajectoryName(1, "q_1", 2)
    }
    assert trajectory[0]["reward"] == 1.0
    assert trajectory == tables.trajectory("1:q_1_2"), "by its name, too"
    assert {tuple(row) for row in trajectory} == {tuple(tables.scalar_columns())}, "all agents' columns"
    # As the name of a trajectory this would be the query q_0's.
    assert [row["sample_id"] for row in tables.trajectory("1:q_0_2")] == ["1:q_0_2"]


def test_an_expression_selects_from_all_tables(tables: Tables) -> None:
    tables.put({"b": columns("4:q_0_0", note=["good"], reward=[0.25])})
    found = select(
        tables.scalar_columns(), list(tables.scalars()), "agent = 'b' and reward < 0.5 or status = 'consumed'"
    )
    assert [(row["sample_id"], row["status"], row["note"], row["optimizer_step"]) for row in found.rows] == [
        ("1:q_0_2", "consumed", None, 7),
        ("4:q_0_0", "ready", "good", None),
    ]
    assert found.rows[1] | {"agent": "b", "step": 4, "group": "4:q", "query": "q", "turn": 0} == found.rows[1]


def test_rows_whose_segment_is_lost_are_found(tables: Tables) -> None:
    tables.put({"b": columns("4:q_0_0", tokens=[["m-2", 0, 8, "int32", [2]]])})
    assert tables.rows_in({"m-2"}) == {"b": ["4:q_0_0"]}
    assert tables.rows_in({"m-1"}) == {"a": ["1:q_0_1", "1:q_0_0"]}
    assert ("m-2", 0, 8) in [bulk[:3] for bulk in tables.live_refs()]


def test_a_put_that_comes_again_is_known_by_its_bytes() -> None:
    tables = make()
    parts = {"a": columns("1:q_0_0", "1:q_1_0")}
    assert not tables.holds(parts)
    tables.begin_epoch()
    tables.put(parts)
    assert tables.holds(parts)
    elsewhere = {"tokens": [["m-2", 64 * place, 8, "int32", [2]] for place in range(2)]}
    for other in (
        {"a": columns("1:q_0_0", "1:q_2_0")},
        {"b": columns("1:q_0_0", "1:q_1_0")},
        {"a": columns("1:q_0_0", "1:q_1_0") | {"policy_version": [0, 1]}},
        {"a": columns("1:q_0_0", "1:q_1_0") | elsewhere},
        {"nobody": columns("1:q_0_0")},
        {"a": {"sample_id": [7]}},
    ):
        assert not tables.holds(other)
