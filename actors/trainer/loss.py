"""The policy-gradient loss as pure tensor functions.

Everything here is a sum over completion tokens, never a mean: the mean's denominator is the token count of
the whole optimizer step, which is unknown at the first backward. The step divides once, so the gradient does
not depend on how the step was cut into micro-batches.
"""

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """The log-probability of each token under ``softmax(logits / temperature)``.

    ``log p(t) = z_t - logsumexp(z)`` with ``z = logits / temperature``: what an inference engine reports
    as *processed* log-probabilities, so that the two sides' ratio is 1 on-policy at any temperature.

    ``logits``: ``[N, V]``, any floating dtype, computed with in float32 at least. ``tokens``: ``[N]`` int64.
    Returns ``[N]``, float32 (float64 for float64 logits).
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        scores = scores / temperature
    chosen = scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - scores.logsumexp(-1)


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of PPO with an asymmetric range, summed over tokens, and its diagnostics.

    ``loss = -sum_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)`` with
    ``r_t = exp(logprob_t - old_logprob_t)`` (PPO, Schulman et al., arXiv 1707.06347, eq. 7; the asymmetric
    "clip-higher" range is DAPO's, Yu et al., arXiv 2503.14476, eq. 8). The minimum is pessimistic: it only
    takes away the reason to move further, never the reason to come back.

    All three inputs are ``[N]``, one entry per completion token; gradients flow through ``logprobs`` only.

    Returns ``(loss, diagnostics)``: ``loss`` is a scalar with a gradient; ``diagnostics`` is ``[3]`` without
    one, sums over tokens in this order: the loss, tokens whose ratio the clip held back, ``|r - 1|``.
    """
    old_logprobs, advantages = old_logprobs.to(logprobs.dtype), advantages.to(logprobs.dtype)
    ratio = torch.exp(logprobs - old_logprobs)
    free = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -torch.minimum(free, clipped).sum()
    with torch.no_grad():
        held_back = (clipped < free).sum()
        diagnostics = torch.stack((loss.detach(), held_back.to(loss.dtype), (ratio - 1.0).abs().sum()))
    return loss, diagnostics
