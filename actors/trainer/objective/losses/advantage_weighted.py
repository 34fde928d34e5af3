"""Imitation of the policy's own answers, weighted by their advantages."""

import torch
from torch import Tensor

from ..loss import TokenLosses
from ..loss_inputs import LossInputs


def advantage_weighted_loss(
    logprobs: Tensor, advantages: Tensor, *, temperature: float, most: float
) -> TokenLosses:
    """``-min(exp(A_t / temperature), most) logprob_t`` (advantage-weighted regression, Peng et al., arXiv 1910.00177;
    the weight of HABC, Fang et al., arXiv 2606.17043). Every token is made more probable, those of good answers more.
    Inputs ``[N]``."""
    weights = torch.exp(advantages.to(logprobs.dtype) / temperature)
    bounded = weights > most
    return TokenLosses(-weights.clamp(max=most) * logprobs, bounded, torch.ones_like(weights))


def token_loss(inputs: LossInputs) -> TokenLosses:
    """``advantage_weighted_loss`` with the options of the settings."""
    options = inputs.options
    return advantage_weighted_loss(
        inputs.logprobs, inputs.advantages, temperature=options["temperature"], most=options["most"]
    )
