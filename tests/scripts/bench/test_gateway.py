"""``scripts/bench/run gateway`` with too few calls for its figures: all of its keys are there."""

import pytest

from scripts.bench.gateway import GOALS, Options, measure, tables

from ...bench_tables import drawn


async def test_every_session_keeps_its_conversation() -> None:
    pytest.importorskip("uvicorn")
    reported: list[str] = []
    result = await measure(Options(sessions=8, samples=8, calls=64, turn_s=0.1), reported.append)
    assert (result["sessions"], result["merged_share"]) == (8, 1)
    figures = {"direct_turn_ms", "gateway_turn_ms", "first_token_ms", "calls_per_s", "echo_calls_per_s"}
    assert figures <= result.keys()
    assert [goal["key"] for goal in result["goals"]] == [goal.key for goal in GOALS]
    assert "through the gateway" in drawn(tables, result)
    assert reported[-1] == "8 sessions at once"
