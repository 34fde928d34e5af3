"""Demonstrations in a real run, with models and engines: killed in the midst of a patched trajectory, and continued."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from flexmarl.launch.config.config_reading import RECIPES
from flexmarl.launch.recipes.plan_path.workflow import train_query
from scripts.bench.slot_demonstrations import demonstration_of

from .conftest import Launcher, wait_until
from .in_process import Finished, RunsHere
from .test_trees import HELD

STEPS, QUERIES = 4, 2
DATA = {"side": 3, "walls": 1, "rounds": 5, "eval_problems": 2, "planner_reward": "step"}
SETTINGS = (
    "deterministic=true", *(f"data.{key}={value}" for key, value in DATA.items()),
    "rollout.demonstrations={file: walks.jsonl, most: 3}",
    "agent_defaults.algorithm={name: at_grpo}", "agent_defaults.sft={batches: 2, batch_size: 8}",
    f"training={{steps: {STEPS}, queries_per_step: {QUERIES}, trajectories_per_query: 3, micro_batch: 2}}",
    "checkpoint={every: 2, keep: 2}",
)  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Plan-path with environments that a file stops, and an expert's walks for all queries of the run."""
    folder = Path(shutil.copytree(RECIPES / "plan_path", tmp_path / "held_path"))
    with (folder / "workflow.py").open("a") as workflow:
        workflow.write(HELD)
    with (folder / "walks.jsonl").open("w") as walks:
        for position in range(STEPS * QUERIES):
            query = train_query(position, 0, **DATA)
            line = {"query": query.text, "actions": demonstration_of(query).actions}
            walks.write(f"{json.dumps(line)}\n")
    return folder


def test_a_run_that_is_killed_in_the_midst_of_a_demonstration_ends_bit_for_bit_as_if_nothing_had_happened(
    launcher: Launcher, recipe: Path, tmp_path: Path
) -> None:
    here = RunsHere(launcher.runs)
    name = f"walks-{tmp_path.name}"
    whole = here.train(f"{name}-whole", *SETTINGS, f"data.hold={tmp_path / 'never'}", recipe=recipe)
    assert whole.status == 0, whole.text

    hold, reached = tmp_path / "hold", tmp_path / "hold.reached"
    hold.write_text(str(2 * QUERIES))  # positions count from 0: the first query of step 3
    killed = launcher.train(name, *SETTINGS, f"data.hold={hold}", recipe=recipe)
    killed.wait_for_output("checkpoints/step_000002")
    wait_until(reached.exists, f"a walk of step 3 within its second round:\n{killed.text}")
    killed.signal(signal.SIGKILL)
    killed.wait()
    killed.assert_nothing_is_left()
    assert [line["step"] for line in killed.metrics] == [1, 2]

    hold.unlink()
    resumed = here.resume(name)
    assert resumed.status == 0, resumed.text
    assert "continuing after step 2" in resumed.text
    assert learned(resumed) == learned(whole)
    for policy in ("planner", "executor"):
        for file in ("model.safetensors", "training_state.safetensors"):
            path = Path("checkpoints") / f"step_{STEPS:06d}" / policy / file
            assert (resumed.directory / path).read_bytes() == (whole.directory / path).read_bytes(), path


def learned(run: Finished) -> list[dict[str, float]]:
    """Losses, gradients, numbers of samples, patches and departures of each step. All trajectories are demonstrated."""
    names = ("loss", "grad_norm", "samples", "patched_turns", "departed_trajectories")
    lines = [{key: line[key] for key in line if key.split("/")[0] in names} for line in run.metrics]
    assert len(lines) == STEPS
    assert [line["demonstrated_trajectories"] for line in run.metrics] == [3 * QUERIES] * STEPS
    assert all(line["patched_turns"] > 0 for line in lines)
    assert {f"{name}/planner" for name in names[:3]} <= lines[0].keys()
    return lines
