"""Trees of a real run, with models and engines: killed in the midst of a tree, and continued."""

import shutil
import signal
from pathlib import Path

import pytest

from flexmarl.actors.json_files import read_json
from flexmarl.launch.config.config_reading import RECIPES

from .conftest import Launcher, wait_until
from .in_process import Finished, RunsHere

HELD = '''

import asyncio
from pathlib import Path


class Held(PlanPath):
    """The trees of the position in the file ``hold``, and of later ones, stop after a round until the file is gone."""

    async def reset(self, query):
        self.hold, self.position = Path(query.data["hold"]), query.data["position"]
        return await super().reset(query)

    async def step(self, turns):
        outcome = await super().step(turns)
        while self.rounds == 1 and self.hold.exists() and self.position >= int(self.hold.read_text()):
            Path(f"{self.hold}.reached").touch()
            await asyncio.sleep(0.05)
        return outcome


workflow, problem_of, problems_of = Held, train_query, eval_queries


def train_query(position, seed, *, hold, **data):
    query = problem_of(position, seed, **data)
    return Query(query.id, query.text, {**query.data, "hold": hold, "position": position})


def eval_queries(seed, *, hold, **data):
    return [Query(q.id, q.text, {**q.data, "hold": hold, "position": 0}) for q in problems_of(seed, **data)]
'''
STEPS = 4
SETTINGS = (
    "deterministic=true", "data.side=3", "data.walls=1", "data.rounds=4", "data.eval_problems=2",
    "data.planner_reward=plan",
    "agent_defaults.algorithm={name: at_grpo, rewards: turn}", "agent_defaults.sft={batches: 2, batch_size: 8}",
    f"training={{steps: {STEPS}, queries_per_step: 2, trajectories_per_query: 1, micro_batch: 2}}",
    "checkpoint={every: 2, keep: 2}",
)  # fmt: skip


RULES = {
    "greedy": "{branch: greedy, width: 3}",
    "predicted": "{branch: predicted, width: 3, lines: 4, gain: 0.1, mean_lines: 2.5}",
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Plan-path with environments that a file stops."""
    folder = Path(shutil.copytree(RECIPES / "plan_path", tmp_path / "held_path"))
    with (folder / "workflow.py").open("a") as workflow:
        workflow.write(HELD)
    return folder


@pytest.mark.parametrize("branch", RULES)
def test_a_run_that_is_killed_in_the_midst_of_a_tree_ends_bit_for_bit_as_if_nothing_had_happened(
    launcher: Launcher, recipe: Path, tmp_path: Path, branch: str
) -> None:
    here, settings = RunsHere(launcher.runs), (*SETTINGS, f"rollout.tree={RULES[branch]}")
    name = f"trees-{tmp_path.name}"
    whole = here.train(f"{name}-whole", *settings, f"data.hold={tmp_path / 'never'}", recipe=recipe)
    assert whole.status == 0, whole.text

    hold, reached = tmp_path / "hold", tmp_path / "hold.reached"
    hold.write_text("4")  # positions count from 0: the first query of step 3
    killed = launcher.train(name, *settings, f"data.hold={hold}", recipe=recipe)
    killed.wait_for_output("checkpoints/step_000002")
    wait_until(reached.exists, f"a tree of step 3 within its second round:\n{killed.text}")
    killed.signal(signal.SIGKILL)
    killed.wait()
    killed.assert_nothing_is_left()
    assert [line["step"] for line in killed.metrics] == [1, 2]

    hold.unlink()
    resumed = here.resume(name)
    assert resumed.status == 0, resumed.text
    assert "continuing after step 2" in resumed.text
    assert learned(resumed) == learned(whole)
    assert predictor_of(resumed) == predictor_of(whole)
    learnt = predictor_of(whole)
    assert (learnt is not None and any(learnt[:-1]) and learnt[-1] != 1.0) == (branch == "predicted")
    for policy in ("planner", "executor"):
        for file in ("model.safetensors", "training_state.safetensors"):
            path = Path("checkpoints") / f"step_{STEPS:06d}" / policy / file
            assert (resumed.directory / path).read_bytes() == (whole.directory / path).read_bytes(), path


def predictor_of(run: Finished) -> list[float] | None:
    """The weights of the predictor, and the price of candidates, in the last checkpoint."""
    state = read_json(run.directory / "checkpoints" / f"step_{STEPS:06d}" / "run.json")
    learnt: list[float] | None = state["queries"]["success_state"]
    return learnt


def learned(run: Finished) -> list[dict[str, float]]:
    """Losses, gradients, numbers of samples and branch points of each step. There are branches in each."""
    names = ("loss", "grad_norm", "samples", "branch_points")
    lines = [{key: line[key] for key in line if key.split("/")[0] in names} for line in run.metrics]
    assert len(lines) == STEPS and all(line["branch_points"] > 0 for line in lines)
    assert {f"{name}/planner" for name in names[:3]} <= lines[0].keys()
    return lines
