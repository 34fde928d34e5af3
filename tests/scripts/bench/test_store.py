"""``scripts/bench/run store`` with so few samples that its figures say nothing."""

import asyncio

from scripts.bench.store import Options, measure, parts, tables

from ...bench_tables import drawn


def test_every_figure_is_there_and_possible() -> None:
    reported: list[str] = []
    options = Options(rounds=2, samples=128)
    result = asyncio.run(measure(options, reported.append))
    assert reported == [f"{kind}round {n} of 2" for kind in ("queries, ", "") for n in (1, 2)]
    assert parts(options) == len(reported)
    for key in ("put_samples_per_s", "get_samples_per_s"):
        assert len(result["rounds"][key]) == 2
        assert 10 < result[key] < 1e7, key
        assert result[f"transferqueue_{key}"] is None
    assert len(result["rounds"]["put_with_queries_ratio"]) == 2
    assert 0 < result["put_with_queries_ratio"] < 1000
    goals = [goal["key"] for goal in result["goals"]]
    assert goals == ["put_samples_per_s", "get_samples_per_s", "put_with_queries_ratio"]
    assert result["settings"] == {"rounds": 2, "samples": 128} and result["machine"]["cpus"] >= 1
    assert "experience store" in drawn(tables, result)
