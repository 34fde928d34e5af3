"""Every algorithm's gradient of a step, before it is clipped, against its paper's formula in float64."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flexmarl.actors.credit.algorithms import ALGORITHMS
from flexmarl.actors.messages import Sample
from flexmarl.actors.names import AgentName
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy

from ... import papers
from ...algorithm import Algorithm, algorithm, as_closed
from ...papers import PaperStep, PaperTurn
from .policies import make_double_policy

SOLVER = AgentName("solver")
LONGEST = 8
LOSSES: dict[str, Callable[[PaperStep], Tensor]] = {
    "grpo": papers.grpo,
    "dr_grpo": lambda step: papers.dr_grpo(step, LONGEST),
    "dapo": papers.dapo,
    "gspo": papers.gspo,
    "cispo": papers.cispo,
    "rloo": papers.rloo,
    "reinforce_pp": papers.reinforce_pp,
    "reinforce_pp_baseline": papers.reinforce_pp_baseline,
    "at_grpo": papers.at_grpo,
    "dr_mas": papers.dr_mas,
    "rae": papers.rae,
}


def make_policy(of: Algorithm) -> TorchPolicy:
    return make_double_policy("solver", {SOLVER: of.credit}, of.loss.with_constant_length(LONGEST), 1.2)


def logprobs_of(model: Any, turn: PaperTurn) -> Tensor:
    """``[T]``: one row, without padding."""
    logits = model(input_ids=torch.tensor([[*turn.prompt, *turn.tokens]])).logits[0]
    predicted = logits[len(turn.prompt) - 1 : -1].log_softmax(-1)
    chosen: Tensor = predicted[torch.arange(len(turn.tokens)), torch.tensor(turn.tokens)]
    return chosen


def values_of(critic: Any, turn: PaperTurn) -> Tensor:
    hidden = critic.body(input_ids=torch.tensor([[*turn.prompt, *turn.tokens]])).last_hidden_state[0]
    values: Tensor = critic.head(hidden[len(turn.prompt) - 1 : -1]).squeeze(-1)
    return values


def make_turns(seed: int, model: Any) -> tuple[list[PaperTurn], list[list[float]]]:
    """Groups of 2, 3 and 5 trajectories with one to three turns of 1 to 8 tokens, and their rewards. The engine's
    probabilities differ by up to a factor of 3."""
    rng = random.Random(seed)
    turns, rewards = [], []
    for query, size in enumerate((2, 3, 5)):
        rewards.append([0.0, 1.0, *(rng.choice((0.0, 0.5, 1.0)) for _ in range(size - 2))])
        for trajectory, reward in enumerate(rewards[-1]):
            for number in range(rng.randint(1, 3)):
                prompt = tuple(rng.randrange(16) for _ in range(rng.randint(1, 6)))
                tokens = tuple(rng.randrange(16) for _ in range(rng.randint(1, LONGEST)))
                turn = PaperTurn(query, trajectory, number, reward, prompt, tokens, ())
                with torch.no_grad():
                    drawn = tuple(lp + rng.uniform(-1.1, 1.1) for lp in logprobs_of(model, turn).tolist())
                turns.append(PaperTurn(query, trajectory, number, reward, prompt, tokens, drawn))
    return turns, rewards


def samples_of(turns: Sequence[PaperTurn], rewards: Sequence[Sequence[float]], of: Algorithm) -> list[Sample]:
    """As the rollout sends them when the groups close."""
    samples = []
    for query in range(len(rewards)):
        group = [
            Sample(
                f"1:q{query}_{turn.number}_{turn.trajectory}", SOLVER, 1, 0, f"1:q{query}", turn.reward,
                0.0, turn.prompt, turn.tokens, turn.engine,
            )
            for turn in turns if turn.query == query
        ]  # fmt: skip
        samples += as_closed(group, {SOLVER: of.credit})
    return samples


def stepped_gradients(
    policy: TorchPolicy, samples: Sequence[Sample], seed: int, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """The gradients that policy and critic step with, from micro-batches of 1 to 7 samples in random order."""
    rng = random.Random(seed)
    mixed = rng.sample(list(samples), len(samples))
    while mixed:
        size = rng.randint(1, 7)
        policy.accumulate(mixed[:size])
        mixed = mixed[size:]
    critic = policy._critic
    found: list[Tensor] = []
    for model, optimizer in [
        *([(critic.model, critic._optimizer)] if critic else []),
        (policy.model, policy._optimizer),
    ]:

        def noted(model: torch.nn.Module = model) -> None:
            found.append(
                torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])
            )

        monkeypatch.setattr(optimizer, "step", noted)
    policy.optimizer_step()
    return found[::-1]


def gradient_of(loss: Tensor, model: torch.nn.Module) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def test_every_algorithm_has_a_formula() -> None:
    assert {*LOSSES, "ppo"} == set(ALGORITHMS)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_of_a_step_is_the_papers(
    name: str, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = algorithm(
        name=name, kl_coefficient=beta, **({"critic": {"max_grad_norm": 1e9}} if name == "ppo" else {})
    )
    policy, plain = make_policy(of), make_policy(of)
    turns, rewards = make_turns(3, plain.model)
    assert len({len(turn.tokens) for turn in turns}) > 3 and len({turn.number for turn in turns}) == 3
    found = stepped_gradients(policy, samples_of(turns, rewards, of), 3, monkeypatch)

    reference = plain._reference.model if plain._reference is not None else plain.model
    step = PaperStep(
        turns,
        [logprobs_of(plain.model, turn) for turn in turns],
        [logprobs_of(reference, turn).detach() for turn in turns],
        rewards,
        beta,
    )
    if plain._critic is not None:
        critic = plain._critic.model
        losses = papers.ppo(step, [values_of(critic, turn) for turn in turns])
        expected = [gradient_of(losses[0], plain.model), gradient_of(losses[1], critic)]
    else:
        expected = [gradient_of(LOSSES[name](step), plain.model)]

    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.norm() > 1e-3
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
