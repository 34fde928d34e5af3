"""Queries whose rewards are expected to differ most within their group: VADE (Hu et al., arXiv 2511.18902).

A group with equal rewards has no advantage, so that it teaches nothing. The variance of a reward is ``p (1 - p)`` if a
trajectory solves the query with probability ``p``. The paper's three parts are here:

estimation   a Beta distribution of ``p`` for each query, from its groups      ``Belief``
choice       Thompson sampling: each query draws its ``p``, and the one with
             the greatest information gain is given                           ``VarianceRule``
decay        of two scales, since the policy changes                          ``decay`` and ``drift`` of ``PoolOptions``

The public text that was found has these parts in words. Assumed: the information gain of a trajectory is ``p (1 - p)``,
the prior is uniform, one scale of the decay is a query's own groups and the other the steps of the run.
"""

from collections.abc import Sequence
from random import Random
from typing import Literal

from .belief import Belief
from .query_pool import PoolOptions, Rule


class VarianceRule(Rule):
    """The greatest ``p (1 - p)`` of one draw of ``p`` for each candidate."""

    def choose(self, beliefs: Sequence[Belief], random: Random) -> int:
        chances = [belief.draw(random) for belief in beliefs]
        return max(range(len(chances)), key=lambda number: chances[number] * (1.0 - chances[number]))

    def value(self, belief: Belief) -> float:
        """The expected ``p (1 - p)``: of Beta(a, b) it is ``a b / ((a + b) (a + b + 1))``."""
        solved, failed = 1.0 + belief.solved, 1.0 + belief.failed
        return solved * failed / ((solved + failed) * (solved + failed + 1.0))


class VarianceConfig(PoolOptions):
    """Queries of which about half of the trajectories succeed, by Thompson sampling."""

    name: Literal["variance"] = "variance"

    def rule(self) -> Rule:
        return VarianceRule()
