"""``scripts/bench/run merge`` with a model too small for its times: the tokens and shares are those of the turns."""

import pytest

from scripts.bench.merge import GOALS, Options, apart, measure, merged_share, tables, trajectories

from ...bench_tables import drawn


async def test_ten_turns_are_computed_as_the_last_one() -> None:
    options = Options(rounds=1, trajectories=1, hidden=32, layers=1)
    result = await measure(options, lambda part: None)
    assert (result["tokens"], result["computed_tokens"]) == (128 * 55, 1280)
    assert result["merged_share"] == pytest.approx(1 - 10 / 55, abs=1e-4)
    assert [goal["key"] for goal in result["goals"]] == [goal.key for goal in GOALS]
    assert "tokens are computed" in drawn(tables, result)
    shares = [*result["shares"].values()]
    assert shares == sorted(shares) and shares[-1] <= result["merged_share"]


def test_samples_apart_are_as_long_and_begin_with_no_other() -> None:
    samples = trajectories(Options(), 3)
    assert merged_share(samples, len(samples)) == pytest.approx(1 - 10 / 55)
    assert merged_share(apart(samples), len(samples)) == 0.0
    assert [len(sample.prompt_tokens) for sample in apart(samples)] == [
        len(sample.prompt_tokens) for sample in samples
    ]
