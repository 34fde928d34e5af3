"""``scripts/bench/run slots rewards``: real processes take at least the time of the rewards, and the times repeat."""

from scripts.bench.slot_rewards import Options, measure, show, times_of

from ...bench_tables import drawn

BRIEF = Options(rounds=1, steps=1, workers=2, processes=2, rewards=3, median_s=0.005)


def test_every_way_computes_all_rewards() -> None:
    result = measure(BRIEF, lambda part: None)
    assert result["bound_s"] <= min(result["own_s"], result["one_s"], result["two_s"])
    assert "two services" in drawn(show, result)


def test_the_times_depend_on_the_seed_and_the_step_alone() -> None:
    assert times_of(BRIEF, 0, 1) == times_of(BRIEF, 0, 1) != times_of(BRIEF, 0, 2)
    assert [len(times) for times in times_of(BRIEF, 0, 1)] == [3, 3]
