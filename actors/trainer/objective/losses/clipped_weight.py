"""REINFORCE with a clipped importance weight."""

from torch import Tensor

from ..loss import TokenLosses, bounded_ratio
from ..loss_inputs import LossInputs


def clipped_weight_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> TokenLosses:
    """CISPO: REINFORCE with a clipped importance weight (MiniMax, arXiv 2506.13585, eq. 4 and 5).

    ``-sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t logprob_t``: the clip bounds a token's weight and never takes
    its gradient away. With ``clip_low`` 1 there is no lower bound, as in the paper's runs. Inputs ``[N]``.
    """
    ratio = bounded_ratio(logprobs, old_logprobs).detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLosses(-weight * advantages.to(logprobs.dtype) * logprobs, weight != ratio, ratio)


def token_loss(inputs: LossInputs) -> TokenLosses:
    """``clipped_weight_loss`` with the range of the settings."""
    return clipped_weight_loss(
        inputs.logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        clip_low=inputs.clip_low,
        clip_high=inputs.clip_high,
    )
