"""``scripts/bench/run slots``: every source plays the task, and a result depends on the seed alone."""

import pytest

from scripts.bench.slots import SOURCES, Options, measure, show

from ...bench_tables import drawn


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_plays_and_a_result_depends_on_the_seed_alone(name: str) -> None:
    options = Options(name=name, rounds=1, most_steps=3)
    result = measure(options, lambda part: None)
    assert result["uniform_rollouts"] == result["rollouts"] == 3 * 16 * 8
    assert 0 < result["taught"] <= 1
    assert "groups that teach" in drawn(show, result)
    assert measure(options, lambda part: None) == result
