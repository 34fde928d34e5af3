"""A smooth gate in place of the clip, and no reward for answers that are good in their group alone: SA-GCPO."""

import torch
from torch import Tensor

from ..loss import TokenLosses, bounded_ratio, by_token
from ..loss_inputs import LossInputs

_HALF = 0.5
"""Share of a token's gradient below which it counts as held back."""


def soft_group_clipped_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    rewards: Tensor,
    lengths: Tensor,
    *,
    tau_positive: float,
    tau_negative: float,
    target: float,
) -> TokenLosses:
    """Soft adaptive group clip (OxygenREC, eq. 4 to 9; the gate is that of SAPO, Gao et al., arXiv 2511.20347).

    ``-(4 / tau) sigmoid(tau (r_t - 1)) A'``, with ``tau_positive`` for a positive advantage and ``tau_negative`` for
    another one: the gradient of a token is that of its ratio times ``4 p (1 - p)``, which is 1 at a ratio of 1 and
    falls on both sides. ``A'`` is the group's advantage, or 0 if it is positive though the reward is less than
    ``target``: an answer that is the best of a bad group is not made more probable.

    Assumed: ``target`` is one number for all queries. The paper's is the reward of the query's known right answer.
    ``rewards`` and ``lengths`` ``[R]``, all others ``[N]``; gradients flow through ``logprobs`` alone.
    """
    advantages = advantages.to(logprobs.dtype)
    is_low = by_token(rewards < target, lengths, len(logprobs))
    suppressed = (advantages > 0) & is_low
    advantages = advantages.masked_fill(suppressed, 0.0)
    tau = torch.where(advantages > 0, tau_positive, tau_negative).to(logprobs.dtype)
    ratio = bounded_ratio(logprobs, old_logprobs)
    gate = torch.sigmoid(tau * (ratio - 1.0))
    share = (4.0 * gate * (1.0 - gate)).detach()
    return TokenLosses(-(4.0 / tau) * gate * advantages, suppressed | (share < _HALF), ratio.detach())


def token_loss(inputs: LossInputs) -> TokenLosses:
    """``soft_group_clipped_loss`` with the options of the settings."""
    options = inputs.options
    return soft_group_clipped_loss(
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        inputs.rewards,
        inputs.lengths,
        tau_positive=options["tau_positive"],
        tau_negative=options["tau_negative"],
        target=options["target"],
    )
