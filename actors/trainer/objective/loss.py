"""The policy-gradient losses as pure tensor functions.

Every loss ends in a sum over completion tokens, never a mean: the mean's denominator is the count of the whole
optimizer step's tokens (or sequences), which is unknown at the first backward. The step divides once, so the gradient
does not depend on the split into micro-batches.

``[N]`` are the completion tokens of ``R`` sequences, one sequence after the other; ``lengths`` ``[R]`` (int64, each at
least 1) are theirs.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...credit.algorithms import Aggregation
from ...truncated_scores import Truncations

LOG_RATIO_BOUND = 20.0
"""Log-ratios are bounded to ±20, as in verl: a ratio of infinity times a gradient of zero would be NaN."""


_NO_PROBABILITY = -1000.0
"""A logarithm of which the exponential is 0 in float64, and so in float32."""


class TokenLosses(NamedTuple):
    """``values`` ``[N]``: to be minimised, with a gradient. ``held_back`` ``[N]`` bool: tokens that the clip holds
    back, or whose weight it bounds. ``ratio`` ``[N]``: before the clip, without gradient."""

    values: Tensor
    held_back: Tensor
    ratio: Tensor


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float | Tensor = 1.0, truncations: Truncations | None = None
) -> Tensor:
    """The log-probability of each token under ``softmax(logits / temperature)``.

    ``log p(t) = z_t - logsumexp(z)`` with ``z = logits / temperature``: an inference engine reports the same
    as *processed* log-probabilities, so that the two sides' ratio is 1 on-policy at any temperature. With a truncation
    the softmax is over the tokens that it leaves, and over ``tokens``, which were drawn: DeepSeek-V3.2 (arXiv
    2512.02556, section 3.1, "keep sampling mask") keeps them with the sample, here they are computed again.

    ``logits``: ``[N, V]``, any floating dtype, computed with in float32 at least. ``tokens``: ``[N]`` int64.
    ``temperature``: one for all tokens, or ``[N]``, one for each. ``truncations``: of N distributions; its ``unsure``
    is written.
    Returns ``[N]``, float32 (float64 for float64 logits).
    """
    scores = _scores(logits, tokens, temperature, truncations)
    # Not log_softmax: it would make another [N, V], of which one number in each row is needed.
    chosen = scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - scores.logsumexp(-1)


def token_logprobs_and_entropies(
    logits: Tensor, tokens: Tensor, temperature: float | Tensor = 1.0, truncations: Truncations | None = None
) -> Tensor:
    """``token_logprobs``, and the entropy of the very distribution that each is of: ``[N, 2]``, with gradient.

    ``H = -sum p log p`` over the whole vocabulary, or over the tokens that a truncation leaves. See ``token_logprobs``
    for the arguments.
    """
    figures: Tensor = _LogprobsAndEntropies.apply(_scores(logits, tokens, temperature, truncations), tokens)  # type: ignore[no-untyped-call]
    return figures


def _scores(
    logits: Tensor, tokens: Tensor, temperature: float | Tensor, truncations: Truncations | None
) -> Tensor:
    """``[N, V]``, at least float32: minus infinity for the tokens that a truncation takes away."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if isinstance(temperature, Tensor):
        scores = scores / temperature.to(scores.dtype).unsqueeze(-1)
    elif temperature != 1.0:  # the division copies [N, V]
        scores = scores / temperature
    return scores if truncations is None else truncations.masked_but(scores, tokens)


class _LogprobsAndEntropies(torch.autograd.Function):
    """Maps scores ``[N, V]`` and the drawn tokens ``[N]`` to ``[N, 2]``.

    The backward is written out because autograd would keep the probabilities and their logarithms beside the scores,
    and make four more tensors of ``[N, V]``. The gradients by the scores are ``1(drawn) - p`` and ``-p (log p + H)``.
    Here both are made in one tensor, beside one of probabilities: no more than ``token_logprobs`` takes.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, tokens: Tensor) -> Tensor:
        normalisers = scores.logsumexp(-1, keepdim=True)
        drawn = scores.gather(-1, tokens.unsqueeze(-1)) - normalisers
        logarithms = _logarithms(scores, normalisers)
        entropies = -logarithms.exp().mul_(logarithms).sum(-1, keepdim=True)
        ctx.save_for_backward(scores, tokens, normalisers, entropies)
        return torch.cat([drawn, entropies], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        scores, tokens, normalisers, entropies = ctx.saved_tensors
        of_logprob, of_entropy = gradients[0].unsqueeze(-1).unbind(1)
        by_score = _logarithms(scores, normalisers)
        probabilities = by_score.exp()
        by_score.add_(entropies).mul_(of_entropy).add_(of_logprob).mul_(probabilities).neg_()
        return by_score.scatter_add_(-1, tokens.unsqueeze(-1), of_logprob), None


def _logarithms(scores: Tensor, normalisers: Tensor) -> Tensor:
    """``log p`` ``[N, V]``, finite also for p = 0: the products with p are 0 then, and not 0 times infinity."""
    return (scores - normalisers).clamp_(min=_NO_PROBABILITY)


def bounded_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """``exp(logprobs - old_logprobs)``, between ``exp(-20)`` and ``exp(20)``."""
    return torch.exp((logprobs - old_logprobs.to(logprobs.dtype)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


# --------------------------------------------------------------------------- sums and their denominators


def sequence_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of ``values`` ``[N]`` over each sequence: ``[R]``."""
    # Unsafe: the check of the lengths would wait for the device.
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


def by_token(values: Tensor, lengths: Tensor, tokens: int) -> Tensor:
    """``values`` ``[R]`` of the sequences, for each of their ``tokens`` tokens: ``[N]``."""
    # With the size of the result: torch would wait for the device to learn it.
    return values.repeat_interleave(lengths, output_size=tokens)


def sum_tokens(values: Tensor, lengths: Tensor, aggregation: Aggregation) -> Tensor:
    """The sum that ``denominator`` divides at the end of the step: a scalar.

    ``sequence_mean`` weighs a token by 1 / its sequence's length (GRPO, arXiv 2402.03300, eq. 3); all others by 1.
    """
    # Here and not by the denominator: the length is each sequence's own, and known at the first backward.
    if aggregation == "sequence_mean":
        values = values / by_token(lengths.to(values.dtype), lengths, len(values))
    return values.sum()


def denominator(aggregation: Aggregation, *, tokens: int, sequences: int, constant: int | None) -> int:
    """The divisor of the step's summed gradient, at least 1.

    ``token_mean``: all completion tokens of the step (DAPO, arXiv 2503.14476, eq. 8, over the step rather than
    within each group). ``sequence_mean`` and ``sequence_sum``: its sequences (the second is that of RLOO, arXiv
    2402.14740, eq. 5). ``constant``: its sequences times ``constant`` tokens, the most that a completion may have
    (Dr.GRPO, arXiv 2503.20783, section 3.2).

    Raises ``ValueError`` for ``constant`` without a constant.
    """
    if aggregation == "token_mean":
        return max(1, tokens)
    if aggregation != "constant":
        return max(1, sequences)
    if constant is None:
        raise ValueError("aggregation constant: there is no constant_length")
    return max(1, sequences * constant)
