"""The beginning of real runs of recipes, with seed 0: what is learned first is learned."""

import pytest

from flexmarl.launch.config.config_reading import recipe_folder

from ..in_process import Finished, RunsHere

QUIET = ("checkpoint.every=0", "seed=0")


def evaluated(run: Finished, metric: str) -> list[float]:
    """The metric in all evaluations, the first one before any step."""
    assert run.status == 0, run.text
    return [event[metric] for event in run.events if event["event"] == "evaluated"]


def test_kuhn_poker_leaves_random_play(runs_here: RunsHere) -> None:
    run = runs_here.train(
        "kuhn", "training.steps=10", "training.queries_per_step=12", "evaluation.every=0", *QUIET,
        recipe=recipe_folder("kuhn-poker"),
    )  # fmt: skip
    before, after = evaluated(run, "exploitability")
    assert before > 0.4
    assert after < 0.37
    assert [step["opponent_games/rival"] for step in run.metrics] == [12 * 16] * 10


def test_countdown_learns_from_rewards_of_drafts(runs_here: RunsHere) -> None:
    run = runs_here.train(
        "countdown",
        "training.steps=6",
        "training.queries_per_step=12",
        "training.micro_batch=96",
        "evaluation.every=0",
        "policies.shared.sft.batches=300",
        "data.eval_problems=100",
        "policies.shared.optimizer.schedule=constant",
        "policies.shared.optimizer.lr=3.0e-3",  # twice the recipe's: there are few steps
        *QUIET,
        recipe=recipe_folder("countdown"),
    )
    before, after = evaluated(run, "draft_accuracy")
    assert after > before + 0.03
    assert [step["turns/proposer"] for step in run.metrics] == [4 * 12 * 8] * 6


def test_a_dispatcher_learns_to_complete_orders(runs_here: RunsHere) -> None:
    run = runs_here.train(
        "kitchen", "training.steps=10", "training.queries_per_step=5", "training.micro_batch=40",
        "evaluation.every=0", "data.eval_games=4", *QUIET, recipe=recipe_folder("kitchen"),
    )  # fmt: skip
    before, after = evaluated(run, "collaboration_score")
    assert after > before + 0.1
    shares = [evaluated(run, f"completed_{interval}")[-1] for interval in (2, 3, 4, 5, 6)]
    assert after == pytest.approx(sum(shares) / 5), "as many games of each interval"
