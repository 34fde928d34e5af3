"""Group-local advantages: a sample's own reward and its group's rewards are all they need.

That is what lets training start the moment a group closes, without waiting for the rest of the step.
"""

import math

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
    the last bit. A group of one, or of equal rewards, teaches nothing: exactly 0.0.

    Raises ``ValueError`` when ``reward`` is not among ``group_rewards`` or one of them is not finite.
    """
    if reward not in group_rewards:
        raise ValueError(f"reward {reward!r} is not among its group's rewards {group_rewards!r}")
    if not all(map(math.isfinite, group_rewards)):
        raise ValueError(f"a reward is not finite: {group_rewards!r}")
    if min(group_rewards) == max(group_rewards):
        return 0.0
    mean = math.fsum(group_rewards) / len(group_rewards)
    centred = reward - mean
    if not scale:
        return centred
    variance = math.fsum((other - mean) ** 2 for other in group_rewards) / (len(group_rewards) - 1)
    return centred / (math.sqrt(variance) + STD_EPSILON)
