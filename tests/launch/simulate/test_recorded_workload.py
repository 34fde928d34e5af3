"""The workload of a recorded run is that of the scenario that is played again."""

import json
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from flexmarl.actors.errors import ConfigError
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.run.resuming import record
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.simulate.recorded_workload import RecordedWorkload, recorded_workload, set_workload
from flexmarl.launch.simulate.scenario import read_scenario

SCENARIO = Path(__file__).parent / "scenario.yaml"
RECIPE = Path(__file__).parents[1] / "recipes" / "simulated"
MEASURED = RecordedWorkload(
    source="runs/first",
    answers={"solver": {"median": 300.0, "sigma": 0.7}, "judge": {"median": 50.0, "sigma": 0.2}},
    prompts={"solver": 40.5, "judge": 90.25},
    computed={"solver": 0.25},
    trained={"judge": 0.5},
    calls={"solver": 2.0, "judge": 1.5},
    turn_s=0.001,
    environment_s=0.5,
)


def run(folder: Path, settings: tuple[str, ...] = (), steps: int = 5, **medians: float) -> RunDirectory:
    """A run of four trajectories a step, with two turns of each agent and answers of these medians and a sigma of
    0.7."""
    draw, directory = random.Random(1), RunDirectory.create(folder / "run", "")
    batch = ["training.queries_per_step=2", "training.trajectories_per_query=2", "training.micro_batch=2"]
    record(directory, resolve(str(RECIPE), [*batch, *settings]))
    rows = []
    for step in range(1, steps + 1):
        row: dict[str, float] = {"step": step, "cpu_s/rollout-0": 0.08 * step, "environment_s": 4.0}
        for agent, median in medians.items():
            tenths = statistics.quantiles(
                [median * math.exp(0.7 * draw.gauss(0, 1)) for _ in range(4000)], n=10
            )
            row |= {f"turn_tokens_p{n}0/{agent}": tenths[n - 1] for n in (1, 5, 9)}
            engine = f"actor.engine_{{}}_tokens/{agent}-0"
            row |= {
                f"turns/{agent}": 8, f"samples/{agent}": 8, f"nonzero_advantage_share/{agent}": 0.5,
                f"merged_share/{agent}": 0.2, engine.format("prompt"): 160.0 * step,
                engine.format("computed"): 40.0 * step, f"actor.turns.{agent}-0/router": 8.0 * step,
            }  # fmt: skip
        rows.append(row)
    directory.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return directory


def test_the_workload_of_a_run_is_found_again(tmp_path: Path) -> None:
    workload = recorded_workload(run(tmp_path, solver=300.0, checker=50.0))
    assert workload.answers["solver"] == pytest.approx({"median": 300.0, "sigma": 0.7}, rel=0.05)
    assert workload.answers["checker"] == pytest.approx({"median": 50.0, "sigma": 0.7}, rel=0.05)
    assert workload.prompts == {"solver": 20.0, "checker": 20.0}
    assert workload.computed == {"solver": 0.25, "checker": 0.25}
    assert workload.trained == pytest.approx({"solver": 0.4, "checker": 0.4})
    assert workload.calls == {"solver": 2.0, "checker": 2.0}
    assert workload.turn_s == pytest.approx(0.005)
    assert workload.environment_s == pytest.approx(4.0 / 16 - 0.005) and workload.reward_s == 0.0


def test_a_short_run_has_no_figures_that_are_compared_between_steps(tmp_path: Path) -> None:
    workload = recorded_workload(run(tmp_path, steps=1, solver=300.0))
    assert not workload.computed and workload.turn_s == 0.0 and workload.calls == {"solver": 2.0}


def test_agents_that_share_a_policy_have_the_spread_of_all_their_turns(tmp_path: Path) -> None:
    answers = recorded_workload(
        run(tmp_path, ("agents.checker={policy: solver}",), solver=300.0, checker=50.0)
    ).answers
    between = math.log(300 / 50) / 2
    expected = {"median": math.sqrt(300 * 50), "sigma": math.hypot(0.7, between)}
    assert answers["solver"] == answers["checker"] == pytest.approx(expected, rel=0.05)


def test_a_scenario_takes_what_was_measured_and_keeps_its_prompts_and_calls() -> None:
    before, after = (read_scenario(SCENARIO, [], recorded).workload for recorded in (None, MEASURED))
    for agent, lengths in after.agents.items():
        assert lengths.answer.model_dump() == MEASURED.answers[agent]
        assert lengths.prompt.median == before.agents[agent].prompt.median
        assert lengths.prompt.computed == MEASURED.computed.get(agent, 1.0)
        assert lengths.trained == MEASURED.trained.get(agent, 1.0)
    assert after.calls == before.calls and after.environment == before.environment
    assert after.turn_s == 0.001
    changed = read_scenario(SCENARIO, ["workload.agents.solver.answer.median=7"], MEASURED).workload
    assert {name: of.answer.median for name, of in changed.agents.items()} == {"solver": 7.0, "judge": 50.0}


def test_a_scenario_without_a_workload_has_that_of_the_run(tmp_path: Path) -> None:
    raw: dict[str, Any] = yaml.safe_load(SCENARIO.read_text())
    del raw["workload"]
    file = tmp_path / "scenario.yaml"
    file.write_text(yaml.safe_dump(raw))
    workload = read_scenario(file, [], MEASURED).workload
    assert [[(call.agent, call.chance) for call in stage] for stage in workload.calls] == [
        [("solver", 1.0)], [("judge", 1.0)], [("solver", 1.0)], [("judge", 0.5)],
    ]  # fmt: skip
    assert {name: of.prompt.median for name, of in workload.agents.items()} == MEASURED.prompts
    assert workload.environment is not None and workload.environment.median_s == 0.5
    assert workload.reward is None
    with pytest.raises(ConfigError, match=r"workload\.agents\.judge\.prompt: is missing"):
        read_scenario(file, [], replace(MEASURED, prompts={"solver": 40.5}))


def test_runs_without_the_agents_or_without_steps_are_refused(tmp_path: Path) -> None:
    recorded = replace(MEASURED, answers={"solver": MEASURED.answers["solver"]})
    with pytest.raises(ConfigError, match="--from runs/first: that run has no agent 'judge'; it has: solver"):
        set_workload({"workload": {"agents": {"solver": {}, "judge": {}}}}, recorded)
    with pytest.raises(ConfigError, match="no step of it is complete"):
        recorded_workload(RunDirectory.create(tmp_path / "empty", ""))
