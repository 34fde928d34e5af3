"""The formulas of ``transforms.py`` over the tokens of a whole step."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

WHITEN_EPSILON = 1e-8
"""Lower bound of the variance in the normalisation, as in OpenRLHF, the code of REINFORCE++'s authors."""


def rewards_to_go(rewards: Tensor, token_rewards: Tensor, lengths: Tensor) -> Tensor:
    """``r_{i,t} + sum over u >= t of token_rewards_{i,u}``, for every token t of every sequence i.

    The advantage of REINFORCE++ before normalisation, with ``token_rewards = -beta KL_t`` (Hu et al., arXiv
    2501.03262, section 3.1). ``rewards`` and ``token_rewards`` ``[N]``, ``lengths`` ``[R]``. Returns
    ``[N]``.
    """
    # The rest of a sequence: its total, less the sum before the token.
    running = token_rewards.cumsum(0)
    ends = running[lengths.cumsum(0) - 1]
    return rewards + ends.repeat_interleave(lengths) - running + token_rewards


def leave_one_out_penalties(penalties: Tensor, trajectories: Tensor, groups: Tensor, sizes: Tensor) -> Tensor:
    """``p_i`` of each sequence's trajectory minus the mean of the others' in its group; 0 for a group of one.

    With ``p_i = beta KL_i`` over all sequences of a trajectory, as its reward is that of all of them, this is the share
    of a KL in the reward in RLOO's advantage (arXiv 2402.14740, eq. 1 and 8): the leave-one-out baseline is linear.
    All are ``[R]``, by sequence: ``penalties``; ``trajectories`` and ``groups`` (int64, numbered from 0);
    ``sizes`` (int64), the trajectories of its group, also those without a sequence, whose penalty is 0. Returns
    ``[R]``.
    """

    def total(keys: Tensor) -> Tensor:
        return penalties.new_zeros(int(keys.max()) + 1).index_add(0, keys, penalties)[keys]

    mine = total(trajectories)
    # The others' mean is over the trajectories of the group, also those without a sequence here: hence not a count of
    # the keys.
    others_mean = (total(groups) - mine) / (sizes - 1).clamp(min=1)
    return torch.where(sizes > 1, mine - others_mean, torch.zeros_like(mine))


def number_keys(keys: Sequence[Hashable]) -> Tensor:
    """``[R]`` int64: equal keys have equal numbers, from 0 in the order of their first appearance."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])


def whiten(advantages: Tensor) -> Tensor:
    """Zero mean and unit variance over all tokens: ``(A - mean(A)) / sqrt(var(A))`` (REINFORCE++, Hu et al., arXiv
    2501.03262, section 3.1). The variance is the population's and at least ``WHITEN_EPSILON``.

    ``advantages`` ``[N]``, N at least 1, in float64, in which the order of summation does not show. Returns ``[N]``;
    exactly 0 if all are equal.
    """
    # Compared before the subtraction: its rounding would leave about 1e-17, which the division makes 1e-13 and not 0.
    if advantages.min() == advantages.max():
        return torch.zeros_like(advantages)
    centred = advantages - advantages.mean()
    return centred / centred.square().mean().clamp(min=WHITEN_EPSILON).sqrt()
