"""The beginning of real runs of recipes, with seed 0: what is learned first is learned."""

from flexmarl.launch.config_reading import recipe_folder

from ..in_process import Finished, RunsHere

QUIET = ("checkpoint.every=0", "seed=0")


def evaluated(run: Finished, metric: str) -> list[float]:
    """The metric in all evaluations, the first one before any step."""
    assert run.status == 0, run.text
    return [event[metric] for event in run.events if event["event"] == "evaluated"]


def test_kuhn_poker_leaves_random_play(runs_here: RunsHere) -> None:
    run = runs_here.train(
        "kuhn", "training.steps=16", "evaluation.every=0", *QUIET, recipe=recipe_folder("kuhn-poker")
    )
    before, after = evaluated(run, "exploitability")
    assert before > 0.4
    assert after < 0.37
    assert [step["opponent_games/rival"] for step in run.metrics] == [24 * 16] * 16
