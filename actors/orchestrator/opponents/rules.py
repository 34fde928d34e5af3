"""The draw of the member that plays a step: a pure function of seed, step and results.

uniform   each member with the same probability
latest    the newest member
pfsp      prioritised fictitious self-play: members that the policy beats seldom are drawn more often, with weights
          ``(1 - p) ** power``, ``p`` its win rate (AlphaStar, Vinyals et al., Nature 575, 2019)
nash      a Nash mixture of the pay-off matrix (``meta_game.py``), and with ``explore`` the member that the matrix knows
          least about

A rule is what the papers on populations call a meta-solver: results in, a mixture of the members out (PSRO, Lanctot et
al., arXiv 1711.00832, section 3.1; MALib, arXiv 2106.07551, has it beside the trainers).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import xxhash

from ...errors import RecipeError
from ...names import PolicyName, Step
from .meta_game import least_measured, meta_game, mixture
from .past_pool import Member, PastPool

Rule = Callable[[PastPool, PolicyName], Sequence[float]]
"""The weight of each member of a pool against a policy in training, which are not negative; if all are 0, each has the
same."""


def uniform(pool: PastPool, trainee: PolicyName) -> list[float]:
    """The weight 1 for each member."""
    return [1.0] * len(pool.members)


def latest(pool: PastPool, trainee: PolicyName) -> list[float]:
    """The weight 1 for the newest member, which is the last, 0 for the others."""
    return [0.0] * (len(pool.members) - 1) + [1.0]


def pfsp(pool: PastPool, trainee: PolicyName, power: float = 2.0) -> list[float]:
    """``(1 - win rate) ** power`` for each member: 0 for one that the policy always beats."""
    return [(1.0 - member.win_rate) ** power for member in pool.members]


def nash(pool: PastPool, trainee: PolicyName, explore: float = 0.25) -> list[float]:
    """The probabilities of a Nash mixture, times ``1 - explore``; ``explore`` is that of the member which the newest
    version of ``trainee`` has met in the fewest games."""
    weights = [(1.0 - explore) * share for share in mixture(meta_game(pool.members, pool.payoffs))]
    weights[least_measured(pool.members, pool.payoffs, pool.row_of(trainee))] += explore
    return weights


RULES: Final[Mapping[str, Rule]] = {"uniform": uniform, "latest": latest, "pfsp": pfsp, "nash": nash}


def rule_of_function(function: Callable[[Sequence[Member]], Sequence[float]]) -> Rule:
    """The rule of a function of a recipe, which gets the members alone."""
    return lambda pool, _: function(pool.members)


def draw_member(
    rule: Rule, pool: PastPool, trainee: PolicyName, seed: int, policy: PolicyName, step: Step
) -> Member:
    """The member that plays ``step`` against ``trainee``. ``policy``: the pool's. Raises RecipeError if the weights are
    not as many non-negative finite numbers as there are members."""
    members = pool.members
    weights = list(rule(pool, trainee))
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
