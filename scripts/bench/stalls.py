"""Times runs that stand still, each in one of the ways of ``tests/launch/stall_ways.py``, with the default limits.

\b
Examples:
  scripts/bench/run stalls
  scripts/bench/run stalls --only "a lock that is never released" --at-once 1

Prints a line of JSON for each way: ``named_s``, from the last step (or the start of the run) to the event that names
the cause, and ``ended_s``, from the first ctrl-C to the end of the process. Goals: 45 and 20 seconds. ``named_s``
includes the start of a run that stands still before its first step. Both are null for a run that ends by itself before,
with an error. Exits with 1 if a run misses a goal, or neither ends nor is named in time.
"""

import contextlib
import json
import re
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click
from tests.launch.conftest import Launcher
from tests.launch.stall_ways import STALLED, STALLS, causes

NAMED_S, ENDED_S = 45.0, 20.0
LIMIT_S = 90.0
DEFAULTS = (
    "supervision={heartbeat_s: 5, missed_heartbeats: 3, stall_s: 30, stop_patience_s: 10, silence_s: 300}"
)


def measured(folder: Path, number: int, name: str) -> dict[str, Any]:
    stall, launcher = STALLED[name], Launcher(folder)
    with contextlib.closing(launcher):
        run = launcher.train(f"stall-{number}", *stall.settings, DEFAULTS, recipe=STALLS)
        stall.trouble(run)
        began = time.monotonic()
        if stall.checkpoint:
            run.wait_for_step(2)
            began = time.monotonic()
        named_s = ended_s = None
        while run.process.poll() is None and time.monotonic() < began + LIMIT_S:
            if any(re.search(stall.cause, cause) for cause in causes(run)):
                named_s = round(time.monotonic() - began, 1)
                break
            time.sleep(0.1)
        else:
            print(run.text, file=sys.stderr)
        began = time.monotonic()
        if run.process.poll() is None:
            run.signal(signal.SIGINT)
            run.wait(LIMIT_S)
            ended_s = round(time.monotonic() - began, 1)
        return {"stall": name, "named_s": named_s, "ended_s": ended_s, "status": run.process.returncode}


@click.command(help=__doc__)
@click.option("--only", type=click.Choice(list(STALLED)), multiple=True, help="A way; may be repeated.")
@click.option(
    "--at-once", type=click.IntRange(1), default=2, show_default=True, help="Runs at the same time."
)
def stalls(only: tuple[str, ...], at_once: int) -> int:
    bad = False
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        names = only or tuple(STALLED)
        for row in pool.map(partial(measured, Path(folder)), range(len(names)), names):
            print(json.dumps(row), flush=True)
            bad |= row["status"] != 1 and not (row["named_s"] or LIMIT_S) <= NAMED_S
            bad |= (row["ended_s"] or 0.0) > ENDED_S
    return int(bad)
