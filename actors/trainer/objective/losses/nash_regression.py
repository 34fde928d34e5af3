"""A regression of the log-ratio to the opponents on the win rate against them: MNPO."""

import torch
from torch import Tensor

from ..loss import TokenLosses, bounded_ratio, by_token, sequence_sums
from ..loss_inputs import LossInputs


def nash_regression_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, lengths: Tensor, *, eta: float
) -> TokenLosses:
    """``eta / 2 (h - A / eta)^2`` for each sequence, spread evenly over its tokens, with ``h`` the sum over the
    sequence of ``logprob - old_logprob`` (Multiplayer Nash Preference Optimization, Wu et al., arXiv 2509.23102, eq. 13
    to 16).

    The paper regresses, for each pair of answers, the difference of their ``h`` on ``1 / (2 eta)``, the difference of
    their win rates over ``eta``. Written out, all pairs of a group are the squares of ``h - A / eta`` less their mean;
    here the mean is left out: its gradient is 0 in expectation, and a loss sees one sequence at a time. Assumed: the
    opponents' geometric mean is the old policy, which is that of n - 1 players equal to it; opponents of a pool count
    by the games that the rewards come from. The gradient is ``(eta h - A)`` times that of the log-probability: at the
    old policy the plain one of the win rate.

    ``lengths`` ``[R]``, all others ``[N]``; gradients flow through ``logprobs`` alone. Nothing is held back.
    """
    counts = lengths.to(logprobs.dtype)
    ratios = sequence_sums(logprobs - old_logprobs.to(logprobs.dtype), lengths)
    targets = sequence_sums(advantages.to(logprobs.dtype), lengths) / counts / eta
    values = by_token(0.5 * eta * (ratios - targets).square() / counts, lengths, len(logprobs))
    held_back = torch.zeros_like(logprobs, dtype=torch.bool)
    return TokenLosses(values, held_back, bounded_ratio(logprobs, old_logprobs).detach())


def token_loss(inputs: LossInputs) -> TokenLosses:
    """``nash_regression_loss`` with the options of the settings."""
    return nash_regression_loss(
        inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.lengths, eta=inputs.options["eta"]
    )
