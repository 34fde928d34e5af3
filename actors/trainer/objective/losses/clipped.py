"""The clipped surrogate, token by token."""

import torch
from torch import Tensor

from ..loss import TokenLosses, bounded_ratio
from ..loss_inputs import LossInputs


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> TokenLosses:
    """The clipped surrogate of PPO with an asymmetric range.

    ``-min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)`` with ``r_t = exp(logprob_t - old_logprob_t)``
    (PPO, Schulman et al., arXiv 1707.06347, eq. 7; the asymmetric "clip-higher" range is DAPO's, Yu et al., arXiv
    2503.14476, eq. 8). The minimum is pessimistic: it only takes away the gradient that moves further, never the one
    that comes back. Inputs ``[N]``; gradients flow through ``logprobs`` only.
    """
    advantages = advantages.to(logprobs.dtype)
    ratio = bounded_ratio(logprobs, old_logprobs)
    free = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return TokenLosses(-torch.minimum(free, clipped), clipped < free, ratio.detach())


def token_loss(inputs: LossInputs) -> TokenLosses:
    """``clipped_loss`` with the range of the settings."""
    return clipped_loss(
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        clip_low=inputs.clip_low,
        clip_high=inputs.clip_high,
    )
