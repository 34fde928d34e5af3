"""Weights for samples that were drawn from another distribution than the one the trainer computes.

They differ for two reasons: the engine's arithmetic is not the trainer's, and under ``async`` the engine's weights were
an older version. In both cases the trainer's log-probabilities at the start of the step are the *proximal* policy, the
reference of the surrogate's ratio, and the engine's are the *behaviour* policy, for which the weight corrects.
"""

import torch
from torch import Tensor

from ..trainer_config import Correction
from .loss import bounded_ratio


def correction_weights(
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    correction: Correction,
    *,
    low: float | None,
    high: float | None,
) -> tuple[Tensor, Tensor]:
    """The factor of each token's surrogate, and the tokens whose weight a bound holds back.

    With ``w = exp(proximal - behaviour)``:

    - ``tis``: ``min(w, high)``, truncated importance sampling (Espeholt et al., arXiv 1802.01561; between an
      engine and a trainer: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
      2025), ``high`` 2.
    - ``icepop``: ``w`` within ``[low, high]``, else 0: IcePop (Ling team, arXiv 2510.18855, the objective's ``M``),
      0.5 and 5.
    - ``decoupled``: ``w``, the factor of the decoupled PPO objective (Hilton et al., arXiv 2110.00641, section 3;
      AReaL, Fu et al., arXiv 2505.24298, eq. 5). Tokens above ``high`` are left out, as in AReaL's code; 5.
    - ``none``: 1.

    Both inputs are ``[N]``. Returns ``weights`` in the dtype of ``proximal_logprobs`` and ``bounded`` (bool), both
    ``[N]`` and without gradient. A token of weight 0 still counts in the step's denominator.
    """
    # A constant: it corrects the distribution of the samples, and its gradient would be added to the surrogate's.
    with torch.no_grad():
        weights = bounded_ratio(proximal_logprobs, behaviour_logprobs)
        bounded = torch.zeros_like(weights, dtype=torch.bool)
        if correction == "none":
            return torch.ones_like(weights), bounded
        if low is not None:
            bounded = weights < low
        if high is not None:
            bounded = bounded | (weights > high)
        if correction == "tis":
            return weights.clamp(max=high), bounded
        return weights.masked_fill(bounded, 0.0), bounded
