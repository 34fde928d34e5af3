"""``scripts/bench/run page`` with a short run: all of its keys are there."""

import pytest

from scripts.bench.page import GOALS, Options, measure, tables

from ...bench_tables import drawn


async def test_the_page_of_a_made_run_is_asked() -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    result = await measure(Options(steps=20, samples=64, spans=640), lambda part: None)
    assert {
        "first_answer_s",
        "panels_s",
        "search_s",
        "timeline_ms",
        "timeline_kb",
        "server_mib",
    } <= result.keys()
    assert [goal["key"] for goal in result["goals"]] == [goal.key for goal in GOALS]
    assert "the page of a very long run" in drawn(tables, result)
