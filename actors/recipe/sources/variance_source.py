"""Queries whose rewards are expected to differ most within their group: VADE (Hu et al., arXiv 2511.18902).

A group with equal rewards has no advantage, so that it teaches nothing. The variance of a reward is ``p (1 - p)`` if a
trajectory solves the query with probability ``p``. The paper's three parts are here:

estimation   a Beta distribution of ``p`` for each query, from its groups      ``Belief``
choice       the query with the greatest information gain is given            ``VarianceRule``
decay        of two scales, since the policy changes                          ``decay`` and ``drift`` of ``PoolOptions``

The public text that was found has these parts in words. Assumed: the information gain of a trajectory is ``p (1 - p)``,
one scale of the decay is a query's own groups and the other the steps of the run.

Two things are not the paper's. It chooses by Thompson sampling: each query draws its ``p``. Here the expectation of
``p (1 - p)`` decides: of hundreds of queries some that are always or never solved draw a ``p`` near 0.5 at each choice,
and would be given in place of those that are known to teach. And the prior is not uniform but Jeffreys', which is more
probable near 0 and 1, as queries are: one group without a success says more.
"""

from collections.abc import Sequence
from random import Random
from typing import Final, Literal

from .belief import Belief
from .query_pool import PoolOptions, Rule

_PRIOR: Final = 0.5
"""Both parameters of Jeffreys' prior."""


class VarianceRule(Rule):
    """The greatest expected ``p (1 - p)``; equal ones, as of all queries without a group, by chance."""

    def choose(self, beliefs: Sequence[Belief], random: Random) -> int:
        gains = [(self.value(belief), random.random()) for belief in beliefs]
        return max(range(len(gains)), key=gains.__getitem__)

    def value(self, belief: Belief) -> float:
        """The expected ``p (1 - p)``: of Beta(a, b) it is ``a b / ((a + b) (a + b + 1))``."""
        solved, failed = _PRIOR + belief.solved, _PRIOR + belief.failed
        return solved * failed / ((solved + failed) * (solved + failed + 1.0))


class VarianceConfig(PoolOptions):
    """Queries of which about half of the trajectories are expected to succeed."""

    name: Literal["variance"] = "variance"

    def rule(self) -> Rule:
        return VarianceRule()
