"""Whole runs with several updates a step, in every mode."""

from typing import Any

import pytest

from .in_process import Finished, RunsHere

SETTINGS = (
    "training.updates=2", "training.queries_per_step=4", "training.steps=4", "agent_defaults.optimizer.lr=0.01",
    "agent_defaults.algorithm.name=dapo",
)  # fmt: skip
AGENTS = ("solver", "checker")
LEARNED = ("loss", "grad_norm", "old_ratio_deviation", "clip_fraction", "entropy")


def train(runs_here: RunsHere, name: str, *settings: str) -> Finished:
    run = runs_here.train(name, *SETTINGS, *settings)
    assert run.status == 0 and not run.problems, run.text
    return run


def learned(run: Finished) -> list[dict[str, Any]]:
    """By step, the figures of the policies that depend on their training."""
    return [
        {key: value for key, value in line.items() if key.partition("/")[0] in LEARNED}
        for line in run.metrics
    ]


def check_steps(run: Finished) -> None:
    """Each sample is trained once, and a step is one version."""
    for line in run.metrics:
        assert line["samples/solver"] == 16
    moved = [line.get(f"old_ratio_deviation/{agent}", 0.0) for line in run.metrics for agent in AGENTS]
    assert max(moved) > 1e-3, "the second update is another policy's"
    saved = [event["step"] for event in run.events if event["event"] == "checkpoint_saved"]
    assert saved == [2, 4]


@pytest.fixture(scope="module")
def whole(runs_here: RunsHere) -> Finished:
    return train(runs_here, "whole", "deterministic=true")


def test_strict_and_sync_learn_the_same(runs_here: RunsHere, whole: Finished) -> None:
    check_steps(whole)
    sync = train(runs_here, "sync", "deterministic=true", "mode=sync")
    for step, other in zip(learned(whole), learned(sync), strict=True):
        assert step == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_a_resumed_run_learns_the_same_bit_for_bit(runs_here: RunsHere, whole: Finished) -> None:
    train(runs_here, "resumed", "deterministic=true", "training.steps=2")
    resumed = runs_here.resume("resumed", "training.steps=4")
    assert resumed.status == 0, resumed.text
    assert learned(resumed) == learned(whole)


@pytest.mark.parametrize("old_policy", ["proximal", "behaviour"])
def test_a_run_in_mode_async(runs_here: RunsHere, old_policy: str) -> None:
    setting = f"agent_defaults.algorithm.old_policy={old_policy}"
    check_steps(train(runs_here, f"async-{old_policy}", "mode=async", setting))
