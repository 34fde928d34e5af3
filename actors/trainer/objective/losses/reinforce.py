"""REINFORCE, without a ratio to an older policy."""

import torch
from torch import Tensor

from ..loss import TokenLosses
from ..loss_inputs import LossInputs


def reinforce_loss(logprobs: Tensor, advantages: Tensor) -> TokenLosses:
    """``-A_t logprob_t`` (Williams, 1992; for whole sequences Ahmadian et al., arXiv 2402.14740, eq. 5 and 8)."""
    values = -advantages.to(logprobs.dtype) * logprobs
    return TokenLosses(values, torch.zeros_like(values, dtype=torch.bool), torch.ones_like(values))


def token_loss(inputs: LossInputs) -> TokenLosses:
    """``reinforce_loss``."""
    return reinforce_loss(inputs.logprobs, inputs.advantages)
