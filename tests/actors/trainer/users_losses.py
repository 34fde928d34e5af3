"""Losses as a user writes them: two that an algorithm has too, and mistakes."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexmarl.actors.recipe.named_function import named_function
from flexmarl.actors.trainer.objective.loss_inputs import LossInputs
from flexmarl.actors.trainer.objective.users_loss import UsersLoss

CLIPPED = f"{__name__}:clipped"
CLIPPED_SEQUENCE = f"{__name__}:clipped_sequence"
LEAVE_ONE_OUT = f"{__name__}:leave_one_out"


def clipped(inputs: LossInputs) -> Tensor:
    ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
    bounded = ratio.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    return -torch.minimum(ratio * inputs.advantages, bounded * inputs.advantages)


def clipped_sequence(inputs: LossInputs) -> Tensor:
    ratio = torch.exp(inputs.by_token(inputs.sums(inputs.logprobs - inputs.old_logprobs) / inputs.lengths))
    bounded = ratio.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    return -torch.minimum(ratio * inputs.advantages, bounded * inputs.advantages)


def leave_one_out(inputs: LossInputs) -> Tensor:
    """Finite for the samples of groups of two and more, and a column without a 0."""
    factors = inputs.by_token(inputs.group_sizes / (inputs.group_sizes - 1))
    return clipped(inputs) * factors / inputs.columns["spread"]


def total(inputs: LossInputs) -> Tensor:
    return clipped(inputs).sum()


def detached(inputs: LossInputs) -> Tensor:
    return clipped(inputs).detach()


def infinite(inputs: LossInputs) -> Tensor:
    return inputs.logprobs / 0.0


def steep(inputs: LossInputs) -> Tensor:
    return torch.sqrt(inputs.logprobs - inputs.logprobs.detach()) + inputs.logprobs


def whole_numbers(inputs: LossInputs) -> Tensor:
    return inputs.lengths.new_ones(len(inputs.logprobs))


def nothing(inputs: LossInputs) -> None:
    clipped(inputs)


def of_advantages(inputs: LossInputs) -> Tensor:
    return inputs.advantages.clone().requires_grad_()


def over_the_batch(inputs: LossInputs) -> Tensor:
    return clipped(inputs) / len(inputs.logprobs)


def failing(inputs: LossInputs) -> Any:
    return inputs.nowhere  # type: ignore[attr-defined]


async def waiting(inputs: LossInputs) -> Tensor:
    return clipped(inputs)


def users_loss(name: str) -> UsersLoss:
    return UsersLoss(name, named_function(Path(), name), repr)
