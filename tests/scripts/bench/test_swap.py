"""``scripts/bench/run swap`` with small policies: its figures, and the cycles after which everything is as before."""

from scripts.bench.swap import Options, Size, measure, parts, tables

from ...bench_tables import drawn


async def test_cycles_change_neither_loss_nor_memory() -> None:
    said: list[str] = []
    small = Size(hidden=64, layers=1)
    options = Options(rounds=1, cycles=20, large=small, small=small)
    result = await measure(options, said.append)
    assert len(said) == parts(options)
    assert result["same_loss"] == 1.0 and result["rss_change"] <= 0.01
    for key in ("copy_gb_s", "suspend_gb_s", "resume_gb_s", "switch_ms", "switch_gang_ms"):
        assert result[key] > 0
    assert {goal["key"] for goal in result["goals"]} == {
        "suspend_gb_s", "resume_gb_s", "rss_change", "same_loss",
    }  # fmt: skip
    assert "there and back" in drawn(tables, result)
