"""Explorations of a query: cheap trajectories that choose those that are played again, and trained. Pure.

    count explorations, by explorers ──> rewards ──> the best and the worst of them ──> the same seeds at full precision

Sol-RL (Li et al., arXiv 2604.06916): many samples of a model in FP4, then the K/2 with the greatest and the K/2 with
the least rewards are generated once more in BF16 from the same noise, and these alone are trained. A trajectory's noise
is here the seeds of its turns, which its number and the run's seed decide: played again with its number it draws the
same random numbers, and its tokens are the same until a rounding of the weights decides one of them.
"""

from collections.abc import Mapping
from typing import Annotated

from ...config_base import Config, Count, Unit


class ExplorationsConfig(Config):
    """Trajectories that only choose which ones are played again and trained: see
    [Explorations](algorithms.md#explorations)."""

    count: Annotated[Count, Unit("trajectories")]
    """Explorations of a query, at least `training.trajectories_per_query`. Those with the best and the worst rewards
    are played again, `training.trajectories_per_query` in all."""
    skip_equal: bool = False
    """`true`: a query whose explorations all have the same reward is not played again: its group is dropped, and one
    of `rollout.replacement_queries` takes its place."""


def choose(rewards: Mapping[int, float], count: int, size: int) -> list[int]:
    """The numbers, in order, of the ``size`` of ``count`` explorations that are played again: the half with the
    greatest of ``rewards`` (of an odd number the larger one), and as many with the least; of equal ones the first.
    Explorations without a reward have failed, and are chosen only if there are too few others: then their failures are
    those of the group."""
    best = sorted(rewards, key=lambda number: (-rewards[number], number))[: (size + 1) // 2]
    worst = sorted(rewards.keys() - {*best}, key=lambda number: (rewards[number], number))[: size // 2]
    chosen = {*best, *worst}
    failed = [number for number in range(count) if number not in rewards]
    return sorted([*chosen, *failed[: size - len(chosen)]])


def have_no_contrast(rewards: Mapping[int, float]) -> bool:
    """True if two explorations or more have ended well, all with the same reward."""
    return len(rewards) > 1 and len({*rewards.values()}) == 1
