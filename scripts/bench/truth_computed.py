"""Real runs that compute, and their simulations with the device that one of them describes."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import yaml

from flexmarl.actors.names import PolicyName
from flexmarl.launch.config.config_reading import check, read_yaml
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.simulate.calibration import calibrate
from flexmarl.launch.simulate.devices import PRESETS
from flexmarl.launch.simulate.measured_run import mean_prompt, measured_run
from flexmarl.launch.simulate.recorded_lengths import recorded_lengths
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


def compare_computed(folder: Path) -> list[dict[str, Any]]:
    """A row for each run, the calibrated one first: its own error is that of the rooflines alone."""
    loads = {}
    for name in RUNS:
        train(name, folder)
        loads[name] = round(os.getloadavg()[0], 1)
    device = calibrate(measured_run(RunDirectory.recorded(folder / next(iter(RUNS)))), PRESETS["A100"]).device
    return [
        {"run": name, **predict(folder / name, device.model_dump()), "load": load}
        for name, load in loads.items()
    ]


def train(name: str, folder: Path) -> None:
    """Trains a run of some minutes, unless it is there already."""
    if (folder / name).exists():
        return
    recipe, sizes = RUNS[name]
    settings = [*_COMMON]
    for agent, hidden in zip(_AGENTS[recipe], sizes, strict=True):
        size = (f"hidden_size={hidden}", f"intermediate_size={4 * hidden}", "num_hidden_layers=2")
        settings += [f"agents.{agent}.model.config.{setting}" for setting in size]
    command = [str(Path(sys.executable).with_name("flexmarl")), "train", recipe, "--runs", str(folder)]
    subprocess.run(
        [*command, "--name", name, "-q", *settings], check=True, timeout=_LONGEST_S, capture_output=True
    )


def predict(run: Path, device: Mapping[str, float]) -> dict[str, Any]:
    """The seconds of a run's step, and of its simulation with the lengths and calls that it had."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scenario = run.with_name(f"{run.name}.yaml")
    scenario.write_text(yaml.safe_dump(_scenario(run, rows, device)))
    described = read_scenario(scenario, [], recorded_lengths(RunDirectory.recorded(run)), str(run))
    played, _ = play_scenario(described, run.with_name(f"{run.name}-simulated"))
    simulated = [json.loads(line) for line in played.directory.metrics.read_text().splitlines()]
    real_s, simulated_s = (fmean(row["step_s"] for row in of[1:-1]) for of in (rows, simulated))
    training_s, simulated_training_s = (_training_s(of[1:-1]) for of in (rows, simulated))
    return {
        "real_s": round(real_s, 3), "simulated_s": round(simulated_s, 3), "error": round(simulated_s / real_s - 1, 3),
        "training_s": round(training_s, 3), "training_error": round(simulated_training_s / training_s - 1, 3),
    }  # fmt: skip


def _training_s(rows: Sequence[Mapping[str, Any]]) -> float:
    keys = [key for key in rows[0] if key.startswith(("backward_s/", "optimizer_s/"))]
    return fmean(sum(row.get(key, 0.0) for key in keys) for row in rows)


def _scenario(run: Path, rows: Sequence[Mapping[str, Any]], device: Mapping[str, float]) -> dict[str, Any]:
    """The run's config on one host, with the mean lengths of its prompts and the mean number of its calls."""
    raw = read_yaml(run / "config.yaml")
    config = check(raw, str(run))
    trajectories = config.training.queries_per_step * config.training.trajectories_per_query
    turns = {agent: sum(row[f"turns/{agent}"] for row in rows[2:]) for agent in config.agents}
    prompts = {agent: mean_prompt(rows, PolicyName(agent)) for agent in turns}
    rounds = max(turns.values()) / (len(rows) - 2) / trajectories
    raw.pop("recipe")
    raw.pop("data")
    for policy in raw["policies"].values():
        policy["sft"]["batches"] = 0  # examples are the recipe's
    # The lengths of answers are those that the run has recorded.
    agents = {
        agent: {"prompt": {"median": prompts[agent], "longest": 24}, "answer": {"median": 1.0}}
        for agent in config.agents
    }
    return {
        **raw,
        "cluster": {"hosts": 1, "devices": 1, "device": dict(device)},
        "workload": {"agents": agents, "calls": _calls(list(config.agents), rounds)},
    }


def _calls(agents: Sequence[str], rounds: float) -> list[Any]:
    """All agents in turn, ``rounds`` times, which may be a fraction: the last calls have its chance."""
    whole, part = divmod(rounds, 1.0)
    last = [{"agent": agent, "chance": part} for agent in agents if part > 0]
    return [*([*agents] * int(whole)), *last]
