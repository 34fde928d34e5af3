"""The base of estimators: from the rewards of a closed group to its advantages, by these rewards alone.

An estimator is one class in a file of its own beside this one, and a row of ``ALGORITHMS`` that names the class. The
package belongs to no role: rollout workers run the class when a group closes, and the other columns of its row are the
trainer's.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

STD_EPSILON: Final = 1e-4
"""Added to the standard deviation, as TRL's ``GRPOTrainer`` does. It also keeps rewards that differ only by
rounding (a standard deviation around 1e-17) from being blown up to full-sized advantages."""


class Vector(NamedTuple):
    """A test vector, worked out by hand from the paper: the rewards of a group, and their advantages."""

    rewards: tuple[float, ...]
    advantages: tuple[float, ...]
    scale: bool = False


@dataclass(frozen=True)
class Estimator(ABC):
    """Turns the rewards of a group into advantages. ``scale``: divide them by the group's standard deviation.

    ``compares``: an advantage is relative to the other rewards. Such an estimator needs more than one trajectory of a
    query, and equal rewards teach nothing: the filter ``equal_rewards`` may leave them out. ``vectors``: held against
    the class by a test.
    """

    compares: ClassVar[bool]
    vectors: ClassVar[tuple[Vector, ...]]

    scale: bool = False

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        """The advantage of each of ``rewards``, which are those that are compared with each other: at least one.

        If the estimator ``compares``, equal rewards and a single one have exactly 0.0. The order of the rewards does
        not matter, to the last bit. Raises ``ValueError`` if one of them is not finite.
        """
        if not all(map(math.isfinite, rewards)):
            raise ValueError(f"a reward is not finite: {[*rewards]!r}")
        if self.compares and min(rewards) == max(rewards):
            return [0.0] * len(rewards)
        advantages = self.advantages(rewards)
        if not self.scale:
            return advantages
        divisor = standard_deviation(rewards) + STD_EPSILON
        return [advantage / divisor for advantage in advantages]

    @abstractmethod
    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """The same before the division, for finite rewards; they are not all equal if the estimator ``compares``."""


def standard_deviation(rewards: Sequence[float]) -> float:
    """The *sample* standard deviation (divisor ``n - 1``) of the rewards; 0.0 of a single one.

    GRPO's paper does not say which; ``torch.std``, and therefore TRL, verl and OpenRLHF, take this one, so that
    learning rates carry over. ``math.fsum`` rounds once, so that the order of the rewards does not show.
    """
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1))
