"""A policy without a model: a table of skills, which learns to solve queries of known difficulty."""

import math
from collections.abc import Mapping
from random import Random
from statistics import fmean
from typing import Final

QUERIES: Final = 256
SKILLS: Final = 16


class SkillTable:
    """The policy, and the difficulties of the queries."""

    def __init__(self, seed: int, least: float = -6.0, greatest: float = 6.0) -> None:
        """``least``, ``greatest``: bounds of the difficulties."""
        random = Random(f"{seed} difficulties")
        self._difficulty = [random.uniform(least, greatest) for _ in range(QUERIES)]
        self._skill = [0.0] * SKILLS
        self._own = [0.0] * QUERIES

    def chance(self, query: int) -> float:
        """The probability that a trajectory solves the query."""
        score = self._skill[query % SKILLS] + self._own[query] - self._difficulty[query]
        return 1.0 / (1.0 + math.exp(-score))

    @property
    def mean_chance(self) -> float:
        return fmean(map(self.chance, range(QUERIES)))

    def learn(self, slopes: Mapping[int, float]) -> None:
        """``slopes``: the gradient of the objective by the score of each query."""
        for query, slope in slopes.items():
            self._skill[query % SKILLS] += slope
            self._own[query] += slope
