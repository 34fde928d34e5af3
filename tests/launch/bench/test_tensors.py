"""``flexmarl bench tensors`` with small states: its figures mean nothing."""

import asyncio

from flexmarl.launch.bench.tensors import GOALS, Options, measure, parts, tables

from ...bench_tables import drawn

KEYS = (
    "memcpy_gb_s", "set_gb_s", "get_gb_s", "first_set_gb_s", "cold_set_gb_s", "mapped_get_ms", "small_tensors_ratio",
)  # fmt: skip


def test_every_figure_is_there_and_possible() -> None:
    reported: list[str] = []
    options = Options(rounds=1, sizes=(2 << 20, 4 << 20))
    result = asyncio.run(measure(options, reported.append))
    assert reported == ["2 MiB, round 1 of 1", "4 MiB, round 1 of 1"]
    assert parts(options) == len(reported)
    assert list(result["by_size"]) == [str(2 << 20), str(4 << 20)]
    for figures in (result, *result["by_size"].values()):
        for key in KEYS:
            assert 1e-3 < figures[key] < 1e4, key
            assert figures["rounds"][key] == [figures[key]]
        assert [goal["key"] for goal in figures["goals"]] == [goal.key for goal in GOALS]
    assert result["settings"]["rounds"] == 1 and result["machine"]["cpus"] >= 1
    assert "states of 4 MiB" in drawn(tables, result)
