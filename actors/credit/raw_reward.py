"""The reward itself."""

from collections.abc import Sequence
from typing import ClassVar

from .estimator import Estimator, Vector


class RawReward(Estimator):
    """``A = r``: REINFORCE without a baseline (Williams, Machine Learning 8, 1992, section 4).

    For algorithms whose trainer finds the baseline later: by a critic (PPO), a running mean of the agent (RAE), or the
    normalisation over the policy's step (REINFORCE++).
    """

    compares: ClassVar[bool] = False
    vectors: ClassVar[tuple[Vector, ...]] = (
        Vector((1.0, 0.0, -2.5), (1.0, 0.0, -2.5)),
        Vector((0.75, 0.75), (0.75, 0.75)),
    )

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return [*rewards]
