"""Measures spans: the cost that recording adds to a step, that of one span, and views of a timeline of millions.

\b
Examples:
  scripts/bench/run trace
  scripts/bench/run trace --pairs 10 --json
  scripts/bench/run trace --pairs 0 --spans 4000000

``step``: pairs of runs of sort-digits that share the machine at the same time, with spans and without, as
``scripts/bench/run samples step`` has them; ``pipeline``: the same of the recipe of ``scripts/bench/run pipeline``,
whose engines and trainers sleep; ``page``: pairs of runs with spans that serve their page to a client that has it open,
and of runs with neither; ratios below 1.02 are the goal. ``span_us``: the cost of one span to the process that
records it, and to the launcher that writes it, the best of a hundred rounds. ``view``: the seconds in which a window of
a timeline is ready, as JSON too, the best of five each; less than 0.2 is the goal. ``mib``: of the process that reads
the timeline; less than 200 is the goal.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import numpy as np
import psutil

from flexmarl.actors.spans import NAMES, NUMBERS
from flexmarl.core.spans import SpanRecorder
from flexmarl.launch.monitoring.timeline.timeline import timeline
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.run_folder.spans.span_log import RECORD, SpanLog, names_file, spans_file
from flexmarl.launch.run_folder.spans.trace_config import TraceConfig

from .page_client import opened_page
from .paired_runs import Side, paired_steps
from .pipeline import RECIPE as PIPELINE

_WITHOUT: Final = Side(("trace.enabled=false",))
_OPEN: Final = Side(("page.listen=0",), client=opened_page)
_RUN_S: Final = 36_000.0
_WIDTH: Final = 1200
_LONG_STEPS: Final = 40
"""The most steps of a run of the pipeline: one takes seconds."""
_SHARES: Final = (1.0, 0.3, 0.1, 0.01, 0.001)


def best_s(work: Callable[[], object], rounds: int = 5) -> float:
    """Seconds of the fastest of several rounds: what else the machine does makes the others slower."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


class SpanCost(NamedTuple):
    """Microseconds of one span: ``add``, until it is in the recorder's memory; ``take``, until it is handed to the
    launcher; ``write``, by the launcher into the run's folder."""

    add: float
    take: float
    write: float


def span_us(spans: int = 2000, rounds: int = 100) -> SpanCost:
    """The costs of a span of a turn, in batches as large as a rollout worker's of a second."""
    label = "rollout-0 turns", "turn", "solver", "shared", ""
    queries = [f"q{number // 16}" for number in range(spans)]
    recorder = SpanRecorder()
    batch = recorder.take(1.0, 0)

    def add() -> None:
        now, add_span = recorder.now, recorder.add
        for number, query in enumerate(queries):
            begin = now()
            add_span(begin, now(), label, query, number % 8, 1, 3, 4, -1, 64, key=query)

    def take() -> None:
        nonlocal batch
        batch = recorder.take(1.0, batch.number)

    with tempfile.TemporaryDirectory() as folder:
        log = SpanLog(Path(folder) / "trace", TraceConfig(limit_mib=100_000), print)
        parts = add, take, lambda: log.add("rollout-0", "host", batch)
        times = [[best_s(part, 1) for part in parts] for _ in range(rounds)]
        log.close()
    return SpanCost(*(1e6 * min(of) / spans for of in zip(*times, strict=True)))


def write_timeline(folder: Path, spans: int) -> RunDirectory:
    """A run of ten hours: 40 instances, and 10 rollout workers of two lanes each."""
    run = RunDirectory.create(folder / "run", "{}")
    run.trace.mkdir()
    lanes = [f"solver-{n}" for n in range(40)]
    lanes += [f"rollout-{n} {part}" for part in ("turns", "trajectories") for n in range(10)]
    kinds = ["generate", "install", "turn", "wait", "trajectory", "environment"]
    queries = [f"q{n:06}" for n in range(spans // 33 + 1)]
    names = [*lanes, *kinds, "shared", *queries]
    names_file(run.trace).write_text("".join(f"{json.dumps(name)}\n" for name in names))
    rng = np.random.default_rng(0)
    numbers = np.arange(spans)
    records = np.zeros(spans, RECORD)
    for name in (*NAMES, *NUMBERS):
        records[name] = -1
    records["end"] = 1.79e9 + np.sort(rng.uniform(0, _RUN_S, spans))
    records["begin"] = records["end"] - rng.exponential(2.0, spans)
    lane = records["lane"] = rng.integers(0, len(lanes), spans)
    role = np.searchsorted([40, 50], lane, side="right")
    seldom = rng.random(spans) < np.array([0.02, 0.4, 0.3])[role]
    records["kind"] = len(lanes) + 2 * role + seldom
    records["policy"] = len(lanes) + len(kinds)
    records["query"] = len(lanes) + len(kinds) + 1 + numbers // 33
    records["trajectory"], records["turn"] = numbers % 8, numbers // 8 % 4
    records["step"] = records["version"] = ((records["end"] - 1.79e9) / 7.2).astype(int)
    records.tofile(spans_file(run.trace))
    return run


def views(spans: int) -> dict[str, Any]:
    """Views of several shares of the run."""
    with tempfile.TemporaryDirectory() as folder:
        run = write_timeline(Path(folder), spans)
        shown = timeline(run.path)
        began = time.perf_counter()
        shown.refresh()
        figures: dict[str, Any] = {"spans": spans, "open_s": time.perf_counter() - began}
        whole = shown.view(width=_WIDTH)
        begin_s, end_s = whole["run_begin"], whole["run_end"]
        figures["view"] = {}
        for share in _SHARES:
            first_s = begin_s + (end_s - begin_s) * (1 - share) / 2
            window = first_s, first_s + (end_s - begin_s) * share
            view = shown.view(*window, _WIDTH)
            figures["view"][str(share)] = {
                "view_s": best_s(lambda: shown.view(*window, _WIDTH)),  # noqa: B023  # called at once
                "json_s": best_s(lambda: json.dumps(view)),  # noqa: B023  # called at once
                "entries": len(view["spans"]) + len(view["dense"]),
            }
        figures["span_s"] = best_s(lambda: shown.span(spans // 2))
        figures["mib"] = psutil.Process().memory_info().rss / 2**20
        return figures


@click.command(help=__doc__)
@click.option("--pairs", type=click.IntRange(0), default=6, show_default=True, help="Pairs of runs; 0: none.")
@click.option("--steps", type=click.IntRange(20), default=120, show_default=True, help="Steps of each run.")
@click.option("--spans", type=click.IntRange(1000), default=2_000_000, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def trace(pairs: int, steps: int, spans: int, as_json: bool) -> None:
    figures: dict[str, Any] = {"span_us": span_us()._asdict(), "timeline": views(spans)}
    if pairs:
        figures["step"] = paired_steps(pairs, steps, Side(), _WITHOUT)
        figures["page"] = paired_steps(pairs, steps, _OPEN, _WITHOUT)
        figures["pipeline"] = paired_steps(pairs, min(steps, _LONG_STEPS), Side(), _WITHOUT, [str(PIPELINE)])
    print(json.dumps(figures, indent=None if as_json else 2))
