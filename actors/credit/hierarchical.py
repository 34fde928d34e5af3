"""First to succeed, then to succeed well."""

import math
from collections.abc import Sequence
from typing import ClassVar, Final

from .estimator import Estimator, Vector

_LIKELY: Final = 0.5
_WIDTH: Final = 0.1


class Hierarchical(Estimator):
    """``A = (1 - g) A_viability + g A_efficiency`` (HABC, Fang et al., arXiv 2606.17043): success counts while it is
    uncertain, and efficiency once it is likely.

    A reward has both: its part up to 1 is the success ``v = min(r, 1)``, its part beyond 1 the efficiency
    ``e = r - v``. ``A_viability = v - mean(v)``; ``A_efficiency`` is ``e`` less the mean of ``e`` over the group's
    successes, and 0 for all other answers. The gate is ``g = sigmoid((p - 0.5) / 0.1)`` with ``p = mean(v)``, bounded
    to 0 and 1.

    Assumed: the paper has a critic for each of the two and a gate by state, where the group's means stand here; the
    gate's form and its two numbers. Interventions of people, which the paper leaves out of the outcome, do not occur.
    """

    compares: ClassVar[bool] = True
    vectors: ClassVar[tuple[Vector, ...]] = (
        Vector((0.0, 0.0, 1.0, 1.5), (-0.25, -0.25, 0.125, 0.375)),
        Vector((1.0, 1.5), (-0.24832678726892882, 0.24832678726892882)),
        Vector((0.0, 0.25), (-0.1221278287612468, 0.1221278287612468)),
    )

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        viabilities = [min(reward, 1.0) for reward in rewards]
        chance = math.fsum(viabilities) / len(viabilities)
        gate = 1.0 / (1.0 + math.exp((_LIKELY - min(1.0, max(0.0, chance))) / _WIDTH))
        bonuses = [reward - 1.0 for reward in rewards if reward >= 1.0]
        usual = math.fsum(bonuses) / len(bonuses) if bonuses else 0.0
        return [
            (1.0 - gate) * (viability - chance) + gate * (reward - 1.0 - usual if reward >= 1.0 else 0.0)
            for reward, viability in zip(rewards, viabilities, strict=True)
        ]
