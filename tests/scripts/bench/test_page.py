"""``scripts/bench/run page`` with a short run: all of its keys are there."""

import asyncio
from typing import Any

import pytest

from scripts.bench import large_run, page_paint
from scripts.bench.page import BROWSER_GOALS, GOALS, Options, figures_of, measure, tables

from ...bench_tables import drawn
from . import warm_runs

OPTIONS = Options(steps=20, samples=64, spans=640)
BROWSER_KEYS = ("first_paint_s", "tiles_s", "tiles_again_s", "frames_per_s")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """With a browser, if there is one."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(large_run, "run", warm_runs.run)
        return asyncio.run(measure(OPTIONS, lambda part: None))


def test_the_page_of_a_made_run_is_asked(measured: dict[str, Any]) -> None:
    assert {
        "first_answer_s",
        "panels_s",
        "search_s",
        "timeline_ms",
        "timeline_kb",
        "server_mib",
    } <= measured.keys()
    figures = {key: value for key, value in measured.items() if isinstance(value, float | int)}
    result = figures_of(OPTIONS, figures, measured["machine"], ["chromium"])
    assert [goal["key"] for goal in result["goals"]] == [goal.key for goal in GOALS]
    text = drawn(tables, result)
    assert "the page of a very long run" in text and "No browser has opened the page: chromium" in text


def test_a_browser_opens_it(measured: dict[str, Any]) -> None:
    if missing := page_paint.missing_parts():
        pytest.skip(f"{missing} are missing: CI=true .ci/run installs them")
    assert min(measured[key] for key in BROWSER_KEYS) > 0
    assert [goal["key"] for goal in measured["goals"]] == [goal.key for goal in (*GOALS, *BROWSER_GOALS)]
    text = drawn(tables, measured)
    assert "the first paint in Chromium, s" in text and "No browser" not in text


def test_a_page_that_chromium_can_not_show_is_an_error_with_its_words() -> None:
    if missing := page_paint.missing_parts():
        pytest.skip(f"{missing} are missing: CI=true .ci/run installs them")
    with pytest.raises(RuntimeError, match=r"(?s)could not show the page http://127\.0\.0\.1:1/.*ERR_"):
        page_paint.paint_times("http://127.0.0.1:1/")
