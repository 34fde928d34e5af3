"""Compares simulated runs with real ones: the seconds of a step of both, of five small configurations.

\b
Examples:
  scripts/bench/run truth
  scripts/bench/run truth --only moves --json
  scripts/bench/run truth --computed
  scripts/bench/run truth --handed

The real runs are processes of this machine, whose engines and trainers sleep instead of computing: the same times, by
the clock of the machine, and all messages, files and processes of a run. The simulation plays the same config in
virtual time. Goal: 5 %. The error has the messages of the real run beside its sleeps, and the waits of a machine that
is busy with something else: ``load`` is its load average at the end.

With ``--computed`` real models train instead, of two recipes and two sizes, for three minutes a round. The device is
calibrated on the runs with models of both sizes, and all are simulated with the lengths that they had
(``truth_computed.py``). ``--handed`` measures a number that the comparison with publications needs
(``truth_handed.py``). Exits with 1 if a configuration misses the goal.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import click

from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.simulate.simulation import simulate

from .truth_computed import COMPUTED_GOAL, compare_computed
from .truth_handed import handed

GOAL: Final = 0.05
_RECIPE: Final = Path(__file__).parents[2] / "tests" / "launch" / "recipes" / "simulated"
_LONGEST_S: Final = 600.0
_STEPS: Final = 5

# Turns of some seconds, so that the milliseconds of messages stay far below the goal.
_COMMON: Final = (
    f"training.steps={_STEPS}", "training.queries_per_step=4", "training.trajectories_per_query=4",
    "training.micro_batch=4", "checkpoint.every=0", "agent_defaults.engine.token_s=0.1",
    "agent_defaults.engine.install_s=0.3", "agent_defaults.trainer.token_s=0.01",
    "agent_defaults.trainer.micro_batch_s=0.2", "agent_defaults.trainer.optimizer_s=0.5",
)  # fmt: skip
_SKEWED: Final = ("agents.solver.engine.median_tokens=40", "agents.checker.engine.median_tokens=4")
CONFIGURATIONS: Final[Mapping[str, Sequence[str]]] = {
    "static": (),
    "static-sync": ("mode=sync",),
    "shared": ("pool={name: shared, slots: 1}",),
    "shared-async": ("pool={name: shared, slots: 2}", "mode=async"),
    "moves": (
        *_SKEWED, "agent_defaults.engine.max_batch=2", "agent_defaults.instances=3",
        "balance={scope: intra+inter, threshold: 1}", "pool={name: shared, slots: 1}",
    ),
}  # fmt: skip
"""Settings by name: static and shared pools, and instances that move between policies."""


def compare(name: str, folder: Path) -> dict[str, Any]:
    """The row of one configuration."""
    settings = [*_COMMON, *CONFIGURATIONS[name]]
    command = [
        str(Path(sys.executable).with_name("flexmarl")),
        "train",
        str(_RECIPE),
        "--runs",
        str(folder),
        "--name",
        name,
        "-q",
    ]
    subprocess.run(
        [*command, *settings],
        check=True,
        timeout=_LONGEST_S,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    load = os.getloadavg()[0]
    config = resolve(str(_RECIPE), settings)
    simulate(config, folder / f"{name}-simulated", config.seed, keep_log=False)
    real_s, simulated_s = (step_s(folder / run) for run in (name, f"{name}-simulated"))
    moves = sum(
        json.loads(line)["event"] == "instance_moved" for line in _lines(folder / name / "events.jsonl")
    )
    return {
        "configuration": name, "real_s": round(real_s, 3), "simulated_s": round(simulated_s, 3),
        "error": round(simulated_s / real_s - 1, 4), "moves": moves, "load": round(load, 1),
    }  # fmt: skip


def step_s(run: Path) -> float:
    """The mean of a run's steps, but for the first, which waits for all parts of the run, and the last, which saves."""
    rows = [json.loads(line) for line in _lines(run / "metrics.jsonl")]
    return fmean(row["step_s"] for row in rows[1:-1])


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


@click.command(help=__doc__)
@click.option("--only", type=click.Choice(list(CONFIGURATIONS)), multiple=True, help="May be repeated.")
@click.option("--computed", is_flag=True, help="Runs that compute, in place of those that sleep. Goal: 10 %.")
@click.option("--handed", "measures_handed", is_flag=True, help="Seconds of a process for a GB of samples.")
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="Runs of each with --computed."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each.")
def truth(only: tuple[str, ...], computed: bool, measures_handed: bool, rounds: int, as_json: bool) -> int:
    if measures_handed:
        _print(handed(), as_json)
        return 0
    missed = False
    with tempfile.TemporaryDirectory(prefix="flexmarl-truth-") as text:
        folder = Path(text)
        for row in (
            compare_computed(folder, rounds)
            if computed
            else (compare(name, folder) for name in only or CONFIGURATIONS)
        ):
            missed |= abs(row["error"]) > (COMPUTED_GOAL if computed else GOAL)
            _print(row, as_json)
    return int(missed)


def _print(row: Mapping[str, Any], as_json: bool) -> None:
    print(json.dumps(row) if as_json else "  ".join(f"{key} {row[key]}" for key in row), flush=True)
