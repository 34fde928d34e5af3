"""PPO's use of a critic's values: advantages, the critic's targets and loss, and its explained variance.

A sample, one turn, is an episode of its own: its reward comes with its last token, and the value after that is 0.
``[N]`` are the completion tokens of ``R`` sequences, one after the other; ``lengths`` ``[R]`` (int64, each at least 1).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .loss import by_token


def token_rewards(rewards: Tensor, penalties: Tensor, lengths: Tensor) -> Tensor:
    """``-penalties_t``, and with a sequence's last token its reward (InstructGPT, Ouyang et al., arXiv 2203.02155,
    eq. 2 token by token, with ``penalties = beta KL``).

    ``rewards`` ``[R]``, ``penalties`` ``[N]``. Returns ``[N]`` in the dtype of ``penalties``.
    """
    return (-penalties).index_add(0, lengths.cumsum(0) - 1, rewards.to(penalties.dtype))


def generalized_advantages(
    rewards: Tensor, values: Tensor, lengths: Tensor, longest: int, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438, eq. 16), sequence by sequence.

    ``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``; after a sequence's last token
    both ``V`` and ``A`` are 0. ``rewards`` (``token_rewards``) and ``values`` are ``[N]``; ``longest`` is the
    greatest of ``lengths``. Returns ``(advantages, returns)``, both ``[N]``; the returns ``A_t + V_t`` are the critic's
    targets. ``gamma`` 1 and ``lam`` 0.95 are InstructGPT's (Ouyang et al., arXiv 2203.02155, appendix C.4).
    """
    starts = lengths.cumsum(0) - lengths
    columns = torch.arange(longest, device=lengths.device)
    sources = (starts.unsqueeze(1) + columns).clamp_(max=len(values) - 1)
    is_padding = columns >= lengths.unsqueeze(1)
    value, reward = (of_tokens[sources].masked_fill(is_padding, 0.0) for of_tokens in (values, rewards))
    sums = reward + gamma * _shift(value, 1) - value
    # Every round doubles the tokens ahead that a sum reaches: log2(longest) rounds instead of one per token. The
    # padding is 0, so a sequence's sums are the same bits at any padding.
    reach, decay = 1, gamma * lam
    while reach < sums.shape[1]:
        sums = sums + decay * _shift(sums, reach)
        reach, decay = 2 * reach, decay * decay
    # By numbers, not by a mask: torch would wait for the device to count the mask.
    rows = by_token(torch.arange(len(lengths), device=lengths.device), lengths, len(values))
    advantages = sums[rows, torch.arange(len(values), device=lengths.device) - starts[rows]]
    return advantages, advantages + values


def value_loss(values: Tensor, returns: Tensor) -> Tensor:
    """The critic's loss per token, ``(V_t - R_t)^2 / 2`` (PPO, Schulman et al., arXiv 1707.06347, eq. 9), ``[N]``: to
    be summed and divided by the step's tokens. Gradients flow through ``values`` only.

    There is no clip around older values as in PPO's code: a sample is trained once, so these are the values themselves,
    and the clip would never hold.
    """
    return (values - returns.detach()).square() / 2


def value_sums(values: Tensor, returns: Tensor) -> Tensor:
    """``[4]`` float64, to be added up over a step: ``sum R``, ``sum R^2``, ``sum (R - V)``, ``sum (R - V)^2``."""
    targets = returns.detach().double()
    errors = targets - values.detach().double()
    return torch.stack([targets.sum(), targets.square().sum(), errors.sum(), errors.square().sum()])


def explained_variance(tokens: int, sums: Tensor | Sequence[float]) -> float | None:
    """``1 - var(R - V) / var(R)`` over ``tokens`` tokens from their ``value_sums``: 1 is a perfect critic, 0 is as
    good as a constant, and less is worse. None if all returns are equal."""
    target, target_square, error, error_square = (float(total) / max(1, tokens) for total in sums)
    variance = target_square - target**2
    if variance <= 1e-12 * target_square:  # equal returns, but for rounding
        return None
    return 1.0 - (error_square - error**2) / variance


def _shift(values: Tensor, by: int) -> Tensor:
    """``[R, T]``: the values ``by`` tokens later, 0 after the end."""
    return pad(values, (0, by))[:, by:]
