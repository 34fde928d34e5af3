"""Whole runs in ``mode=async``: turns that new weights interrupt are resumed."""

from pathlib import Path

from scripts.bench.pipeline import RECIPE

from .conftest import TINY
from .in_process import Finished, RunsHere

# A step whose turns are generated two at a time, and trained in one micro-batch: generating it takes much longer than
# training it, so the weights of a step find turns of the next one under way.
REAL_ENGINE = (
    "agents={solver: {}}", "data.shape=alone", "training.steps=8", "training.queries_per_step=8",
    "agent_defaults.engine.max_batch=2", "agent_defaults.sampling.max_new_tokens=60", "training.micro_batch=32",
    "checkpoint.every=0",
)  # fmt: skip
SIMULATED_ENGINE = (
    "training.steps=6", "training.queries_per_step=4", "training.trajectories_per_query=2", "training.micro_batch=4",
    "agent_defaults.engine.max_batch=4",
)  # fmt: skip


def _carries_turns_on(runs_here: RunsHere, name: str, recipe: Path, *settings: str) -> Finished:
    run = runs_here.train(name, "mode=async", "max_staleness=2", *settings, recipe=recipe)
    assert run.status == 0 and not run.problems, run.text
    assert sum(line["resumed_turns"] for line in run.metrics) > 0
    for line in run.metrics:
        assert line["max_staleness"] <= 2 and line["failed_trajectories"] == 0
        assert "overlap_s" not in line, "it would be that with the step's own rollout"
        assert (line["resumed_tokens"] >= line["resumed_turns"]) and line["tokens"] > line["resumed_tokens"]
    return run


def test_turns_of_a_real_engine_are_carried_on(runs_here: RunsHere) -> None:
    run = _carries_turns_on(runs_here, "real", TINY, *REAL_ENGINE)
    assert [line["samples/solver"] for line in run.metrics] == [32] * 8


def test_turns_of_simulated_engines_are_carried_on(runs_here: RunsHere) -> None:
    run = _carries_turns_on(runs_here, "simulated", RECIPE, *SIMULATED_ENGINE)
    calls = {"planner": 1, "solver": 2, "checker": 6}
    assert all(line[f"samples/{agent}"] == 8 * n for line in run.metrics for agent, n in calls.items())
