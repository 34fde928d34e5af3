"""The draw of the member that plays a step: a pure function of seed, step and results.

uniform   each member with the same probability
latest    the newest member
pfsp      prioritised fictitious self-play: members that the policy beats seldom are drawn more often, with weights
          ``(1 - p) ** power``, ``p`` its win rate (AlphaStar, Vinyals et al., Nature 575, 2019)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import xxhash

from ...errors import RecipeError
from ...names import PolicyName, Step
from .past_pool import Member

Rule = Callable[[Sequence[Member]], Sequence[float]]
"""The weight of each member, which are not negative; if all are 0, each has the same."""


def uniform(members: Sequence[Member]) -> list[float]:
    """The weight 1 for each member."""
    return [1.0] * len(members)


def latest(members: Sequence[Member]) -> list[float]:
    """The weight 1 for the newest member, which is the last, 0 for the others."""
    return [0.0] * (len(members) - 1) + [1.0]


def pfsp(members: Sequence[Member], power: float = 2.0) -> list[float]:
    """``(1 - win rate) ** power`` for each member: 0 for one that the policy always beats."""
    return [(1.0 - member.win_rate) ** power for member in members]


RULES: Final[Mapping[str, Rule]] = {"uniform": uniform, "latest": latest, "pfsp": pfsp}


def draw_member(rule: Rule, members: Sequence[Member], seed: int, policy: PolicyName, step: Step) -> Member:
    """The member that plays ``step``. ``policy``: the pool's. Raises RecipeError if the weights are not as many
    non-negative finite numbers as there are members."""
    weights = list(rule(members))
    if len(weights) != len(members) or not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise RecipeError(
            f"the rule of the past versions {policy!r} gives the weights {weights} for {len(members)} members: it must "
            "give one finite number for each, 0 or more"
        )
    if not sum(weights):
        weights = [1.0] * len(members)
    place = xxhash.xxh3_64_intdigest(f"{seed} opponent {policy} {step}".encode()) / 2**64 * math.fsum(weights)
    for member, weight in zip(members, weights, strict=True):
        place -= weight
        if place < 0 and weight:
            return member
    return max(zip(weights, range(len(members)), members, strict=True))[2]  # rounding has left a rest
