"""Policies with random weights that are drawn on their device: a CPU takes long for billions of them."""

import zlib

import torch
from torch import Tensor, nn

from flexmarl.actors.names import PolicyName
from flexmarl.actors.trainer.backends.torch_policy.torch_factory import TorchFactory
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.trainer_setup import PolicySetup

_DEVIATION = 0.02


def filled_policy(setup: PolicySetup) -> TorchPolicy:
    """A policy whose weights are as those of a new model of transformers, in another order of random numbers."""
    policy = TorchFactory(seed=0, total_steps=100).host(PolicyName("battery"), setup)
    fill(policy.model)
    return policy


def fill(model: nn.Module) -> None:
    """Draws the matrices; the norms get ones, and biases zeros."""
    for name, parameter in model.named_parameters():
        _fill(name, parameter)


@torch.no_grad()
def _fill(name: str, parameter: Tensor) -> None:
    if parameter.dim() > 1:
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        parameter.normal_(std=_DEVIATION, generator=generator)
    else:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
