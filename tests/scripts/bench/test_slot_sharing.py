"""``scripts/bench/run slots sharing``: runs train groups of others, generate as many fewer, and repeat."""

from scripts.bench.slot_sharing import Options, measure, played, show

from ...bench_tables import drawn

BRIEF = Options(rounds=1, runs=2, most_steps=12)


def test_groups_of_others_take_the_place_of_generated_ones() -> None:
    alone, together = (played(BRIEF, 0, together=way) for way in (False, True))
    assert alone["rollouts"] == 12 * 16 * 8 and alone["shared"] == 0
    assert together["shared"] > 0
    assert together["rollouts"] == alone["rollouts"] - 8 * together["shared"]
    result = measure(BRIEF, lambda part: None)
    assert result["ratio"] < 1 and "together" in drawn(show, result)
    assert measure(BRIEF, lambda part: None) == result
