"""The reward less the mean of the other rewards of its group."""

import math
from collections.abc import Sequence
from typing import ClassVar

from .estimator import Estimator, Vector


class LeaveOneOut(Estimator):
    """RLOO: ``r_i`` less the mean of the *other* rewards of its group (Ahmadian et al., arXiv 2402.14740, eq. 8)."""

    compares: ClassVar[bool] = True
    vectors: ClassVar[tuple[Vector, ...]] = (
        Vector((1.0, 0.0), (1.0, -1.0)),
        Vector((1.0, 0.0, 2.0), (0.0, -1.5, 1.5)),
        Vector((0.75,), (0.0,)),
    )

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        # The same as ``(r_i - mean(R)) n / (n - 1)``, with one rounding less.
        size, total = len(rewards), math.fsum(rewards)
        return [(size * reward - total) / (size - 1) for reward in rewards]
