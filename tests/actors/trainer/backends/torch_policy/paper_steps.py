"""Turns of the papers: as the rollout sends them, and the gradients that a policy in double precision steps with."""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from flexmarl.actors.messages import Sample, StepStats
from flexmarl.actors.names import AgentName
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.trainer_config import OptimizerConfig

from ...algorithm import Algorithm, algorithm, as_closed
from ...papers import PaperTurn
from ...users_losses import users_loss
from .policies import make_double_policy

SOLVER: Final = AgentName("solver")
LONGEST: Final = 8


def make_policy(of: Algorithm, **settings: Any) -> TorchPolicy:
    loss = of.loss.with_constant_length(LONGEST)
    optimizer = OptimizerConfig(max_grad_norm=1e9, zero_gradient="step")
    custom = None if loss.loss is None else users_loss(loss.loss)
    return make_double_policy(
        "solver", {SOLVER: of.credit}, loss, 1.2, optimizer=optimizer, users_loss=custom, **settings
    )


def logprobs_of(model: Any, turn: PaperTurn) -> Tensor:
    """``[T]``: one row, without padding."""
    logits = model(input_ids=torch.tensor([[*turn.prompt, *turn.tokens]])).logits[0]
    predicted = logits[len(turn.prompt) - 1 : -1].log_softmax(-1)
    chosen: Tensor = predicted[torch.arange(len(turn.tokens)), torch.tensor(turn.tokens)]
    return chosen


def entropies_of(model: Any, turn: PaperTurn) -> Tensor:
    """``[T]``, each as the sum over the vocabulary."""
    logits = model(input_ids=torch.tensor([[*turn.prompt, *turn.tokens]])).logits[0]
    distributions = logits[len(turn.prompt) - 1 : -1].softmax(-1)
    entropies: Tensor = -(distributions * distributions.log()).sum(-1)
    return entropies


def values_of(critic: Any, turn: PaperTurn) -> Tensor:
    hidden = critic.body(input_ids=torch.tensor([[*turn.prompt, *turn.tokens]])).last_hidden_state[0]
    values: Tensor = critic.head(hidden[len(turn.prompt) - 1 : -1]).squeeze(-1)
    return values


@functools.cache
def _first_model() -> Any:
    return make_policy(algorithm(name="grpo")).model


@functools.cache
def first_logprobs(turn: PaperTurn) -> Tensor:
    """``[T]``, of the weights that the policies of all algorithms begin with."""
    with torch.no_grad():
        return logprobs_of(_first_model(), turn)


@functools.cache
def make_turns(seed: int, sizes: tuple[int, ...]) -> tuple[list[PaperTurn], list[list[float]]]:
    """Groups of ``sizes`` trajectories with one to three turns of 1 to 8 tokens, and their rewards. The engine's
    probabilities differ by up to a factor of 3 from those of ``first_logprobs``."""
    rng = random.Random(seed)
    turns, rewards = [], []
    for query, size in enumerate(sizes):
        rewards.append([0.0, 1.0, *(rng.choice((0.0, 0.5, 1.0)) for _ in range(size - 2))])
        for trajectory, reward in enumerate(rewards[-1]):
            for number in range(rng.randint(1, 3)):
                prompt = tuple(rng.randrange(16) for _ in range(rng.randint(1, 6)))
                tokens = tuple(rng.randrange(16) for _ in range(rng.randint(1, LONGEST)))
                turn = PaperTurn(query, trajectory, number, reward, prompt, tokens, ())
                drawn = tuple(lp + rng.uniform(-1.1, 1.1) for lp in first_logprobs(turn).tolist())
                turns.append(replace(turn, engine=drawn))
    return turns, rewards


def samples_of(
    turns: Sequence[PaperTurn], rewards: Sequence[Sequence[float]], of: Algorithm, version: int = 0
) -> list[Sample]:
    """As the rollout sends them when the groups close."""
    samples = []
    for query in range(len(rewards)):
        group = [
            Sample(
                f"1:q{query}_{turn.number}_{turn.trajectory}", SOLVER, 1, version, f"1:q{query}", turn.reward,
                0.0, turn.prompt, turn.tokens, turn.engine, query_position=query,
            )
            for turn in turns if turn.query == query
        ]  # fmt: skip
        samples += as_closed(group, {SOLVER: of.credit})
    return samples


@dataclass
class Update:
    """``gradients``: that the policy and the critic step with. ``before``: their weights before the step."""

    gradients: list[Tensor]
    before: list[list[Tensor]]


def train(policy: TorchPolicy, samples: Sequence[Sample], seed: int) -> None:
    """Accumulates micro-batches of 1 to 7 samples in random order."""
    rng = random.Random(seed)
    mixed = rng.sample(list(samples), len(samples))
    while mixed:
        size = rng.randint(1, 7)
        policy.accumulate(mixed[:size])
        mixed = mixed[size:]


def stepped_updates(policy: TorchPolicy, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Update], StepStats]:
    """Takes a step; returns its updates."""
    critic = policy._critic
    updates: list[Update] = []
    trained = [
        (policy.model, policy._optimizer),
        *([(critic.model, critic._optimizer)] if critic else []),
    ]
    for model, optimizer in trained:

        def noted(model: torch.nn.Module = model) -> None:
            first = model is trained[-1][0]  # the critic steps before the policy
            if first:
                updates.append(Update([], [[p.detach().clone() for p in m.parameters()] for m, _ in trained]))
            gradient = [p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]
            updates[-1].gradients.insert(0, torch.cat(gradient))
            for parameter in model.parameters():
                if parameter.grad is not None:  # about Adam's first step; its moments are in single precision
                    parameter.data -= 0.01 * parameter.grad.sign()

        monkeypatch.setattr(optimizer, "step", noted)
    stats = policy.optimizer_step()
    return updates, stats
