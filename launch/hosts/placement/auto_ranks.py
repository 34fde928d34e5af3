"""The numbers of ranks, slots and states of a slot that a config leaves to the plan (``auto``).

A policy gets the fewest ranks with which each fits 95 % of a GPU; one on CPUs, where a division leaves the memory of
the host as it is. A pool gets as many slots as the policy with the most ranks needs. If the instances on the same GPUs
leave no room for that, the policy with the largest ranks gets one more, each replica of it, until there is a plan.
Slots have memory for two states if that plan has room for them, else for one: no policy gets more ranks for a second
one, which saves the time of loads alone.

Fewest, not as many as there are GPUs: more ranks are faster, but only the author of a config knows whether policies,
other runs or instances are to have what is left over.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ....actors.config_base import AUTO
from ....actors.errors import ConfigError
from ....actors.model_shape import ModelShape
from ....actors.names import PolicyName
from ....actors.trainer.pool.pool_config import SharedPoolConfig
from ....actors.trainer.pool.slot_choice import MOST_STATES
from ....actors.trainer.rank_bytes import rank_bytes
from ...config.config_reading import with_overrides
from ...config.run_config import RunConfig
from ..host_description import HostDescription
from .capacity import is_usable
from .model_memory import known_shapes, unknown_shape
from .plan import STATES, DoesNotFit
from .run_placement import cards_of, place_shapes
from .slot_states import USED_SHARE, states_have_room, with_states
from .training_bytes import CONTEXT_BYTES, load_of

_SLOTS: Final = "pool.slots"


def with_chosen_ranks(
    config: RunConfig,
    hosts: Callable[[], Sequence[HostDescription]],
    shapes: Mapping[PolicyName, ModelShape] | None = None,
) -> RunConfig:
    """The same with numbers. ``hosts``: those of the run, the head first; they are read only if the choice depends on
    them. ``shapes``: of the policies' models; None: they are read here. Raises ConfigError if the ranks depend on the
    size of a model that is unknown. If nothing fits, the numbers are the first that were tried: the placement refuses
    them, with its reasons."""
    least, chooses_states = _least_ranks(config), _leaves_states(config)
    on_gpus = [name for name in least if config.policies[name].real_model.device != "cpu"]
    if not on_gpus and not (chooses_states and _states_meet_on_gpus(config)):
        ranked = _with_ranks(config, least)
        return with_states(ranked, MOST_STATES) if chooses_states else ranked
    shapes = known_shapes(config, all_models=True) if shapes is None else shapes
    for name in on_gpus:
        if name not in shapes:
            reason = unknown_shape(config, name)
            raise ConfigError(f"policies.{name}.trainer.ranks={AUTO}: {reason}; or write a number of ranks")
    if not chooses_states:
        return _Choice(config, hosts(), shapes).choose_ranks(least, on_gpus)
    choice = _Choice(with_states(config, 1), hosts(), shapes)
    return choice.raise_states(choice.choose_ranks(least, on_gpus))


def with_least_ranks(config: RunConfig) -> RunConfig:
    """The same with the least numbers that are possible: for a look at a config away from the run's hosts."""
    ranked = _with_ranks(config, _least_ranks(config))
    return with_states(ranked, 1) if _leaves_states(config) else ranked


def is_left_to_the_plan(key: str, value: object) -> bool:
    """True for a dotted key of a config that this module replaces, if its value asks for that."""
    return value == AUTO and (key in (_SLOTS, STATES) or key.endswith(".trainer.ranks"))


def _leaves_states(config: RunConfig) -> bool:
    return isinstance(config.pool, SharedPoolConfig) and config.pool.states_per_slot == AUTO


def _states_meet_on_gpus(config: RunConfig) -> bool:
    """True if slots on GPUs may have states of several policies."""
    models = [policy.used_model for policy in config.trained.values()]
    return len(models) > 1 and any(model is not None and model.device != "cpu" for model in models)


def _least_ranks(config: RunConfig) -> dict[PolicyName, int]:
    """The least ranks of the policies whose ranks are left to the plan: their replicas have as many each."""
    return {
        name: -(-(policy.trainer.min_ranks or 1) // policy.trainer.replicas) * policy.trainer.replicas
        for name, policy in config.trained.items()
        if policy.trainer.ranks == AUTO
    }


def _with_ranks(config: RunConfig, ranks: Mapping[PolicyName, int]) -> RunConfig:
    """The same with these ranks, and slots for the policy with the most."""
    settings = [f"policies.{name}.trainer.ranks={number}" for name, number in ranks.items()]
    if isinstance(config.pool, SharedPoolConfig) and config.pool.slots == AUTO:
        numbers = (ranks.get(name, policy.trainer.ranks) for name, policy in config.trained.items())
        settings.append(f"{_SLOTS}={max(number for number in numbers if isinstance(number, int))}")
    return with_overrides(config, settings, "the config with the numbers of the plan") if settings else config


@dataclass(frozen=True, slots=True)
class _Choice:
    """``shapes``: of the policies' models."""

    config: RunConfig
    hosts: Sequence[HostDescription]
    shapes: Mapping[PolicyName, ModelShape]

    def raise_states(self, chosen: RunConfig) -> RunConfig:
        """``chosen`` with the most states of a slot, if there is a plan with them."""
        more = with_states(chosen, MOST_STATES)
        try:
            placement = place_shapes(more, self.hosts, self.shapes)
        except DoesNotFit:
            return chosen
        return more if states_have_room(placement.plan, self.hosts) else chosen

    def choose_ranks(self, least: Mapping[PolicyName, int], on_gpus: Sequence[PolicyName]) -> RunConfig:
        plain, limit = _with_ranks(self.config, least), self._limit()
        more = {name: self.config.policies[name].trainer.replicas for name in on_gpus}
        ranks = {**least, **{name: self._fewest(plain, name, least[name], limit) for name in on_gpus}}
        first = chosen = _with_ranks(self.config, ranks)
        while True:
            try:
                place_shapes(chosen, self.hosts, self.shapes)
            except DoesNotFit:
                growing = [name for name in on_gpus if ranks[name] + more[name] <= limit]
                if not growing:
                    return first
                largest = max(growing, key=lambda name: self._peak(plain, name, ranks[name]))
                ranks[largest] += more[largest]
                chosen = _with_ranks(self.config, ranks)
            else:
                return chosen

    def _fewest(self, plain: RunConfig, name: PolicyName, least: int, limit: int) -> int:
        """``plain``: the config with any ranks. The most within ``limit``, if none fit."""
        numbers = range(least, max(least, limit) + 1, self.config.policies[name].trainer.replicas)
        cards = cards_of(self.hosts, share_gpus=self.config.hosts.share_gpus)
        room = 0 if cards is None else int(cards.room_bytes * USED_SHARE) - CONTEXT_BYTES
        fit = (ranks for ranks in numbers if self._peak(plain, name, ranks) <= room)
        return next(fit, numbers[-1])

    def _peak(self, plain: RunConfig, name: PolicyName, ranks: int) -> int:
        cards = cards_of(self.hosts, share_gpus=self.config.hosts.share_gpus)
        load = load_of(plain, plain.policies[name], self.shapes[name], cards)
        return 0 if load is None else rank_bytes(self.shapes[name], replace(load, ranks=ranks)).peak

    def _limit(self) -> int:
        """The most ranks of a policy: one in the trainer's process, else as many as there may be slots."""
        pool, hosts = self.config.pool, self.config.hosts
        if not isinstance(pool, SharedPoolConfig):
            return 1
        if isinstance(pool.slots, int):
            return pool.slots
        reached = self.hosts if hosts.spread else self.hosts[:1]
        return max(1, sum(is_usable(gpu, hosts.share_gpus) for host in reached for gpu in host.gpus))
