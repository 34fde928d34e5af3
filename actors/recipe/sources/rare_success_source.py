"""Queries that are solved rarely come more often: after the data curation of DART (Li et al., arXiv 2509.23866).

The paper spends more on hard tasks, and adds recorded successes for those that the policy hardly ever solves. Here a
query is drawn with the weight

    (1 - p) ** power     if a trajectory has solved it lately, ``p`` the expected chance
    1                    if it has had no group
    unsolved             else

Assumed: the form of the weight. The paper's other parts are not a matter of the query: the number of trajectories is
the same for all queries here, and tokens are not chosen by their entropy.
"""

import math
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import Literal

from ...config_base import NonNegative, Share
from .belief import Belief
from .query_pool import PoolOptions, Rule

_LEAST_SOLVED = 0.05
"""A trajectory that solved the query counts as long as so much of its weight is left."""


class RareSuccessRule(Rule):
    def __init__(self, power: float, unsolved: float) -> None:
        self._power, self._unsolved = power, unsolved

    def choose(self, beliefs: Sequence[Belief], random: Random) -> int:
        sums = [*accumulate(map(self.value, beliefs))]
        if not sums[-1]:
            return random.randrange(len(beliefs))
        return min(bisect(sums, random.random() * sums[-1]), len(beliefs) - 1)

    def value(self, belief: Belief) -> float:
        """The weight of the draw."""
        if not belief.groups:
            return 1.0
        if belief.solved < _LEAST_SOLVED:
            return self._unsolved
        return math.pow(1.0 - belief.solved / (belief.solved + belief.failed), self._power)


class RareSuccessConfig(PoolOptions):
    """Queries that have been solved, but rarely."""

    name: Literal["rare_success"] = "rare_success"
    power: NonNegative = 1.0
    """Exponent of the weight of a query that has been solved: 1 less the share of its trajectories that solved it."""
    unsolved: Share = 0.1
    """Weight of a query that no trajectory has solved."""

    def rule(self) -> Rule:
        return RareSuccessRule(self.power, self.unsolved)
