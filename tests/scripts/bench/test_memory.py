"""``scripts/bench/run memory`` with a small model: its figures, and the parts of the model that a rank has whole."""

import pytest

from flexmarl.launch.bench.namespaces import missing
from scripts.bench.memory import Options, measure, tables
from scripts.bench.memory_ratios import PHASES

from ...bench_tables import drawn


async def test_no_rank_has_much_more_than_its_rows() -> None:
    reports: list[str] = []
    result = await measure(Options(ranks=2, layers=6, hidden=64), reports.append)
    apart = missing() is None
    assert len(reports) == 2 + apart
    state = 16 * result["parameters"] / 2
    for phase in ("draw", "build", "resume", "forward", "publish"):
        peaks = result[f"{phase}_peak_bytes"]
        assert len(peaks) == 2 and min(peaks) >= state
    # The embedding is a quarter of so small a model.
    for phase, most in (("build", 0.3), ("draw", 0.5), ("resume", 0.3)):
        assert result["shares"][phase] < most
    assert 0 < result["host_bytes_per_parameter"] <= 16.1
    host = result["host_bytes"]
    assert host["at_rest"] < host["in_step"] <= 20.1 and host["in_step"] < host["peak"] <= 28.1
    assert host["published"] == pytest.approx(4, abs=0.01)
    prefixes = ("", "replicas_", "two_hosts_")[: 2 + apart]
    # A publish has the whole of so small a model.
    for prefix in prefixes:
        assert 0.9 < result[f"{prefix}build_peak_ratio"] <= 1.1
        assert 0.9 < result[f"{prefix}resume_peak_ratio"] <= 1.1
        assert 0.8 < result[f"{prefix}forward_peak_ratio"] <= 1.1
        assert result[f"{prefix}publish_peak_ratio"] > 0.5
    assert result["two_hosts"] == (missing() or "two network namespaces")
    assert result["predicted_bytes"]["state"] == pytest.approx(state, rel=0.01)
    keys = {f"{prefix}{phase}_peak_ratio" for prefix in prefixes for phase in PHASES}
    shares = {"whole_model_share", "two_hosts_whole_model_share"} if apart else {"whole_model_share"}
    assert {goal["key"] for goal in result["goals"]} == keys | shares | {"host_bytes_per_parameter"}
    assert "publish: " in drawn(tables, result)
