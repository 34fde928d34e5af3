"""Measures the page of a very long run: its first answer, panels, timeline at any zoom, the server's memory, and the
first visit of a browser.

The run has 5,000 steps, 100,000 recorded turns and 2,000,000 spans (``large_run.py``); ``flexmarl page`` serves it. The
keys:

    first_answer_s      from the first request to the answers that the first screen is drawn from: the run is read then
    panels_s            the data of all panels one after another, once the run is read
    search_s            a search for a text that one query has
    timeline_ms         the median of views of the timeline at zooms from the whole run to a second, 1,400 pixels wide
    timeline_first_s    the first of them, which reads the spans
    timeline_kb         the largest of these answers
    server_mib          the server's memory without what it shares, after all of that
    first_paint_s       the first paint of content in a headless Chromium, at its first visit of a server just started
    tiles_s             until the tiles of the first panel are there, at the same visit
    tiles_again_s       the same at the second visit
    frames_per_s        while the timeline is zoomed and panned there; Chromium shows 60 at most
    slow_frame_ms       of these frames nine of ten take no longer
    no_browser          the reason why the last five are missing
    goals               the goal of each figure, and if it is met

Also: ``machine``, ``versions``, ``settings``.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import httpx2
import psutil
from rich.console import Console
from rich.text import Text

from flexmarl.launch.bench import machine
from flexmarl.launch.bench.command import run_benchmark
from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.bench.measure import Report
from flexmarl.launch.bench.result_tables import goals_table, warn_if_busy
from flexmarl.launch.bench.results import result_of
from flexmarl.launch.monitoring.page.panels import PANELS

from . import page_paint
from .large_run import CLI, WANTED_TEXT, make_run

_ANSWER_S: Final = 120.0
_WIDTH: Final = 1400
_ZOOMS: Final = (1, 4, 16, 64, 256, 1024, 4096)

GOALS: Final = (
    Goal("first_answer_s", "the first screen's data, s", 1, at_most=True),
    Goal("panels_s", "the data of all panels, s", 2, at_most=True),
    Goal("timeline_ms", "a view of the timeline, ms", 200, at_most=True),
    Goal("server_mib", "the server's memory, MiB", 200, at_most=True),
)
BROWSER_GOALS: Final = (
    Goal("first_paint_s", "the first paint in Chromium, s", 1, at_most=True),
    Goal("tiles_s", "until its tiles are filled, s", 2, at_most=True),
    Goal("tiles_again_s", "the same at the second visit, s", 2, at_most=True),
    Goal("frames_per_s", "frames a second while zooming", 30, at_most=False),
)


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes of the run."""

    steps: int = 5_000
    samples: int = 100_000
    spans: int = 2_000_000


async def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured."""
    report("how busy the machine is with other things")
    described = await machine.describe()
    with tempfile.TemporaryDirectory(prefix="flexmarl-page-") as folder:
        report("making the run")
        run = await asyncio.to_thread(make_run, Path(folder), options.steps, options.samples, options.spans)
        report("asking its page")
        with _served(run) as (address, process):
            figures = await asyncio.to_thread(_ask, address, process)
        missing = page_paint.missing_parts()
        if not missing:
            report("opening it in Chromium")
            with _served(run) as (address, _):
                figures |= await asyncio.to_thread(page_paint.paint_times, address)
    return figures_of(options, figures, described, missing)


def figures_of(
    options: Options, figures: Mapping[str, float], described: Mapping[str, Any], missing: Sequence[str]
) -> dict[str, Any]:
    """The result of a measurement. ``missing``: the parts without which no browser has opened the page."""
    goals = GOALS if missing else (*GOALS, *BROWSER_GOALS)
    reason = (
        {"no_browser": f"{', '.join(missing)} is missing; CI=true .ci/run installs it"} if missing else {}
    )
    return result_of(options, figures, goals, described, **reason)


@contextmanager
def _served(run: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The page's address, and its process."""
    command = [sys.executable, "-P", "-c", CLI, "page", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None, "it is a pipe"
        try:
            yield process.stdout.readline().strip(), psutil.Process(process.pid)
        finally:
            process.terminate()


def _ask(address: str, process: psutil.Process) -> dict[str, float]:
    with httpx2.Client(base_url=address, timeout=_ANSWER_S, trust_env=False) as client:

        def seconds(*paths: str, **query: Any) -> float:
            began = time.perf_counter()
            for path in paths:
                client.get(path, params=query).raise_for_status()
            return time.perf_counter() - began

        first_s = seconds("page.json", "panels/now.json")
        panels_s = seconds(*(f"panels/{panel.name}.json" for panel in PANELS))
        search_s = seconds("panels/trajectories.json", query=WANTED_TEXT)
        timeline_first_s = seconds("panels/timeline.json", width=_WIDTH)
        whole = client.get("panels/timeline.json", params={"width": _WIDTH}).json()
        begin_s, length_s = whole["run_begin"], whole["run_end"] - whole["run_begin"]
        times, sizes = [], []
        for zoom in _ZOOMS:
            for part in (0.1, 0.5, 0.9):
                first = begin_s + part * length_s * (1 - 1 / zoom)
                window = {"begin": first, "end": first + length_s / zoom, "width": _WIDTH}
                began = time.perf_counter()
                answer = client.get("panels/timeline.json", params=window).raise_for_status()
                times.append(1e3 * (time.perf_counter() - began))
                sizes.append(len(answer.content) / 1e3)
        return {
            "first_answer_s": first_s,
            "panels_s": panels_s,
            "search_s": search_s,
            "timeline_first_s": timeline_first_s,
            "timeline_ms": statistics.median(times),
            "timeline_kb": max(sizes),
            "server_mib": process.memory_full_info().uss / 2**20,
        }


def tables(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the figures."""
    console.print(goals_table("the page of a very long run", result["goals"]))
    if "no_browser" in result:
        console.print(Text(f"No browser has opened the page: {result['no_browser']}."))
    warn_if_busy(console, result)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--quick", is_flag=True, help="A first look in a few seconds; not for comparisons.")
def page(as_json: bool, quick: bool) -> int:
    """Measure the page of a run of 5,000 steps, 100,000 recorded turns and 2,000,000 spans.

    \b
    Examples:
      scripts/bench/run page
      scripts/bench/run page --json > page.json
      scripts/bench/run page --quick

    Progress is on standard error; ctrl-C stops it.
    """
    options = Options(200, 2_000, 20_000) if quick else Options()
    return run_benchmark(partial(measure, options), 4, tables, as_json)
