"""``scripts/bench/run slots tree``: both arms learn, count every token, and a result depends on the seed alone."""

import pytest

from scripts.bench.slot_trees import TASKS, Options, measure, show
from scripts.bench.tree_tables import Settings

from ...bench_tables import drawn

BRIEF = Settings(queries_per_step=2, budget=3_000, every=1_500, evaluated=50)


@pytest.mark.parametrize("name", TASKS)
def test_every_rule_plays_and_a_result_depends_on_the_seed_alone(name: str) -> None:
    options = Options(name=name, rounds=1, learning=BRIEF)
    result = measure(options, lambda part: None)
    (line,) = result["rounds"]
    for curve in (line["flat_curve"], line["curve"]):
        assert [tokens for tokens, _ in curve] == sorted(tokens for tokens, _ in curve)
        assert curve[0] == (0, curve[0][1]) and curve[-1][0] >= BRIEF.budget
        assert all(0.0 <= success <= 1.0 for _, success in curve)
    assert line["flat_curve"][0] == line["curve"][0], "both begin with the same tables"
    assert line["flat_curve"] != line["curve"]
    assert "seed" in drawn(show, result)
    assert measure(options, lambda part: None) == result
