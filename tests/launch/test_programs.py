"""Trajectories that programs play through the gateway of their worker."""

from pathlib import Path

import flexmarl

from .in_process import RunsHere

RECIPE = Path(__file__).parent / "recipes" / "program"


def test_a_program_plays_each_trajectory(runs_here: RunsHere) -> None:
    run = runs_here.train("program", recipe=RECIPE)
    assert run.status == 0, run.text
    for step in run.metrics:
        assert (step["workflow/begun"], step["workflow/merged"], step["workflow/turns"]) == (2.0, 2.0, 4.0)
        assert (step["turns/solver"], step["turns/checker"]) == (12, 4)


def test_a_conversation_of_a_program_keeps_its_tokens(runs_here: RunsHere) -> None:
    run = runs_here.train("tokens", "training.steps=1", recipe=RECIPE)
    assert run.status == 0, run.text
    with flexmarl.Samples(run.directory) as samples:
        trajectories = list(samples.trajectories(evaluation=False))
    assert len(trajectories) == 4
    for trajectory in trajectories:
        first, second, third = [turn for turn in trajectory.turns if turn.agent == "solver"]
        for before, after in ((first, second), (second, third)):
            assert after.prompt[0] == before.number, "it continues that turn's tokens"
            assert after.prompt_tokens > before.prompt_tokens + len(before.tokens)
