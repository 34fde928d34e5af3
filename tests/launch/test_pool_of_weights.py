"""A pool of past versions in a run with real models: members play with the weights that the policy had."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import flexmarl
from flexmarl.actors.recorded_trajectory import RecordedTurn

from .in_process import RunsHere

POOL = "agents={solver: {}, checker: {policy: {pool_of: solver, every: 1, rule: %s}}}"
STEPS = 4


@pytest.fixture(scope="module")
def played(runs_here: RunsHere) -> Path:
    finished = runs_here.train(
        "pool",
        POOL % "latest",
        f"training={{steps: {STEPS}, queries_per_step: 4, trajectories_per_query: 8, micro_batch: 16}}",
        "checkpoint={every: 1, keep: 100}",
        "agents.solver.optimizer.lr=1.0e-2",
    )
    assert finished.status == 0 and not finished.problems, finished.text
    assert [step["opponent_step/checker"] for step in finished.metrics] == [0, 1, 2, 3]
    assert all(step["opponent_games/checker"] == 32 for step in finished.metrics)
    return finished.directory


def saved(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:06d}" / "solver"


def test_a_member_is_the_policy_as_it_was(played: Path) -> None:
    different = []
    for step in range(1, STEPS):
        member = load_file(played / "opponents" / "checker" / f"solver-step_{step:06d}.safetensors")
        policy = load_file(saved(played, step) / "model.safetensors")
        assert policy and all(torch.equal(member[name], tensor) for name, tensor in policy.items())
        different.append(torch.cat([tensor.flatten() for tensor in member.values()]))
    assert not torch.equal(different[0], different[1]) and not torch.equal(different[1], different[2])


def test_its_turns_are_drawn_with_these_weights(played: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(saved(played, 1))
    with flexmarl.Samples(played) as samples:
        for step in range(2, STEPS + 1):
            turns = [
                turn
                for trajectory in samples.trajectories(step=step, evaluation=False)
                for turn in trajectory.turns
                if turn.agent == "checker"
            ]
            assert len(turns) == 32
            gaps = {member: largest_gap(played, member, turns, tokenizer) for member in range(1, step)}
            assert gaps.pop(step - 1) < 1e-4
            assert all(gap > 1e-3 for gap in gaps.values()), "earlier members would draw otherwise"


def largest_gap(run: Path, member: int, turns: list[RecordedTurn], tokenizer: Any) -> float:
    """Between the turns' log-probabilities and those of the policy after step ``member``."""
    model = AutoModelForCausalLM.from_pretrained(saved(run, member))
    gaps = []
    for turn in turns:
        (text,) = turn.prompt
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(prompt) == turn.prompt_tokens
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *turn.tokens]])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)[range(len(turn.tokens)), list(turn.tokens)]
        gaps.append(float((logprobs - torch.tensor(turn.logprobs)).abs().max()))
    return max(gaps)
