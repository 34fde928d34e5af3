"""PPO's clip with a range for each token, wider where the policy was unsure: ECHO."""

import torch
from torch import Tensor

from ..loss import TokenLosses, bounded_ratio, by_token
from ..loss_inputs import LossInputs


def confidence_clipped_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    lengths: Tensor,
    *,
    least: float,
    greatest: float,
    kappa: float,
    tail: int,
) -> TokenLosses:
    """ECHO's confidence-adaptive clip (Zhao et al., arXiv 2602.02150, the clip of its policy update).

    ``-min(r_t A_t, clip(r_t, 1 - eps_t, 1 + eps_t) A_t)`` with
    ``eps_t = least + (greatest - least) sigmoid(kappa (1 - c_t))``, where ``c_t`` is the tail confidence: the mean
    confidence of the sequence's last ``tail`` tokens up to t.

    Assumed: the confidence of a token is its probability under the old policy. The paper's is the mean mass of the
    greatest k probabilities, for which the trainer would need the whole distribution of the engine. Inputs ``[N]``,
    ``lengths`` ``[R]``; gradients flow through ``logprobs`` alone.
    """
    advantages = advantages.to(logprobs.dtype)
    ratio = bounded_ratio(logprobs, old_logprobs)
    with torch.no_grad():
        confidence = tail_means(old_logprobs.to(logprobs.dtype).exp(), lengths, tail)
        bound = least + (greatest - least) * torch.sigmoid(kappa * (1.0 - confidence))
    free = ratio * advantages
    clipped = ratio.clamp(1.0 - bound, 1.0 + bound) * advantages
    return TokenLosses(-torch.minimum(free, clipped), clipped < free, ratio.detach())


def tail_means(values: Tensor, lengths: Tensor, tail: int) -> Tensor:
    """The mean of each token's value and of those before it in its sequence, ``tail`` in all at most: ``[N]``."""
    starts = by_token(lengths.cumsum(0) - lengths, lengths, len(values))
    ends = torch.arange(1, len(values) + 1, device=values.device)
    begins = torch.maximum(starts, ends - tail)
    # In float64: a difference of running sums over a long batch would lose the digits of a float32.
    sums = torch.nn.functional.pad(values.double().cumsum(0), (1, 0))
    return ((sums[ends] - sums[begins]) / (ends - begins)).to(values.dtype)


def token_loss(inputs: LossInputs) -> TokenLosses:
    """``confidence_clipped_loss`` with the options of the settings."""
    options = inputs.options
    return confidence_clipped_loss(
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        inputs.lengths,
        least=options["least"],
        greatest=options["greatest"],
        kappa=options["kappa"],
        tail=max(1, int(options["tail"])),
    )
