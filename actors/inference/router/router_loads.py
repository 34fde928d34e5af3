"""The router's side of balancing: the loads that the balancer decides by, and the instance that moves. Pure.

An instance that moves either drains, or loads the other policy's weights at once, which interrupts its turns: their
tokens are kept, and they are resumed at another instance of their policy. The latter is cheaper wherever the engine can
resume turns: it costs the prefill of their tokens, a small part of the time that their decoding took, while an instance
that drains stays until its longest turn ends, and is mostly empty by then.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from ...names import PolicyName
from .instance_states import InstanceState
from .live_instances import LiveInstances
from .rebalancer import BalanceConfig, Move, MoveRules, PolicyLoad, Rebalancer
from .routed_policy import RoutedPolicy
from .waiting_turns import RoutedInstance

_SERVING: Final = InstanceState.SERVING


@dataclass(frozen=True, slots=True)
class RebalanceSettings:
    """``capacities``: the turns that an instance may have, by the policy that it moves to. ``interruptible``: policies
    whose turns other instances may resume. ``rules``: of the moves that ``config`` leaves to the program."""

    config: BalanceConfig = field(default_factory=BalanceConfig)
    capacities: Mapping[PolicyName, int] = field(default_factory=dict)
    interruptible: tuple[PolicyName, ...] = ()
    rules: MoveRules = field(default_factory=MoveRules)


@dataclass(slots=True)
class _Count:
    instances: int = 0
    serving: int = 0
    movable: int = 0
    capacity: int = 1
    turns: int = 0


def loads_of(
    policies: Mapping[PolicyName, RoutedPolicy],
    instances: Iterable[RoutedInstance],
    min_instances: int,
    now: float,
) -> dict[PolicyName, PolicyLoad]:
    """The loads of those of ``policies`` that are published. At least ``min_instances`` that serve a policy may not
    move, and those that have moved may not before ``now``."""
    counts = {
        name: _Count(turns=policy.waiting.for_version(policy.published))
        for name, policy in policies.items()
        if policy.published is not None
    }
    # Called ten times a second: with 352 instances it was a sixth of a simulated step's time. So states are compared by
    # ``is``, as enums hash in Python, and nothing is made for an instance.
    for instance in instances:
        for turn in instance.turns.values():
            if (of_turn := counts.get(turn.policy)) is not None:
                of_turn.turns += 1
        state, moves_to = instance.state, instance.moves_to
        count = counts.get(moves_to or instance.policy)
        if count is None:
            continue
        if moves_to:
            count.instances += 1
        elif state is _SERVING:
            count.instances += 1
            count.serving += 1
            count.movable += instance.stays_until_s <= now
            count.capacity = instance.load.capacity
        elif state is InstanceState.JOINING or state is InstanceState.LOADING:
            count.instances += 1
            count.capacity = instance.load.capacity
    return {
        policy: PolicyLoad(
            count.instances,
            min(count.movable, max(0, count.serving - min_instances)),
            count.capacity,
            count.turns,
        )
        for policy, count in counts.items()
    }


def moves_of(
    balancer: Rebalancer,
    settings: RebalanceSettings,
    policies: Mapping[PolicyName, RoutedPolicy],
    live: LiveInstances,
    now: float,
) -> Iterator[tuple[Move, float]]:
    """The moves to policies without an instance, and then those that pay; each is to be begun before the next one is
    asked for. The second value: instances that have moved may move again if they were to stay until then at the latest.
    Those that serve several policies at the same time do not move."""
    movable = {name: policy for name, policy in policies.items() if not policy.shared}
    if any(policy.no_instance_since_s is not None for policy in movable.values()):
        # Without regard to ``min_instances``, stays, and versions that are installed: the run would end.
        for move in balancer.rescues(loads_of(movable, live, 1, math.inf)):
            yield move, math.inf
    settled = {name: policy for name, policy in movable.items() if not policy.publishing}
    for move in balancer.moves(loads_of(settled, live, settings.config.min_instances, now)):
        yield move, now


def hand_over(
    instance: RoutedInstance,
    taker: PolicyName,
    policies: Mapping[PolicyName, RoutedPolicy],
    capacities: Mapping[PolicyName, int],
) -> None:
    """Makes the instance one of ``taker``, with the turns that ``capacities`` have for it."""
    former_policy, joins = policies[instance.policy], policies[taker]
    del former_policy.instances[instance.number]
    former_policy.room.drop(instance)
    instance.state_reason = f"it has moved from {instance.policy}"
    instance.moved_from, instance.policy, instance.moves_to = instance.policy, taker, None
    instance.load.capacity = capacities.get(taker, instance.load.capacity)
    joins.instances[instance.number], instance.room = instance, joins.room


def first_to_move(move: Move, instances: Iterable[RoutedInstance], now: float) -> RoutedInstance:
    """The instance of the giver with the fewest expected tokens."""
    movable = [
        instance for instance in instances if instance.policy == move.giver and _may_move(instance, now)
    ]
    return min(movable, key=lambda instance: (instance.load.tokens, instance.number))


def _may_move(instance: RoutedInstance, now: float) -> bool:
    return instance.state is InstanceState.SERVING and instance.stays_until_s <= now


def measure_load(balancer: Rebalancer, instance: RoutedInstance, now: float) -> None:
    """To be called when the instance has acknowledged its version."""
    giver = instance.moved_from
    balancer.loaded(instance.policy, now - instance.loads_since_s, giver)
    if giver is not None:
        instance.stays_until_s = now + balancer.settle_s(giver, instance.policy)
