"""Advantages from a sample's reward and its group's rewards, and advantages that need the whole step.

The group-local ones let training start the moment a group closes, before the rest of the step is there.
"""

import math

import torch
from torch import Tensor

WHITEN_EPSILON = 1e-8
"""Lower bound of the variance in the normalisation, as in OpenRLHF, the code of REINFORCE++'s authors."""

STD_EPSILON = 1e-4
"""Added to the standard deviation, as TRL's ``GRPOTrainer`` does. It also keeps rewards that differ only by
rounding (a standard deviation around 1e-17) from being blown up to full-sized advantages."""


def group_advantage(reward: float, group_rewards: tuple[float, ...], *, scale: bool) -> float:
    """The advantage of one sample within its group.

    ``A = r - mean(R)``, and with ``scale`` ``A = (r - mean(R)) / (std(R) + 1e-4)`` (GRPO, Shao et al.,
    arXiv 2402.03300, section 4.1.2; without scaling Dr.GRPO, Liu et al., arXiv 2503.20783). The paper does
    not say which standard deviation; this is the *sample* one (divisor ``n - 1``), as in ``torch.std`` and
    therefore in TRL, verl and OpenRLHF, so that learning rates carry over.

    ``group_rewards`` holds the rewards of the group, ``reward`` among them; their order does not matter, to
    the last bit. A group of one, or of equal rewards, has no signal: exactly 0.0.

    Raises ``ValueError`` if ``reward`` is not among ``group_rewards`` or one of them is not finite.
    """
    _check_group(reward, group_rewards)
    if min(group_rewards) == max(group_rewards):
        return 0.0
    mean = math.fsum(group_rewards) / len(group_rewards)
    centred = reward - mean
    if not scale:
        return centred
    variance = math.fsum((other - mean) ** 2 for other in group_rewards) / (len(group_rewards) - 1)
    return centred / (math.sqrt(variance) + STD_EPSILON)


def leave_one_out_advantage(reward: float, group_rewards: tuple[float, ...]) -> float:
    """RLOO: ``r_i`` minus the mean of the *other* rewards of its group (Ahmadian et al., arXiv 2402.14740, eq. 8).

    That is ``(r_i - mean(R)) n / (n - 1)``. A group of one has no others: exactly 0.0, as for equal rewards.
    Raises as ``group_advantage`` does.
    """
    _check_group(reward, group_rewards)
    if min(group_rewards) == max(group_rewards):
        return 0.0
    return (len(group_rewards) * reward - math.fsum(group_rewards)) / (len(group_rewards) - 1)


def _check_group(reward: float, group_rewards: tuple[float, ...]) -> None:
    if reward not in group_rewards:
        raise ValueError(f"reward {reward!r} is not among its group's rewards {group_rewards!r}")
    if not all(map(math.isfinite, group_rewards)):
        raise ValueError(f"a reward is not finite: {group_rewards!r}")


# --------------------------------------------------------------------------- over the tokens of a whole step


def rewards_to_go(rewards: Tensor, token_rewards: Tensor, lengths: Tensor) -> Tensor:
    """``r_i + sum over u >= t of token_rewards_{i,u}``, for every token t of every sequence i.

    The advantage of REINFORCE++ before normalisation, with ``token_rewards = -beta KL_t`` (Hu et al., arXiv
    2501.03262, section 3.1). ``rewards`` ``[R]`` of the sequences, ``token_rewards`` ``[N]``, ``lengths`` ``[R]``.
    Returns ``[N]``.
    """
    # The rest of a sequence: its total, less the sum before the token.
    running = token_rewards.cumsum(0)
    ends = running[lengths.cumsum(0) - 1]
    return (rewards + ends).repeat_interleave(lengths) - running + token_rewards


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
    others = (total(groups) - mine) / (sizes - 1).clamp(min=1)
    return torch.where(sizes > 1, mine - others, torch.zeros_like(mine))


def whitened(advantages: Tensor) -> Tensor:
    """Zero mean and unit variance over all tokens: ``(A - mean(A)) / sqrt(var(A))`` (REINFORCE++, Hu et al., arXiv
    2501.03262, section 3.1). The variance is the population's and at least ``WHITEN_EPSILON``.

    ``advantages`` ``[N]``, N at least 1, in float64, in which the order of summation does not show. Returns ``[N]``;
    exactly 0 if all are equal.
    """
    if advantages.min() == advantages.max():
        return torch.zeros_like(advantages)
    centred = advantages - advantages.mean()
    return centred / centred.square().mean().clamp(min=WHITEN_EPSILON).sqrt()
