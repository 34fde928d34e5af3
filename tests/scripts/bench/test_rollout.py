"""``scripts/bench/run rollout`` with so few requests that its figures say nothing."""

import asyncio
import importlib.util

import pytest

from scripts.bench.rollout import Options, measure, parts, tables
from scripts.bench.rollout_contenders import MAX_CONTEXT, workload

from ...bench_tables import drawn


def test_a_workload_is_that_of_its_seed() -> None:
    arrivals = workload(64, 3)
    assert arrivals == workload(64, 3) != workload(64, 4)
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times) and times[0] == 0 and times[-1] > 0
    assert len({arrival.new_tokens for arrival in arrivals}) > 20
    assert all(len(arrival.prompt) + arrival.new_tokens <= MAX_CONTEXT for arrival in arrivals)


def test_every_figure_is_there_and_possible() -> None:
    reported: list[str] = []
    options = Options(rounds=1, requests=4, layers=1, vllm=False)
    result = asyncio.run(measure(options, reported.append))
    assert reported == ["engines, round 1 of 1", "weights, round 1 of 1"]
    assert parts(options) == len(reported)
    assert result["vllm_tokens_per_s"] is None
    for key in ("embedded_tokens_per_s", "generate_tokens_per_s"):
        assert 1 < result[key] < 1e6 and len(result["rounds"][key]) == 1
    assert 0 < result["step_ms"] <= result["gap_ms"]
    for key in ("update_pause_s", "update_transfer_s", "update_load_s", "copy_s", "gap_in_one_piece_ms"):
        assert 0 < result[key] < 1e5, key
    assert result["update_transfer_s"] < result["update_pause_s"]
    assert [goal["key"] for goal in result["goals"]] == ["embedded_tokens_per_s", "update_pause_s"]
    assert set(result["contenders"]) == {"embedded", "generate"}
    text = drawn(tables, result)
    assert ">= 2x generate" in text and "longest prompt" in text


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_takes_part_where_it_is_installed() -> None:
    result = asyncio.run(measure(Options(rounds=1, requests=4, layers=1), lambda text: None))
    assert 1 < result["vllm_tokens_per_s"] < 1e6
    assert len(result["goals"]) == 3
