"""Estimators of the KL divergence of a policy from a reference policy, token by token."""

import torch
from torch import Tensor

from ...credit.algorithms import KlEstimator


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """``KL(policy || reference)`` from tokens that the policy drew, one estimate per token.

    With ``d = log policy - log reference`` of the drawn token (Schulman, "Approximating KL Divergence", 2020):
    ``k1 = d`` is unbiased and of either sign; ``k2 = d^2 / 2`` is biased, its gradient is not (Hu et al., arXiv
    2501.03262); ``k3 = exp(-d) - 1 + d`` is unbiased and never negative (GRPO, Shao et al., arXiv 2402.03300, eq. 4).
    As a term of the loss ``k1`` has an expected gradient of zero: it belongs in the reward.

    Both inputs are ``[N]``; the gradient flows through ``logprobs`` alone. Returns ``[N]`` in its dtype.
    ``d`` is bounded to ±20, so that one token that the reference excludes can't make a step infinite.
    """
    difference = (logprobs - reference_logprobs.detach().to(logprobs.dtype)).clamp(-20.0, 20.0)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    # expm1: for most tokens d is near 0, where exp(-d) - 1 + d is the difference of nearly equal numbers.
    return torch.expm1(-difference) + difference
