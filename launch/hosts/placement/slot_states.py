"""The training states for which a slot of a shared pool has memory: a sentence about a plan's number. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from ....actors.model_shape import ModelShape
from ....actors.names import PolicyName
from ....actors.trainer.pool.pool_config import SharedPoolConfig
from ....actors.trainer.pool.slot_choice import MOST_STATES
from ...config.run_config import RunConfig
from ..host_description import HostDescription
from .actor_needs import needs_of
from .capacity import usable_bytes
from .plan import STATES, Placed, Plan
from .training_bytes import Cards

USED_SHARE: Final = 0.95
"""Share of a GPU's memory that a chosen number may use: the allocator's gaps grow with the hours."""


def with_states(config: RunConfig, states: int) -> RunConfig:
    """The same with memory for so many states on a slot; without slots the same."""
    if not isinstance(config.pool, SharedPoolConfig):
        return config
    pool = config.pool.model_copy(update={"states_per_slot": states})
    return config.model_copy(update={"pool": pool})


def states_have_room(plan: Plan, hosts: Sequence[HostDescription]) -> bool:
    """True if no slot needs more of its GPU than a chosen number may use."""
    usable = {host.name: [*map(usable_bytes, host.gpus)] for host in hosts}
    return all(
        placed.need.gpu_bytes <= USED_SHARE * usable[placed.node][gpu]
        for placed in _slots(plan)
        for gpu in placed.gpus
    )


def states_note(
    config: RunConfig,
    plan: Plan,
    hosts: Sequence[HostDescription],
    shapes: Mapping[PolicyName, ModelShape],
    cards: Cards | None,
) -> str:
    """The number with its reason, one sentence; empty if it makes no difference. ``shapes``, ``cards``: see
    ``needs_of``."""
    pool = config.pool
    if not isinstance(pool, SharedPoolConfig) or len(config.trained) < MOST_STATES:
        return ""
    setting = f"{STATES}={pool.state_count}"
    rooms = [_room(placed, plan, hosts) for placed in _slots(plan) if placed.gpus]
    if not rooms:
        return f"{setting}: nothing but the host's memory limits the states of slots on CPUs"
    needed = _slot_bytes(with_states(config, max(MOST_STATES, pool.state_count)), shapes, cards)
    if needed == _slot_bytes(with_states(config, 1), shapes, cards):
        return f"{setting}: the sizes of the states are unknown"
    room = min(rooms)
    if pool.state_count > 1:
        return f"{setting}: the next policy's state fits beside the present one, {_of(needed, room)}"
    if needed <= USED_SHARE * room:
        return f"{setting}: {MOST_STATES} states would fit, {_of(needed, room)}"
    needs = f"{MOST_STATES} states need {_gib(needed)} GiB of each GPU"
    return f"{setting}: {needs}, and {USED_SHARE:.0%} of {_gib(room)} GiB may be used"


def _slot_bytes(config: RunConfig, shapes: Mapping[PolicyName, ModelShape], cards: Cards | None) -> int:
    """Bytes of a slot on its GPU."""
    return next(need.gpu_bytes for need in needs_of(config, shapes, cards) if need.actor.startswith("slot-"))


def _slots(plan: Plan) -> list[Placed]:
    return [placed for actor, placed in plan.actors.items() if actor.startswith("slot-")]


def _room(slot: Placed, plan: Plan, hosts: Sequence[HostDescription]) -> int:
    """Bytes that a slot may use of its GPU, beside the other actors there."""
    (gpu,) = slot.gpus
    host = next(host for host in hosts if host.name == slot.node)
    beside = (other for other in plan.actors.values() if other is not slot and other.node == slot.node)
    return usable_bytes(host.gpus[gpu]) - sum(other.need.gpu_bytes for other in beside if gpu in other.gpus)


def _of(part: int, size: int) -> str:
    return f"{_gib(part)} of {_gib(size)} GiB"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
