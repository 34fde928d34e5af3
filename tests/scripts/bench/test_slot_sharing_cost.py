"""``scripts/bench/run slots sharing_cost``: groups go the whole way from a run's file to another run's tokens."""

from scripts.bench.slot_sharing_cost import Options, measure, show

from ...bench_tables import drawn


def test_a_group_goes_the_whole_way_and_a_longer_one_has_more_bytes() -> None:
    result = measure(Options(rounds=1, groups=3, tokens=(8, 64)), lambda part: None)
    for size, tokens in (("short", 8), ("long", 64)):
        assert all(result[f"{size}_{key}"] > 0 for key in ("read_ms", "pack_ms", "tokens_ms"))
        assert result[f"{size}_kib"] > 8 * 2 * (32 + tokens) / 1024, "all texts are in the message"
    assert "KiB" in drawn(show, result)
