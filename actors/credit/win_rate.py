"""The share of the other answers that an answer beats."""

from collections.abc import Sequence
from typing import ClassVar

from .estimator import Estimator, Vector


class WinRate(Estimator):
    """``A_i = mean over j of P(i beats j) - 1/2``, over the other rewards of the group: 1 for a greater reward, 0.5 for
    an equal one, 0 for a less one (MNPO, Wu et al., arXiv 2509.23102, eq. 8: the expected win against other players).

    Only the order of the rewards counts. The advantages of a group add up to 0.
    """

    compares: ClassVar[bool] = True
    vectors: ClassVar[tuple[Vector, ...]] = (
        Vector((1.0, 0.0, 1.0, 0.0), (1 / 3, -1 / 3, 1 / 3, -1 / 3)),
        Vector((5.0, 1.0, 0.0), (0.5, 0.0, -0.5)),
        Vector((0.0, 0.25), (-0.5, 0.5)),
    )

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        opponents = len(rewards) - 1
        wins = [
            sum(0.5 * ((reward > rival) + (reward >= rival)) for rival in rewards) - 0.5 for reward in rewards
        ]
        return [win / opponents - 0.5 for win in wins]
