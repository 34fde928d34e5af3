"""The clipped surrogate of whole sequences."""

import torch
from torch import Tensor

from ..loss import TokenLosses, by_token, sequence_sums
from ..loss_inputs import LossInputs
from .clipped import clipped_loss


def clipped_sequence_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    lengths: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLosses:
    """GSPO: the clipped surrogate of whole sequences (Zheng et al., arXiv 2507.18071, eq. 5 to 7).

    ``L_i = -min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)`` with the ratio's geometric mean per token
    ``s_i = exp(mean_t(logprob_t - old_logprob_t))``. Every token of sequence i carries ``L_i``, so that their mean,
    the aggregation ``sequence_mean``, is ``L_i`` itself. ``advantages`` ``[N]`` are equal within a sequence.
    """
    log_ratio = logprobs - old_logprobs.to(logprobs.dtype)
    mean = sequence_sums(log_ratio, lengths) / lengths
    # ``clipped_loss`` of one log-ratio per sequence, against 0: the same minimum and the same gradient rules.
    starts = lengths.cumsum(0) - lengths
    losses = clipped_loss(
        mean, torch.zeros_like(mean), advantages[starts], clip_low=clip_low, clip_high=clip_high
    )
    return TokenLosses(*(by_token(by_sequence, lengths, len(logprobs)) for by_sequence in losses))


def token_loss(inputs: LossInputs) -> TokenLosses:
    """``clipped_sequence_loss`` with the range of the settings."""
    return clipped_sequence_loss(
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        inputs.lengths,
        clip_low=inputs.clip_low,
        clip_high=inputs.clip_high,
    )
