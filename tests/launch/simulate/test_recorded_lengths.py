"""The lengths of a recorded run are those of the workload that is played again."""

import json
import math
import random
import statistics
from pathlib import Path

import pytest

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.simulate.recorded_lengths import recorded_lengths, set_lengths
from flexmarl.launch.simulate.scenario import read_scenario

SCENARIO = Path(__file__).parent / "scenario.yaml"


def run(folder: Path, **medians: float) -> RunDirectory:
    """A run with answers of these medians and a sigma of 0.7."""
    draw, directory = random.Random(1), RunDirectory.create(folder / "run", "")
    rows = []
    for step in (1, 2):
        row: dict[str, float] = {"step": step}
        for agent, median in medians.items():
            tenths = statistics.quantiles(
                [median * math.exp(0.7 * draw.gauss(0, 1)) for _ in range(4000)], n=10
            )
            row |= {f"turn_tokens_p{n}0/{agent}": tenths[n - 1] for n in (1, 5, 9)}
        rows.append(row)
    directory.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return directory


def test_the_distribution_of_a_run_is_found_again(tmp_path: Path) -> None:
    lengths = recorded_lengths(run(tmp_path, solver=300.0, judge=50.0))
    assert lengths["solver"] == pytest.approx({"median": 300.0, "sigma": 0.7}, rel=0.05)
    assert lengths["judge"] == pytest.approx({"median": 50.0, "sigma": 0.7}, rel=0.05)


def test_a_scenario_takes_the_answers_and_keeps_its_prompts(tmp_path: Path) -> None:
    recorded = recorded_lengths(run(tmp_path, solver=300.0, judge=50.0))
    before, after = read_scenario(SCENARIO, []), read_scenario(SCENARIO, [], recorded, "run")
    for agent, lengths in after.workload.agents.items():
        assert lengths.answer.model_dump() == recorded[agent]
        assert lengths.prompt == before.workload.agents[agent].prompt


def test_runs_without_the_agents_or_without_steps_are_refused(tmp_path: Path) -> None:
    recorded = recorded_lengths(run(tmp_path, solver=300.0))
    with pytest.raises(ConfigError, match="--from run: that run has no agent 'judge'; it has: solver"):
        set_lengths({"agents": {"solver": {}, "judge": {}}}, recorded, "run")
    with pytest.raises(ConfigError, match="no step of it is complete"):
        recorded_lengths(RunDirectory.create(tmp_path / "empty", ""))
