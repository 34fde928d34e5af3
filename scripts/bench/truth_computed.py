"""Real runs that compute, and their simulations with the device that one of them describes."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import yaml

from flexmarl.launch.config.config_reading import read_yaml
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.simulate.calibration import calibrate
from flexmarl.launch.simulate.devices import PRESETS, DeviceConfig
from flexmarl.launch.simulate.measured_run import measured_run
from flexmarl.launch.simulate.recorded_workload import recorded_workload
from flexmarl.launch.simulate.scenario import read_scenario
from flexmarl.launch.simulate.scenario_run import play_scenario

RUNS: Final[Mapping[str, tuple[str, tuple[int, int]]]] = {
    "path-256-512": ("plan-path", (256, 512)),
    "sort-256": ("sort-digits", (256, 256)), "path-256": ("plan-path", (256, 256)),
    "sort-512": ("sort-digits", (512, 512)), "path-512": ("plan-path", (512, 512)),
}  # fmt: skip
"""Recipe by name, and the hidden sizes of its two agents' models. The first is calibrated on: its sizes differ, so that
the time of a call, of elements and of products are distinct."""

_AGENTS: Final = {"sort-digits": ("sorter", "checker"), "plan-path": ("planner", "executor")}

COMPUTED_GOAL: Final = 0.1
_LONGEST_S: Final = 1800.0
_COMMON: Final = (
    # One part after the other, as processes that compute at the same time share the cores of one machine.
    "mode=sync", "training.steps=7", "training.queries_per_step=8", "evaluation.every=0", "checkpoint.every=0",
    "agent_defaults.sft.batches=3",
    # Else samples without an advantage are not computed, and a new model has few others.
    "agent_defaults.algorithm.entropy_coefficient=0.0001",
)  # fmt: skip


def compare_computed(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """A row for each configuration, the calibrated one first: its own error is that of the rooflines alone. Each is
    trained once in a round."""
    runs: dict[str, list[Path]] = {name: [] for name in RUNS}
    loads: dict[str, list[float]] = {name: [] for name in RUNS}
    for number in range(rounds):
        for name in RUNS:
            runs[name].append(train(name, folder / str(number)))
            loads[name].append(os.getloadavg()[0])
    first = next(iter(RUNS))
    measured = [measured_run(RunDirectory.recorded(run)) for run in runs[first]]
    device = calibrate([policy for run in measured for policy in run.policies], PRESETS["A100"]).device
    turn_s = median(run.turn_s for run in measured)
    return [
        {"run": name, **compare_runs(runs[name], device, turn_s), "load": round(max(loads[name]), 1)}
        for name in RUNS
    ]


def train(name: str, folder: Path) -> Path:
    """Trains a run of some minutes, unless it is there already; returns its folder."""
    if (folder / name).exists():
        return folder / name
    recipe, sizes = RUNS[name]
    settings = [*_COMMON]
    for agent, hidden in zip(_AGENTS[recipe], sizes, strict=True):
        size = (f"hidden_size={hidden}", f"intermediate_size={4 * hidden}", "num_hidden_layers=2")
        settings += [f"agents.{agent}.model.config.{setting}" for setting in size]
    command = [str(Path(sys.executable).with_name("flexmarl")), "train", recipe, "--runs", str(folder)]
    subprocess.run(
        [*command, "--name", name, "-q", *settings], check=True, timeout=_LONGEST_S, capture_output=True
    )
    return folder / name


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The figures of its steps."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def compare_runs(runs: Sequence[Path], device: DeviceConfig, turn_s: float) -> dict[str, Any]:
    """The seconds of a step of equal runs, and of the simulation of the first with the workload that it had: medians
    over all steps but the first, which waits for all parts of a run, and the last, which evaluates.

    ``turn_s``: of a rollout worker for each turn on this machine; that of the run would have its own disturbances."""
    first = runs[0]
    scenario = first.with_name(f"{first.name}.yaml")
    scenario.write_text(yaml.safe_dump(_scenario(first, device)))
    workload = replace(recorded_workload(RunDirectory.recorded(first)), turn_s=turn_s)
    described = read_scenario(scenario, [], workload)
    played, _ = play_scenario(described, first.with_name(f"{first.name}-simulated"))
    real = [row for run in runs for row in steps_of(run)[1:-1]]
    simulated = steps_of(played.directory.path)[1:-1]
    real_s, simulated_s = (median(row["step_s"] for row in of) for of in (real, simulated))
    training_s, simulated_training_s = map(_training_s, (real, simulated))
    return {
        "real_s": round(real_s, 3), "simulated_s": round(simulated_s, 3), "error": round(simulated_s / real_s - 1, 3),
        "training_s": round(training_s, 3), "training_error": round(simulated_training_s / training_s - 1, 3),
    }  # fmt: skip


def _training_s(rows: Sequence[Mapping[str, Any]]) -> float:
    # A moment in which the machine did something else is one step of many.
    return median(
        sum(float(value) for key, value in row.items() if key.startswith(("backward_s/", "update_s/")))
        for row in rows
    )


def _scenario(run: Path, device: DeviceConfig) -> dict[str, Any]:
    """The run's config on one host."""
    cluster = {"hosts": 1, "devices": 1, "device": device.model_dump()}
    return {**read_yaml(run / "config.yaml"), "cluster": cluster}
