"""The work of a training step for ``scripts/bench/run pool``: mixes of policies, and a model of the rollouts.

The mixes, sizes and batches are those of FlexMARL (arXiv 2602.09578): 5 policies of 32B parameters, 3 of 32B and 7 of
14B, 15 of 14B; 4 queries per step, all in flight, of 16 trajectories each; micro-batches of 16 samples. A rank is a
device of 64 GB: 14B parameters with gradient and moments (16 bytes each) need 4 of them, 32B need 8.

Each query is worked on by four policies, drawn at random. A trajectory is 25 calls, as in ``balance_recipe``: twice a
plan, its parts at once (10 and 9, of one policy: 76 % of the calls), a critic and a writer. The tokens of a call are
lognormal. A query's samples are ready when its last trajectory has ended; what fills no micro-batch is ready when the
rollouts have ended, and then the optimizer step.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from flexmarl.actors.names import PolicyName

QUERIES: Final = 4
TRAJECTORIES: Final = 16
MICRO_BATCH: Final = 16
_TEAM: Final = 4
_PARTS: Final = (10, 9)
_MEDIAN_TOKENS: Final = 400
_SIGMA: Final = 0.8
_MOST_TOKENS: Final = 8192
_MEAN_TOKENS: Final = _MEDIAN_TOKENS * math.exp(_SIGMA**2 / 2)
_TOKEN_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """Seconds of a policy's work on all its ranks.

    ``sample_s``: a sample of mean length. ``step_s``: an optimizer step. ``load_s``: its state moves in. ``save_s``:
    its gradient moves out, when it is suspended. ``connect_s``: its ranks find each other. ``base_s``: weights and
    moments move out after each optimizer step, beside what follows.
    """

    ranks: int
    sample_s: float
    step_s: float
    load_s: float
    save_s: float
    connect_s: float
    base_s: float = 0.0


# 6 FLOPs per parameter and token, 2,000 tokens per sample with its prompt, 110 TFLOP/s per device. A swap of 32B takes
# 11 s in the paper; of 14B, as many bytes per rank but for an eighth. The gradient is 2 of a parameter's 16 bytes.
COST_14B: Final = PolicyCost(
    ranks=4, sample_s=0.38, step_s=1.0, load_s=4.8, save_s=0.6, connect_s=0.2, base_s=4.2
)
COST_32B: Final = PolicyCost(
    ranks=8, sample_s=0.44, step_s=1.0, load_s=5.5, save_s=0.7, connect_s=0.2, base_s=4.8
)

Costs = Mapping[PolicyName, PolicyCost]


@dataclass(frozen=True, slots=True)
class Mix:
    """``slots``: a third of the policies' ranks, rounded to whole gangs."""

    costs: Costs
    slots: int


@dataclass(frozen=True, slots=True)
class Computation:
    """``ready_s``: from the step's start. ``follows``: it is ready at the end of the policy's computation before.
    ``is_step``: it is the optimizer step."""

    ready_s: float
    seconds: float
    follows: bool = False
    is_step: bool = False


StepLoad = Mapping[PolicyName, Sequence[Computation]]
"""The computations of each policy in a step, in their order."""


def mix(large: int, small: int) -> Mix:
    costs = {PolicyName(f"32B-{n}"): COST_32B for n in range(large)}
    costs |= {PolicyName(f"14B-{n}"): COST_14B for n in range(small)}
    unit = min(cost.ranks for cost in costs.values())
    return Mix(costs, max(1, round(sum(cost.ranks for cost in costs.values()) / 3 / unit)) * unit)


def mixes() -> dict[str, Mix]:
    return {"5x32B": mix(5, 0), "3x32B+7x14B": mix(3, 7), "15x14B": mix(0, 15)}


def draw_step(costs: Costs, random: Random) -> StepLoad:
    """The work of one step."""
    queries = sorted((_draw_query(list(costs), random) for _ in range(QUERIES)), key=lambda query: query[0])
    ended_s = queries[-1][0]
    load = {}
    for policy, cost in costs.items():
        found: list[Computation] = []
        left: list[float] = []
        for closed_s, tokens in queries:
            left += tokens.get(policy, [])
            while len(left) >= MICRO_BATCH:
                found.append(_micro_batch(closed_s, left[:MICRO_BATCH], cost))
                del left[:MICRO_BATCH]
        if left:
            found.append(_micro_batch(ended_s, left, cost))
        if found:
            load[policy] = [*found, Computation(ended_s, cost.step_s, is_step=True)]
    return load


def _micro_batch(ready_s: float, tokens: Iterable[float], cost: PolicyCost) -> Computation:
    return Computation(ready_s, sum(tokens) / _MEAN_TOKENS * cost.sample_s)


def _draw_query(policies: list[PolicyName], random: Random) -> tuple[float, dict[PolicyName, list[float]]]:
    """Seconds until its last trajectory has ended, and the tokens of each policy's samples."""
    planner, worker, critic, writer = random.sample(policies, _TEAM)
    tokens: dict[PolicyName, list[float]] = {policy: [] for policy in (planner, worker, critic, writer)}

    def calls(policy: PolicyName, count: int) -> float:
        """Seconds of ``count`` calls at once."""
        drawn = [
            min(_MOST_TOKENS, random.lognormvariate(math.log(_MEDIAN_TOKENS), _SIGMA)) for _ in range(count)
        ]
        tokens[policy] += drawn
        return max(drawn) * _TOKEN_S

    def trajectory() -> float:
        return sum(
            calls(planner, 1) + calls(worker, parts) + calls(critic, 1) + calls(writer, 1) for parts in _PARTS
        )

    return max(trajectory() for _ in range(TRAJECTORIES)), tokens


def alone_s(computations: Iterable[Computation], slowness: float = 1.0) -> float:
    """The end of a policy's step if it always has slots, and each computation takes ``slowness`` times as long."""
    end_s = 0.0
    for one in computations:
        end_s = max(end_s, one.ready_s) + one.seconds * slowness
    return end_s


def lower_bound_s(load: StepLoad, costs: Costs, slots: int) -> float:
    """A time before which no schedule ends: the longest policy alone; and at each moment, all work that is not ready
    before that moment, on all slots."""
    times = sorted({one.ready_s for computations in load.values() for one in computations})
    bound_s = max(alone_s(computations) for computations in load.values())
    for time_s in times:
        work_s = sum(
            one.seconds * costs[policy].ranks
            for policy, computations in load.items()
            for one in computations
            if one.ready_s >= time_s
        )
        bound_s = max(bound_s, time_s + work_s / slots)
    return bound_s
