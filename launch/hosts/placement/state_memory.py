"""The memory of each host for published weights, and for the states of a shared pool as its slots are placed. Pure.

Published weights are on the head, two versions of each policy that is trained. The states of all policies are divided
over the hosts as the slots are: any policy may run anywhere, but all of them together run as often on each slot. Beside
them each host has the newer rest of the largest policy, as far as that has slots there; ``pool.host_memory_gib`` bounds
both. Second copies do not count: hosts with room have them.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ....actors.model_shape import ModelShape
from ....actors.names import PolicyName
from ....actors.trainer.pool.pool_config import SharedPoolConfig
from ...config.run_config import RunConfig
from ..host_description import HostDescription
from .model_memory import ITEM_BYTES
from .plan import Plan
from .training_bytes import Cards, HostStateBytes, host_state_bytes, load_of


@dataclass(frozen=True, slots=True)
class GangState:
    """The state of a policy with so many ``ranks``."""

    size: HostStateBytes
    ranks: int


def with_state_memory(
    plan: Plan,
    config: RunConfig,
    shapes: Mapping[PolicyName, ModelShape],
    cards: Cards | None,
) -> Plan:
    """The plan with ``Need.shared_bytes`` of the trainer, and of the first slot of each other host."""
    if not isinstance(config.pool, SharedPoolConfig) and config.weights.only_path == "cuda_ipc":
        return plan  # no copy of the weights in memory of a host
    states = [
        GangState(host_state_bytes(shape, load), policy.trainer.most_ranks)
        for name, policy in config.trained.items()
        if (shape := shapes.get(name)) is not None
        and (load := load_of(config, policy, shape, cards)) is not None
    ]
    pool, ranks = config.pool, sum(policy.trainer.most_ranks for policy in config.trained.values())
    actors, head = dict(plan.actors), plan.actors["trainer"].node
    if isinstance(pool, SharedPoolConfig):
        slots = Counter(placed.node for actor, placed in actors.items() if actor.startswith("slot-"))
        limit = math.inf if pool.host_memory_gib is None else pool.host_memory_gib * 2**30
        needed = bytes_by_host(states, slots, head, are_suspended=ranks > pool.slot_count, limit_bytes=limit)
    else:
        needed = {head: sum(state.size.published for state in states)}
    needed[head] = needed.get(head, 0) + sum(
        shape.parameters * ITEM_BYTES[policy.real_model.dtype]
        for name, policy in config.frozen.items()
        if (shape := shapes.get(name)) is not None
    )
    for host, size_bytes in needed.items():
        first = (
            "trainer"
            if host == head
            else next(
                actor for actor, placed in actors.items() if actor.startswith("slot-") and placed.node == host
            )
        )
        placed = actors[first]
        actors[first] = replace(placed, need=replace(placed.need, shared_bytes=size_bytes))
    return replace(plan, actors=actors)


def bytes_by_host(
    states: Sequence[GangState],
    slots: Mapping[str, int],
    head: str,
    *,
    are_suspended: bool,
    limit_bytes: float = math.inf,
) -> dict[str, int]:
    """Bytes of the memory of each host. ``slots``: the number on each. ``are_suspended``: they are not enough for all
    policies at a time. ``limit_bytes``: beyond it states go to the disk."""
    once = sum(state.size.rest + state.size.step * are_suspended for state in states)
    needed = {head: sum(state.size.published for state in states)}
    for host, count in slots.items():
        newer = max((s.size.rest * min(count, s.ranks) // s.ranks for s in states), default=0)
        of_states = once * count // sum(slots.values()) + newer
        needed[host] = needed.get(host, 0) + int(min(of_states, limit_bytes))
    return needed


def state_memory_problems(plan: Plan, hosts: Sequence[HostDescription]) -> Iterator[str]:
    """A sentence for each host with too little memory. One that is made up may have memory of an unknown size, 0."""
    needed: Counter[str] = Counter()
    for placed in plan.actors.values():
        needed[placed.node] += placed.need.shared_bytes
    for host in hosts:
        if host.shared_memory_bytes and needed[host.name] > host.shared_memory_free_bytes:
            yield (
                f"{_gib(needed[host.name])} of {host.shared_memory} on {host.name} are needed for published weights "
                f"and suspended states, and {_gib(host.shared_memory_free_bytes)} are free; mount a larger one, or "
                "name another folder in FLEXMARL_RUNTIME_BASE; of a shared pool divide the slots over more hosts, or "
                "set a lower pool.host_memory_gib, beyond which states go to the disk"
            )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
