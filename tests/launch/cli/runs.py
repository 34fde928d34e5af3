"""Folders of runs for tests, written without a run."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.orchestrator import checkpoint
from flexmarl.actors.orchestrator.checkpoint import RunState
from flexmarl.actors.run_events import Evaluated, RunEnded, RunEvent, RunStarted
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.launch.config.config_reading import resolve, to_yaml
from flexmarl.launch.run_folder.json_lines import event_to_json, metrics_to_json
from flexmarl.launch.run_folder.line_writer import LineWriter
from flexmarl.launch.run_folder.run_directory import RunDirectory

STARTED = RunStarted(Step(0), "3.11", "linux", 2, 1)
DONE = RunEnded(stopped=False, step=Step(3))


def make_run(
    path: Path, *settings: str, steps: int = 3, events: tuple[RunEvent, ...] = (), age_s: float = 0.0
) -> RunDirectory:
    """A run of sort-digits after ``steps`` steps, whose accuracy is 0.5 then. ``events``: after the evaluation's."""
    directory = RunDirectory.create(path, to_yaml(resolve("sort-digits", settings)))
    metrics = LineWriter(directory.metrics, pytest.fail)
    for number in range(1, steps + 1):
        reward = {"reward": number / 10}
        metrics.write(
            metrics_to_json(
                StepMetrics(
                    Step(number), 2.0 * number, 2.0, 1.0, 10, 5.0, by_agent={AgentName("sorter"): reward}
                )
            )
        )
    metrics.close()
    written = LineWriter(directory.events, pytest.fail)
    for event in (STARTED, Evaluated(Step(steps), 0.1, {"accuracy": 0.5, "reward/sorter": 0.25}), *events):
        written.write(event_to_json(event) | {"time": time.time() - age_s})
    written.close()
    return directory


def save_checkpoint(
    directory: RunDirectory, step: int, policies: Mapping[str, Callable[[Path], None]]
) -> Path:
    """A joint checkpoint. ``policies``: by name, a function that makes and fills the policy's folder."""
    partial = checkpoint.partial_folder(directory.checkpoints, Step(step))
    partial.mkdir()
    for policy, save in policies.items():
        save(partial / policy)
    versions = {PolicyName(policy): Version(step) for policy in policies}
    return checkpoint.commit(directory.checkpoints, RunState(Step(step), versions, {}), keep=9)


def files(content: Mapping[str, str]) -> Callable[[Path], None]:
    """Makes a folder with these files, for ``save_checkpoint``."""

    def save(folder: Path) -> None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)

    return save
