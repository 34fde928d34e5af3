"""Trees of a real run, with models and engines: killed in the midst of a tree, and continued."""

from pathlib import Path

import pytest

from flexmarl.actors.json_files import read_json

from .conftest import Launcher
from .held_path import QUERIES, STEPS, held_recipe, whole_and_killed
from .in_process import Finished

SETTINGS = (
    "deterministic=true", "data.side=3", "data.walls=1", "data.rounds=4", "data.eval_problems=2",
    "data.planner_reward=plan",
    "agent_defaults.algorithm={name: at_grpo, rewards: turn}", "agent_defaults.sft={batches: 2, batch_size: 8}",
    f"training={{steps: {STEPS}, queries_per_step: {QUERIES}, trajectories_per_query: 1, micro_batch: 2}}",
    "checkpoint={every: 2, keep: 2}",
)  # fmt: skip


RULES = {
    "greedy": "{branch: greedy, width: 3}",
    "predicted": "{branch: predicted, width: 3, lines: 4, gain: 0.1, mean_lines: 2.5}",
}


@pytest.mark.parametrize("branch", RULES)
def test_a_run_that_is_killed_in_the_midst_of_a_tree_ends_bit_for_bit_as_if_nothing_had_happened(
    launcher: Launcher, tmp_path: Path, branch: str
) -> None:
    settings = (*SETTINGS, f"rollout.tree={RULES[branch]}")
    whole, resumed = whole_and_killed(launcher, held_recipe(tmp_path), tmp_path, *settings)
    assert learned(resumed) == learned(whole)
    learnt = predictor_of(whole)
    assert predictor_of(resumed) == learnt
    assert (learnt is not None and any(learnt[:-1]) and learnt[-1] != 1.0) == (branch == "predicted")


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
