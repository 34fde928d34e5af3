"""``scripts/bench/run rollout`` with so few requests that its figures say nothing."""

import asyncio
import importlib.util

import pytest

from scripts.bench.rollout import Options, contender_names, measure, parts, tables
from scripts.bench.rollout_contenders import MAX_CONTEXT, Vllm, workload

from ...bench_tables import drawn


def test_a_workload_is_that_of_its_seed() -> None:
    arrivals = workload(64, 3)
    assert arrivals == workload(64, 3) != workload(64, 4)
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times) and times[0] == 0 and times[-1] > 0
    assert len({arrival.new_tokens for arrival in arrivals}) > 20
    assert all(len(arrival.prompt) + arrival.new_tokens <= MAX_CONTEXT for arrival in arrivals)


@pytest.mark.parametrize("installed", [False, True])
def test_vllm_takes_part_if_it_is_wanted_and_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vllm, "is_installed", lambda: installed)
    assert contender_names(Options(vllm=False)) == ["embedded", "generate"]
    assert contender_names(Options()) == ["embedded", "generate", "vllm"][: 2 + installed]


def test_every_figure_is_there_and_possible() -> None:
    """With vLLM, where it is installed."""
    vllm = importlib.util.find_spec("vllm") is not None
    reported: list[str] = []
    options = Options(rounds=1, requests=4, layers=1)
    result = asyncio.run(measure(options, reported.append))
    assert reported == ["engines, round 1 of 1", "weights, round 1 of 1"]
    assert parts(options) == len(reported)
    assert (result["vllm_tokens_per_s"] is not None) == vllm
    served = ("embedded_tokens_per_s", "generate_tokens_per_s", "vllm_tokens_per_s")[: 2 + vllm]
    for key in served:
        assert 1 < result[key] < 1e6 and len(result["rounds"][key]) == 1
    assert 0 < result["step_ms"] <= result["gap_ms"]
    for key in ("update_pause_s", "update_transfer_s", "update_load_s", "copy_s", "gap_in_one_piece_ms"):
        assert 0 < result[key] < 1e5, key
    assert result["update_transfer_s"] < result["update_pause_s"]
    beside = [goal["key"] for goal in result["goals"]]
    assert beside == ["embedded_tokens_per_s"] * (1 + vllm) + ["update_pause_s"]
    assert list(result["contenders"]) == contender_names(options)
    text = drawn(tables, result)
    assert ">= 2x generate" in text and "longest prompt" in text
