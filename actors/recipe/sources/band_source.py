"""A curriculum by success: queries that are solved neither almost never nor almost always.

Queries whose expected chance lies within a band come in turn; as the policy learns, easy ones leave the band above, and
hard ones come into it from below. ``explore`` of the draws look at the others: first those that have had no group, then
those that have waited longest, whose estimates are the least certain.
"""

from collections.abc import Sequence
from random import Random
from typing import Literal

from pydantic import model_validator

from ...config_base import Share
from .belief import Belief
from .query_pool import PoolOptions, Rule


class BandRule(Rule):
    def __init__(self, low: float, high: float, explore: float) -> None:
        self._low, self._high, self._explore = low, high, explore

    def choose(self, beliefs: Sequence[Belief], random: Random) -> int:
        within = [number for number, belief in enumerate(beliefs) if self._is_within(belief)]
        outside = [number for number, belief in enumerate(beliefs) if not self._is_within(belief)]
        if within and (not outside or random.random() >= self._explore):
            return random.choice(within)
        # The evidence fades with the steps: the less is left of it, the longer it is ago.
        return min(outside, key=lambda number: (beliefs[number].groups > 0, _evidence(beliefs[number])))

    def value(self, belief: Belief) -> float:
        """0 within the band, and less the farther away from it. A query without a group may be within it."""
        if not belief.groups:
            return 0.0
        return -max(0.0, self._low - belief.mean, belief.mean - self._high)

    def _is_within(self, belief: Belief) -> bool:
        return belief.groups > 0 and self._low <= belief.mean <= self._high


def _evidence(belief: Belief) -> float:
    return belief.solved + belief.failed


class BandConfig(PoolOptions):
    """Queries within a band of success."""

    name: Literal["band"] = "band"
    low: Share = 0.2
    """Least expected share of the trajectories that solve a query of the band."""
    high: Share = 0.8
    """Greatest expected share."""
    explore: Share = 0.25
    """Share of the queries that are those without a group, or outside the band."""

    @model_validator(mode="after")
    def _band_is_not_empty(self) -> "BandConfig":
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be less than high={self.high}")
        return self

    def rule(self) -> Rule:
        return BandRule(self.low, self.high, self.explore)
