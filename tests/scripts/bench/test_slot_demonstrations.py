"""``scripts/bench/run slots demonstrations``: the expert arrives, all arms learn, and a result depends on the seed."""

import pytest

from flexmarl.launch.recipes.plan_path.workflow import Grid, train_query
from scripts.bench.slot_demonstrations import RULES, Options, demonstration_of, measure, shortest_way, show
from scripts.bench.tree_tables import Settings

from ...bench_tables import drawn

BRIEF = Settings(queries_per_step=2, budget=2_000, every=1_000, evaluated=50)


def test_the_expert_walks_a_shortest_way_and_plans_its_steps() -> None:
    for position in range(50):
        data = train_query(position, 0, **BRIEF.data).data
        grid, place, goal = Grid(data["side"], data["walls"]), tuple(data["start"]), tuple(data["goal"])
        steps = shortest_way(grid, place, goal)
        assert len(steps) == grid.distance(place, goal)
        for step in steps:
            assert grid.after(place, step) != place
            place = grid.after(place, step)
        assert place == goal
        actions = demonstration_of(train_query(position, 0, **BRIEF.data)).actions
        assert actions["executor"] == steps
        assert [plan[0] for plan in actions["planner"]] == [*steps]


@pytest.mark.parametrize("name", RULES)
def test_every_rule_plays_and_a_result_depends_on_the_seed_alone(name: str) -> None:
    options = Options(name=name, rounds=1, learning=BRIEF)
    result = measure(options, lambda part: None)
    (line,) = result["rounds"]
    curves = [line[f"{arm}curve"] for arm in ("online_", "unpatched_", "")]
    for curve in curves:
        assert curve[0] == (0, curves[0][0][1]), "all begin with the same tables"
        assert curve[-1][0] >= BRIEF.budget and all(0.0 <= success <= 1.0 for _, success in curve)
    assert curves[2] != curves[1] != curves[0]
    assert "seed" in drawn(show, result)
    assert measure(options, lambda part: None) == result
