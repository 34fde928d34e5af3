"""Fixed divisions of slots over policies, to compare the training pool with: the best ones, found in hindsight.

None of them swaps a state, or pays for memory: a slot holds as many states as it needs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean

from flexmarl.actors.names import PolicyName
from flexmarl.actors.trainer.pool.slot_choice import AllocatorConfig

from .balance import partitions
from .pool_load import Mix, StepLoad, alone_s
from .pool_run import run_steps

Groups = tuple[frozenset[PolicyName], ...]
"""Policies that share slots."""


def best_partition(mix: Mix, loads: Sequence[StepLoad]) -> tuple[float, dict[PolicyName, int]]:
    """The mean seconds of a step, and the slots of each policy, if each has slots of its own.

    A policy with fewer slots than ranks takes so many times as long; more slots than ranks don't help. All divisions
    are tried.
    """
    ends_s = {
        (policy, slots): [alone_s(load.get(policy, ()), cost.ranks / slots) for load in loads]
        for policy, cost in mix.costs.items()
        for slots in range(1, cost.ranks + 1)
    }

    def step_s(slots: dict[PolicyName, int]) -> float:
        return fmean(map(max, zip(*(ends_s[one] for one in slots.items()), strict=True)))

    allowed = (
        slots
        for slots in partitions(list(mix.costs), mix.slots)
        if all(count <= mix.costs[policy].ranks for policy, count in slots.items())
    )
    return min(((step_s(slots), slots) for slots in allowed), key=lambda found: found[0])


def best_sharing(mix: Mix, loads: Sequence[StepLoad], searched: int) -> tuple[float, Groups]:
    """The mean seconds of a step, and the groups, if the slots are divided into groups of the largest gang's size, the
    policies are divided over the groups, and each group is a pool whose swaps cost nothing.

    ``searched``: divisions that are tried at most. The first has equal work in all groups, as nearly as possible; then
    one policy is moved, or two are exchanged, as long as that shortens the step.
    """
    size = max(cost.ranks for cost in mix.costs.values())
    ends_s: dict[frozenset[PolicyName], list[float]] = {}

    def step_s(groups: Groups) -> float:
        for group in groups:
            if group not in ends_s:
                ends_s[group] = _group_ends_s(mix, group, size, loads)
        return fmean(map(max, zip(*(ends_s[group] for group in groups), strict=True)))

    best = _equal_work(mix, loads, mix.slots // size)
    best_s = step_s(best)
    tried = 1
    is_better = True
    while is_better:
        is_better = False
        for groups in _neighbours(best):
            if tried == searched:
                return best_s, best
            tried += 1
            if (found_s := step_s(groups)) < best_s:
                best_s, best, is_better = found_s, groups, True
                break
    return best_s, best


def _equal_work(mix: Mix, loads: Sequence[StepLoad], count: int) -> Groups:
    """The policy with most work to the group with least, again and again."""
    work_s = {
        policy: sum(one.seconds * cost.ranks for load in loads for one in load.get(policy, ()))
        for policy, cost in mix.costs.items()
    }
    groups: list[list[PolicyName]] = [[] for _ in range(count)]
    for policy in sorted(work_s, key=lambda policy: -work_s[policy]):
        min(groups, key=lambda group: sum(work_s[one] for one in group)).append(policy)
    return tuple(map(frozenset, groups))


def _neighbours(groups: Groups) -> Iterator[Groups]:
    """All divisions that differ by the place of one policy, or by an exchange of two."""
    for here, there in combinations(range(len(groups)), 2):
        sets = [frozenset(), *(frozenset([policy]) for policy in sorted(groups[there]))]
        for leaving in (frozenset(), *(frozenset([policy]) for policy in sorted(groups[here]))):
            for coming in sets:
                if leaving or coming:
                    changed = list(groups)
                    changed[here] = groups[here] - leaving | coming
                    changed[there] = groups[there] - coming | leaving
                    yield tuple(changed)


def _group_ends_s(
    mix: Mix, group: frozenset[PolicyName], slots: int, loads: Sequence[StepLoad]
) -> list[float]:
    """The end of each step for one group."""
    if not group:
        return [0.0] * len(loads)
    costs = {
        policy: replace(cost, load_s=0.0, save_s=0.0, connect_s=0.0, base_s=0.0)
        for policy, cost in mix.costs.items()
        if policy in group
    }
    own = [{policy: load[policy] for policy in load if policy in group} for load in loads]
    steps = run_steps(costs, slots, own, AllocatorConfig(states_per_slot=len(group) + 1))
    return [step.step_s for step in steps]
