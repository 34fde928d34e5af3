"""Measures the samples that ``sort-digits`` learns from, by the number of updates a step.

Runs of the recipe as it is, apart from their length and their evaluations. A run has learned at the first evaluation
from which on the mean of the agents' rewards is at least ``--reward``. The keys, of each seed and number of updates:

    samples     trained samples of all policies until then; null if the run ends before
    step        the step of that evaluation
    reward      of all evaluations, in order
    accuracy    the same
    clipped     mean of ``clip_fraction`` over policies and steps
    step_s      mean seconds of a step
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import click

_LONGEST_S: Final = 3600.0


def learn(
    runs: Path, seed: int, updates: int, steps: int, every: int, reward: float, lr: float
) -> dict[str, Any]:
    """The figures of one run."""
    name = f"seed-{seed}-updates-{updates}"
    command = Path(sys.executable).with_name("flexmarl")
    settings = {
        "seed": seed,
        "training.updates": updates,
        "training.steps": steps,
        "evaluation.every": every,
        "agent_defaults.optimizer.lr": lr,
        "checkpoint.every": 0,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    subprocess.run(
        [command, "train", "sort-digits", "--runs", runs, "--name", name, "-q", *words],
        check=True,
        timeout=_LONGEST_S,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    return figures(lines, reward)


def figures(lines: Sequence[Mapping[str, Any]], reward: float) -> dict[str, Any]:
    """Those of the metrics of a run's steps."""
    evaluations = [line for line in lines if "eval/accuracy" in line]
    rewards = [_mean(line, "eval/reward/") for line in evaluations]
    learned = None
    for line, measured in zip(reversed(evaluations), reversed(rewards), strict=True):
        if measured < reward:
            break
        learned = line["step"]
    used = [line for line in lines if learned is not None and line["step"] <= learned]
    return {
        "samples": sum(_samples(line) for line in used) or None,
        "step": learned,
        "reward": [round(measured, 3) for measured in rewards],
        "accuracy": [line["eval/accuracy"] for line in evaluations],
        "clipped": round(fmean(_mean(line, "clip_fraction/") for line in lines), 4),
        "step_s": round(fmean(line["step_s"] for line in lines), 3),
    }


def _samples(line: Mapping[str, Any]) -> int:
    return sum(value for key, value in line.items() if key.startswith("samples/"))


def _mean(line: Mapping[str, Any], key: str) -> float:
    """Over agents or policies."""
    return fmean(value for name, value in line.items() if name.startswith(key))


@click.command()
@click.option("--seeds", default="0,1,2", show_default=True)
@click.option("--updates", default="1,4", show_default=True, help="Numbers of updates, one after the other.")
@click.option("--steps", type=click.IntRange(1), default=60, show_default=True, help="Steps of each run.")
@click.option(
    "--every", type=click.IntRange(1), default=5, show_default=True, help="Steps between evaluations."
)
@click.option("--lr", type=click.FloatRange(0, min_open=True), default=5e-4, show_default=True)
@click.option("--reward", type=click.FloatRange(0, 1), default=0.9, show_default=True)
def updates(seeds: str, updates: str, steps: int, every: int, lr: float, reward: float) -> None:
    """Measure the samples that sort-digits learns from, by the number of updates a step.

    Runs of the recipe as it is, apart from their length and their evaluations. A run has learned at the first
    evaluation from which on the mean of the agents' rewards is at least --reward. Prints a JSON object for each seed
    and number of updates.

    \b
    Examples:
      scripts/bench/run updates
      scripts/bench/run updates --seeds 0 --updates 1,2,4 > updates.jsonl
    """
    with tempfile.TemporaryDirectory(prefix="updates-") as folder:
        for seed in map(int, seeds.split(",")):
            for number in map(int, updates.split(",")):
                measured = learn(Path(folder), seed, number, steps, every, reward, lr)
                print(json.dumps({"seed": seed, "updates": number, **measured}), flush=True)
