"""The plan of a run; or its refusal, with the nearest settings with which the run fits the hosts.

Settings are tried on the whole run, as its author would: numbers that are left to the plan are chosen again, and all
actors are placed. Changes of training come first, from those that cost least: memory for one state of a slot,
activation checkpointing, fewer tokens of a forward, more ranks, LoRA; for each of them slots on other hosts, and less
memory or more GPUs for an instance.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Final

from ....actors.config_base import AUTO
from ....actors.errors import ConfigError
from ....actors.inference.engine_bytes import engine_bytes
from ....actors.inference.inference_config import VllmEngineConfig
from ....actors.model_shape import ModelShape
from ....actors.names import PolicyName
from ....actors.trainer.pool.pool_config import SharedPoolConfig
from ....actors.trainer.rank_bytes import RankLoad, rank_bytes
from ...config.config_reading import with_overrides
from ...config.run_config import RunConfig
from ...config.written_config import UNCHANGED, WrittenConfig
from ..host_description import HostDescription
from .auto_ranks import with_chosen_ranks
from .model_memory import ITEM_BYTES, known_shapes
from .plan import STATES, DoesNotFit
from .run_placement import RunPlacement, cards_of, place_run, place_shapes
from .training_bytes import CONTEXT_BYTES, Cards, load_of

_MOST_TRIED: Final = 40
_MOST_GPUS_TRIED: Final = 640
"""GPUs of all tries together: a search for places takes seconds on a hundred of them."""
_LEAST_TOKENS: Final = 1024
_ENGINES: Final = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1))
"""Changes of an instance: times as many GPUs, and a part of its keys and values."""

Settings = list[str]


def plan_run(
    config: RunConfig,
    hosts: Sequence[HostDescription],
    keys: WrittenConfig = UNCHANGED,
    *,
    all_models: bool = True,
) -> tuple[RunConfig, RunPlacement]:
    """The config with the numbers that are left to the plan, and the place of each actor. Raises DoesNotFit, with the
    keys that were written; ``keys``, ``all_models``: see ``with_nearest``, ``known_shapes``."""
    try:
        chosen = with_chosen_ranks(config, lambda: hosts)
        return chosen, place_run(chosen, hosts, all_models=all_models)
    except DoesNotFit as refusal:
        shapes = known_shapes(config, all_models=all_models)
        raise with_nearest(refusal, config, hosts, shapes, keys) from None


def with_nearest(
    refusal: DoesNotFit,
    config: RunConfig,
    hosts: Sequence[HostDescription],
    shapes: Mapping[PolicyName, ModelShape],
    keys: WrittenConfig = UNCHANGED,
) -> DoesNotFit:
    """``refusal`` with the nearest settings, if there are any. ``keys``: the places at which settings are written."""
    problems = [keys.in_text(problem) for problem in refusal.problems]
    if settings := nearest_settings(config, hosts, shapes):
        parts = [setting.partition("=") for setting in settings]
        # Without its value a key is that of the agent or the policy, never that of all of them.
        problems.append(
            "the run fits with " + ", ".join(f"{keys.in_text(key)}={value}" for key, _, value in parts)
        )
    return DoesNotFit(problems)


def nearest_settings(
    config: RunConfig, hosts: Sequence[HostDescription], shapes: Mapping[PolicyName, ModelShape]
) -> Settings:
    """The settings with which the run fits; none if those that were tried do not help. ``config``: with ``auto`` where
    the plan may choose again."""
    cards = cards_of(hosts, share_gpus=config.hosts.share_gpus)
    if cards is None:
        return []
    search = _Search(config, with_chosen_ranks(config, lambda: hosts, shapes), shapes, cards)
    tries = min(_MOST_TRIED, max(3, _MOST_GPUS_TRIED // cards.count))
    for settings in islice(search.candidates(len(hosts)), tries):
        try:
            changed = with_overrides(config, settings, "the nearest plan")
            place_shapes(with_chosen_ranks(changed, lambda: hosts, shapes), hosts, shapes)
        except ConfigError:
            continue
        return settings
    return []


@dataclass(frozen=True, slots=True)
class _Search:
    """``chosen``: the config with numbers for all that is left to the plan."""

    config: RunConfig
    chosen: RunConfig
    shapes: Mapping[PolicyName, ModelShape]
    cards: Cards

    def candidates(self, hosts: int) -> Iterator[Settings]:
        """Settings, the nearest first; those with which a part alone does not fit a GPU are left out."""
        spread = [[], ["hosts.spread=true"], ["hosts.spread=true", "network.bulk=trusted"]]
        if hosts == 1 or self.config.hosts.spread:
            spread = spread[:1]
        engines = list(self._engine_changes())
        seen: set[tuple[str, ...]] = {()}
        # Without a change of instances first: a search for places takes long on many hosts.
        for trainings in (list(self._training_changes()), list(self._adapter_changes())):
            for engine, training, reach in product(engines, trainings, spread):
                settings = [*training, *reach, *engine]
                if tuple(settings) not in seen:
                    seen.add(tuple(settings))
                    yield settings

    # ------------------------------------------------------------------ training

    def _states(self) -> list[Settings]:
        pool = self.config.pool
        has_states = isinstance(pool, SharedPoolConfig) and pool.states_per_slot not in (AUTO, 1)
        return [[], [f"{STATES}={AUTO}"]] if has_states else [[]]

    def _rooms(self) -> list[int]:
        """Bytes for a rank: a GPU, and less beside an instance."""
        room = self.cards.room_bytes
        return list(dict.fromkeys((room, room - self._largest_instance())))

    def _training_changes(self) -> Iterator[Settings]:
        loads, states = self._loads(), self._states()
        for ranks, room in product(self._numbers(loads), self._rooms()):
            changes = [self._fit(name, load, ranks, room) for name, load in loads.items()]
            if None not in changes:
                for state in states:
                    pools = self._pool_changes(ranks)
                    yield [*state, *pools, *(setting for change in changes if change for setting in change)]

    def _adapter_changes(self) -> Iterator[Settings]:
        loads = self._loads()
        for room, state in product(self._rooms(), self._states()):
            large = [name for name, load in loads.items() if self._fit(name, load, 0, room) != []]
            for names in (large, list(loads)):
                adapted = [self._adapt(name, loads[name], room) for name in names]
                if adapted and None not in adapted:
                    yield [*state, *(setting for change in adapted if change for setting in change)]

    def _loads(self) -> dict[PolicyName, RankLoad]:
        """The load of a rank, as the gang may have it on the fewest ranks."""
        loads = {}
        for name, policy in self.chosen.trained.items():
            shape = self.shapes.get(name)
            load = None if shape is None else load_of(self.chosen, policy, shape, self.cards)
            if load is not None and policy.real_model.device != "cpu":
                trainer = policy.trainer
                ranks = self.cards.count if self._is_auto(name) else trainer.fewest_ranks
                loads[name] = replace(load, ranks=ranks, replicas=trainer.replicas_of(trainer.fewest_ranks))
        return loads

    def _is_auto(self, name: PolicyName) -> bool:
        """True if the plan chooses the ranks of a policy by itself, for any settings."""
        is_pool = isinstance(self.config.pool, SharedPoolConfig)
        return is_pool and self.config.policies[name].trainer.ranks == AUTO

    def _numbers(self, loads: Mapping[PolicyName, RankLoad]) -> list[int]:
        """Numbers of ranks, 0 for those that the config has: doubles, as each number takes a search for places."""
        written = [load.ranks for name, load in loads.items() if not self._is_auto(name)]
        least, numbers = 2 * min(written, default=self.cards.count), [0]
        while least < self.cards.count:
            numbers.append(least)
            least *= 2
        return [*numbers, self.cards.count] if written and min(written) < self.cards.count else [0]

    def _fit(self, name: PolicyName, load: RankLoad, ranks: int, room: int) -> Settings | None:
        """The settings with which a rank has room on as many ranks, or on its own; None without any."""
        key, settings = f"policies.{name}.trainer", []
        if ranks > load.ranks and not self._is_auto(name):
            ranks -= ranks % load.replicas
            trainer = self.chosen.policies[name].trainer
            settings = (
                [f"{key}.min_ranks={ranks}"] if trainer.min_ranks is not None else [f"{key}.ranks={ranks}"]
            )
            if trainer.min_ranks is not None and ranks > trainer.most_ranks:
                settings.append(f"{key}.ranks={ranks}")
            # A shared pool publishes from the host's memory.
            load = replace(load, ranks=ranks, in_shared_pool=True, publishes=0)
        for tokens, checkpoints in product(_halves(load.tokens), sorted({load.has_checkpoints, True})):
            if self._has_room(name, replace(load, tokens=tokens, has_checkpoints=checkpoints), room):
                settings += [f"{key}.activation_checkpointing=true"] * (checkpoints != load.has_checkpoints)
                return settings + [f"{key}.tokens_per_forward={tokens}"] * (tokens != load.tokens)
        return None

    def _adapt(self, name: PolicyName, load: RankLoad, room: int) -> Settings | None:
        """The settings with which an adapter has room; those of ``_fit`` for a policy that has one."""
        if load.adapter is not None:
            return self._fit(name, load, 0, room)
        adapted = replace(load, adapter=(16, "all-linear"), publishes_adapter=True, has_checkpoints=True)
        changes = self._fit(name, adapted, 0, room)
        if changes is None:
            return None
        more = [f"policies.{name}.trainer.activation_checkpointing=true"] * (not load.has_checkpoints)
        return [f"policies.{name}.lora={{rank: 16}}", *more, *changes]

    def _has_room(self, name: PolicyName, load: RankLoad, room: int) -> bool:
        return rank_bytes(self.shapes[name], load).peak + CONTEXT_BYTES <= room

    def _pool_changes(self, ranks: int) -> Settings:
        pool = self.config.pool
        if not ranks:
            return []
        if not isinstance(pool, SharedPoolConfig):
            return [f"pool={{name: shared, slots: {ranks}}}"]
        return [f"pool.slots={ranks}"] if pool.slots != AUTO and ranks > pool.slot_count else []

    # ------------------------------------------------------------------ instances

    def _engine_changes(self) -> Iterator[Settings]:
        engines = self._engines()
        sizes = {name: self._instance_bytes(name, engine) for name, engine in engines.items()}
        large = [name for name, size in sizes.items() if size > self.cards.room_bytes]
        for devices, part in _ENGINES:
            changes = {name: _change_engine(engines[name], devices, part) for name in large or engines}
            if all(
                self._instance_bytes(name, changed) <= self.cards.room_bytes
                for name, changed in changes.items()
            ):
                yield [
                    f"policies.{name}.engine.{key}={getattr(changed, key)}"
                    for name, changed in changes.items()
                    for key in ("tensor_parallel", "kv_cache_bytes")
                    if getattr(changed, key) != getattr(engines[name], key)
                ]

    def _engines(self) -> dict[PolicyName, VllmEngineConfig]:
        return {
            name: policy.engine
            for name, policy in self.config.policies.items()
            if isinstance(policy.engine, VllmEngineConfig) and policy.real_model.device != "cpu"
        }

    def _instance_bytes(self, name: PolicyName, engine: VllmEngineConfig) -> int:
        shape = self.shapes.get(name)
        if shape is None:
            return 0
        needed = engine_bytes(shape, engine, ITEM_BYTES[self.config.policies[name].real_model.dtype])
        return needed.weights_bytes + needed.kv_cache_bytes + needed.rest_bytes

    def _largest_instance(self) -> int:
        return max(
            (self._instance_bytes(name, engine) for name, engine in self._engines().items()), default=0
        )


def _halves(tokens: int) -> Iterator[int]:
    """``tokens``, half of them and so on, as long as a GPU has rows enough."""
    yield tokens
    while (tokens := tokens // 2) >= _LEAST_TOKENS:
        yield tokens


def _change_engine(engine: VllmEngineConfig, devices: int, part: int) -> VllmEngineConfig:
    numbers = {
        "tensor_parallel": engine.tensor_parallel * devices,
        "kv_cache_bytes": engine.kv_cache_bytes // part,
    }
    return engine.model_copy(update=numbers)
