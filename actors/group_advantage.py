"""Group-local advantages: from a sample's reward and its group's rewards alone.

They let training start the moment a group closes, before the rest of the step is there. The trainer computes them, and
rollout workers for the record of a trajectory.
"""

import math
from functools import lru_cache
from typing import Literal

AdvantageRule = Literal["centred", "scaled", "leave_one_out"]
"""``group_advantage`` without and with ``scale``, or ``leave_one_out_advantage``."""

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


@lru_cache(maxsize=1024)
def advantage_by(rule: AdvantageRule, reward: float, group_rewards: tuple[float, ...]) -> float:
    """The advantage by ``rule``. Raises as ``group_advantage`` does."""
    if rule == "leave_one_out":
        return leave_one_out_advantage(reward, group_rewards)
    return group_advantage(reward, group_rewards, scale=rule == "scaled")
