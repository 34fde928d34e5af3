"""``scripts/bench/run slots dispatch``: steps are between the bound and turns in order, and repeat."""

from scripts.bench.slot_dispatch import Options, lengths_of, measure, show

from ...bench_tables import drawn

BRIEF = Options(rounds=1, steps=2, queries=32, queries_per_step=16, instances=2, places=4)


def test_predictions_bring_a_step_nearer_to_its_bound() -> None:
    result = measure(BRIEF, lambda part: None)
    assert result["bound_s"] <= result["known_s"] <= result["mean_s"]
    assert result["bound_s"] <= result["predicted_s"] < result["mean_s"]
    assert "seed" in drawn(show, result)
    assert measure(BRIEF, lambda part: None) == result


def test_every_query_comes_once_in_an_epoch_and_keeps_its_part_of_the_length() -> None:
    steps = [lengths_of(BRIEF, 0, step) for step in range(4)]
    queries = [{query for query, _ in step} for step in steps]
    assert queries[0] | queries[1] == queries[2] | queries[3] and not queries[0] & queries[1]
    assert steps[0] != steps[2]
