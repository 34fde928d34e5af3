"""The reward less the mean of its group."""

import math
from collections.abc import Sequence
from typing import ClassVar

from .estimator import Estimator, Vector


class GroupMean(Estimator):
    """``A = r - mean(R)``: Dr.GRPO (Liu et al., arXiv 2503.20783, section 3.2). With ``scale``
    ``A = (r - mean(R)) / (std(R) + 1e-4)``: GRPO (Shao et al., arXiv 2402.03300, section 4.1.2)."""

    compares: ClassVar[bool] = True
    vectors: ClassVar[tuple[Vector, ...]] = (
        Vector((1.0, 0.0, 1.0, 0.0), (0.5, -0.5, 0.5, -0.5)),
        Vector((0.0, 0.5, 2.5), (-1.0, -0.5, 1.5)),
        # deviations of 0.5: the sample standard deviation is sqrt(4 * 0.25 / 3)
        Vector((1.0, 0.0, 1.0, 0.0), (0.8658754297, -0.8658754297, 0.8658754297, -0.8658754297), scale=True),
        Vector((0.75,), (0.0,)),
        Vector((0.75, 0.75), (0.0, 0.0), scale=True),
    )

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        mean = math.fsum(rewards) / len(rewards)
        return [reward - mean for reward in rewards]
