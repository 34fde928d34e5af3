"""``scripts/bench/run router`` with small counts: its figures mean nothing."""

from scripts.bench.router import GOALS, Options, measure, parts, tables

from ...bench_tables import drawn


async def test_every_figure_has_its_goal_and_each_part_is_reported() -> None:
    options = Options(rounds=1, turns=512, workers=2, instances=4, in_flight=64, rate_per_s=2000.0)
    told: list[str] = []
    result = await measure(options, told.append)
    assert all(result[goal.key] > 0 for goal in GOALS)
    assert len(told) == parts(options)
    assert result["route_p50_us"] <= result["route_p99_us"]
    assert 0 < result["call_p50_us"] <= result["call_p99_us"]
    beside_a_call = [goal for goal in result["goals"] if goal["bare"] is not None]
    assert [goal["key"] for goal in beside_a_call] == ["route_p50_us", "route_p99_us"]
    assert [goal["key"] for goal in result["goals"]] == [goal.key for goal in GOALS]
    assert "router, 8 workers" in drawn(tables, result)
