"""Demonstrations in a real run, with models and engines: killed in the midst of a patched trajectory, and continued;
and a run that follows the successes of another one."""

import json
from pathlib import Path

import pytest

from flexmarl.launch.cli.main import main
from flexmarl.launch.config.config_reading import RECIPES
from flexmarl.launch.recipes.plan_path.workflow import train_query
from flexmarl.launch.run_folder.samples.reader import Samples
from scripts.bench.slot_demonstrations import demonstration_of

from .conftest import Launcher
from .held_path import QUERIES, STEPS, held_recipe, whole_and_killed
from .in_process import Finished, RunsHere

DATA = {"side": 3, "walls": 1, "rounds": 5, "eval_problems": 2, "planner_reward": "step"}
BASE = (
    "deterministic=true", *(f"data.{key}={value}" for key, value in DATA.items()),
    "agent_defaults.algorithm={name: at_grpo}", "agent_defaults.sft={batches: 2, batch_size: 8}",
    f"training={{steps: {STEPS}, queries_per_step: {QUERIES}, trajectories_per_query: 3, micro_batch: 2}}",
    "checkpoint={every: 2, keep: 2}",
)  # fmt: skip
SETTINGS = (*BASE, "rollout.demonstrations={file: walks.jsonl, most: 3}")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Plan-path with environments that a file stops, and an expert's walks for all queries of the run."""
    folder = held_recipe(tmp_path)
    with (folder / "walks.jsonl").open("w") as walks:
        for position in range(STEPS * QUERIES):
            query = train_query(position, 0, **DATA)
            line = {"query": query.text, "actions": demonstration_of(query).actions}
            walks.write(f"{json.dumps(line)}\n")
    return folder


def test_a_run_that_is_killed_in_the_midst_of_a_demonstration_ends_bit_for_bit_as_if_nothing_had_happened(
    launcher: Launcher, recipe: Path, tmp_path: Path
) -> None:
    whole, resumed = whole_and_killed(launcher, recipe, tmp_path, *SETTINGS)
    assert learned(resumed) == learned(whole)


def test_a_run_follows_the_best_trajectories_of_another_one(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = RunsHere(launcher.runs)
    name, file = f"walks-of-{tmp_path.name}", tmp_path / "walks.jsonl"
    # With so little SFT many answers are empty, which no demonstration can have.
    settings = (*BASE, "training.steps=1", "evaluation.every=0", "agent_defaults.sft.batches=30")
    first = here.train(name, *settings, recipe=RECIPES / "plan_path")
    assert first.status == 0, first.text
    capsys.readouterr()
    # All walks count: models with so little training seldom reach a goal.
    words = ["--as-demonstrations", str(file), "--success", "rounds>=1", "--training"]
    assert main(["samples", str(first.directory), *words]) == 0
    assert capsys.readouterr().out == (
        f"{file} has demonstrations of {QUERIES} queries: the best of {3 * QUERIES} successes among "
        f"{3 * QUERIES} trajectories\n"
    )

    follow = f"rollout.demonstrations={{file: {file}, most: 0}}"
    second = here.train(f"{name}-again", *settings, follow, recipe=RECIPES / "plan_path")
    assert second.status == 0, second.text
    (step,) = second.metrics
    assert step["demonstrated_trajectories"] == 3 * QUERIES
    # Step 1 is drawn as in the first run: of each query, the recorded trajectory follows itself to its end.
    assert step["departed_trajectories"] <= 2 * QUERIES
    with Samples(second.directory) as samples:
        followed = {
            one.query.text for one in samples.trajectories(evaluation=False) if one.metrics["followed"] == 1.0
        }
    assert len(followed) == QUERIES
    # A trajectory along a demonstration can not be one.
    capsys.readouterr()
    again = ["--as-demonstrations", str(tmp_path / "again.jsonl"), "--success", "reward>=0", "--training"]
    assert main(["samples", str(second.directory), *again]) == 2
    assert "along a demonstration already" in capsys.readouterr().err


def learned(run: Finished) -> list[dict[str, float]]:
    """Losses, gradients, numbers of samples, patches and departures of each step. All trajectories are demonstrated."""
    names = ("loss", "grad_norm", "samples", "patched_turns", "departed_trajectories")
    lines = [{key: line[key] for key in line if key.split("/")[0] in names} for line in run.metrics]
    assert len(lines) == STEPS
    assert [line["demonstrated_trajectories"] for line in run.metrics] == [3 * QUERIES] * STEPS
    assert all(line["patched_turns"] > 0 for line in lines)
    assert {f"{name}/planner" for name in names[:3]} <= lines[0].keys()
    return lines
