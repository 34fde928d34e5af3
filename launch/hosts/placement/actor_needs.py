"""The needs of each actor of a run, from its config. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ....actors.inference.engine_bytes import engine_bytes
from ....actors.model_shape import ModelShape
from ....actors.names import PolicyName
from ....actors.trainer.pool.pool_config import SharedPoolConfig
from ....actors.trainer.rank_bytes import RankBytes, rank_bytes
from ...config.config_sections import PolicyConfig
from ...config.run_config import RunConfig
from .model_memory import ITEM_BYTES
from .plan import BESIDE, Need
from .training_bytes import Cards, load_of, parts_of

Parts = tuple[tuple[str, int], ...]

_OF_ITS_OWN: Final = "cuda"
_HEAD: Final = ("store", "router", "orchestrator")


def needs_of(
    config: RunConfig,
    shapes: Mapping[PolicyName, ModelShape] | None = None,
    cards: Cards | None = None,
) -> list[Need]:
    """The needs of all actors, by the names that ``References`` gives them. ``shapes``: of each policy's model, as far
    as they are known. ``cards``: None without a GPU.

    An actor with ``device: cuda`` has GPUs of its own; ``cuda:1`` names that GPU of the head for all actors of the
    policy. The first rollout worker is on the head: a run can't do without any.
    """
    sizes = _Sizes(config, shapes or {}, cards)
    head = [Need(name, name, on_head=True) for name in _HEAD]
    workers, spread = config.rollout.workers, config.hosts.spread
    rollout = [
        Need(f"rollout-{n}", f"rollout.workers={workers}", on_head=n == 0 or not spread)
        for n in range(workers)
    ]
    services = config.rewards.services
    rewards = [
        Need(
            f"rewards-{n}",
            f"rewards.services={services}",
            on_head=not spread,
            beside=f"rollout-{n % workers}",
        )
        for n in range(services)
    ]
    trainer, slots, instances = _trainer(config, sizes), _slots(config, sizes), _instances(config, sizes)
    return [*head, trainer, *slots, *instances, *rollout, *rewards]


def _device_of(policy: PolicyConfig) -> str:
    """The device that the config names for the policy's model; ``cpu`` for a policy without a model, as in a
    simulation."""
    model = policy.used_model
    return "cpu" if model is None else model.device


def _trainer(config: RunConfig, sizes: "_Sizes") -> Need:
    """The trainer's process computes itself if the pool is static."""
    if isinstance(config.pool, SharedPoolConfig):
        return Need("trainer", "pool.name=shared", on_head=True)
    devices = {name: _device_of(policy) for name, policy in config.policies.items()}
    on_gpus = [name for name, device in devices.items() if device != "cpu"]
    on_cpu = sum(sizes.on_cpu(name) for name in devices if name not in on_gpus)
    named = tuple(sorted({number(device) for name in on_gpus if (device := devices[name]) != _OF_ITS_OWN}))
    if named and _OF_ITS_OWN in devices.values():  # in a process that sees all GPUs it is the first
        named = tuple(sorted({0, *named}))
    key = _device_key(on_gpus[0], devices[on_gpus[0]]) if on_gpus else "pool.name=static"
    parts = sizes.on_one_gpu(on_gpus) if len(named) < 2 else ()
    return Need(
        "trainer", key, on_head=True, purpose="training", memory_bytes=on_cpu,
        gpus=1 if on_gpus and not named else 0, gpu_bytes=_total(parts), named=named, parts=parts,
    )  # fmt: skip


def _slots(config: RunConfig, sizes: "_Sizes") -> Iterator[Need]:
    """The needs of the slots. On GPUs as many slots as the largest policy has ranks, or a replica of it, are planned as
    a gang, from the first slot on. During the run any slots may become one. On CPUs only replicas are: else a rank
    computes fastest on the host with the most cores for it, as every other actor does."""
    if not isinstance(config.pool, SharedPoolConfig):
        return
    slots = config.pool.slot_count
    trained = config.trained
    trainers = [policy.trainer for policy in trained.values()]
    largest = max(trainers, key=lambda trainer: (trainer.most_ranks, trainer.replicas))
    size = largest.replica_size
    on_gpus = any(_device_of(policy) != "cpu" for policy in trained.values())
    on_cpu = (
        0
        if on_gpus
        else max(sizes.on_cpu(name) // policy.trainer.replica_size for name, policy in trained.items())
    )
    parts = sizes.on_slot() if on_gpus else ()
    for slot in range(slots):
        is_planned = (on_gpus or largest.replicas > 1) and size > 1 and slot < slots // size * size
        gang = slot // size if is_planned else None
        yield Need(
            f"slot-{slot}", f"pool.slots={slots}", on_head=not config.hosts.spread, purpose="training",
            gpus=int(on_gpus), gpu_bytes=_total(parts), memory_bytes=on_cpu, gang=gang, parts=parts,
        )  # fmt: skip


def fewest_slots(config: RunConfig) -> int:
    """The slots without which a policy could never be bound; 0 without a pool of slots."""
    if not isinstance(config.pool, SharedPoolConfig):
        return 0
    return max(policy.trainer.fewest_ranks for policy in config.trained.values())


def _instances(config: RunConfig, sizes: "_Sizes") -> Iterator[Need]:
    moving = config.balance.scope == "intra+inter"
    gpus_of = {name: _gpus(policy) for name, policy in config.policies.items()}
    for (name, *_), instances in config.served_together().items():
        policy = config.policies[name]
        gpus, device = gpus_of[name], _device_of(policy)
        if moving:  # it has the GPUs for each policy that it may move to
            gpus = gpus and max(gpus_of.values())
        named = (number(device),) if device not in ("cpu", _OF_ITS_OWN) else ()
        parts = sizes.of_instance(name) if device != "cpu" else ()
        on_host = 0 if policy.simulated else sizes.on_host_of_instance(name)
        key = _device_key(name, device) if named else f"policies.{name}.instances={instances}"
        for instance in range(instances):
            yield Need(
                f"{name}-{instance}", key, on_head=bool(named), gpus=gpus,
                gpu_bytes=_total(parts), memory_bytes=on_host, named=named, parts=parts,
            )  # fmt: skip


def _total(parts: Parts) -> int:
    return sum(size for _, size in parts)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of the policies, as far as the shapes of their models are known. Arguments: those of ``needs_of``."""

    config: RunConfig
    shapes: Mapping[PolicyName, ModelShape]
    cards: Cards | None

    def on_cpu(self, name: PolicyName) -> int:
        """All that stays of a policy in training, whole; without activations."""
        policy, shape = self.config.policies[name], self.shapes.get(name)
        if shape is None or (load := load_of(self.config, policy, shape, None)) is None:
            return 0
        return rank_bytes(shape, load.alone()).state

    def on_one_gpu(self, names: Sequence[PolicyName]) -> Parts:
        """The parts of policies on one GPU, which compute in turn: all that stays of each, and the most that comes."""
        needed = {name: rank for name in names if (rank := self._rank(name)) is not None}
        if not needed:
            return ()
        most = max(needed, key=lambda name: needed[name].peak - needed[name].state)
        states = [(f"state of {name}", rank.state) for name, rank in needed.items() if name != most]
        return (*parts_of(needed[most]), *states)

    def on_slot(self) -> Parts:
        """The parts of the largest rank, with the states that a slot has beside it."""
        ranks = {name: rank for name in self.config.trained if (rank := self._rank(name)) is not None}
        if not ranks:
            return ()
        beside = {name: self._beside(name, ranks) for name in ranks}
        most = max(ranks, key=lambda name: ranks[name].peak + beside[name])
        return (*parts_of(ranks[most]), *([(BESIDE, beside[most])] if beside[most] else []))

    def _beside(self, name: PolicyName, ranks: Mapping[PolicyName, RankBytes]) -> int:
        """Bytes of the states that a slot has beside that of ``name``: those that are loaded ahead
        (``pool.states_per_slot`` decides), and the bases of adapters, which stay."""
        pool = self.config.pool
        assert isinstance(pool, SharedPoolConfig), "there are no slots without it"
        lora = {other: self.config.policies[other].lora is not None for other in ranks}
        models = {other: self.config.policies[other].real_model.model_dump_json() for other in ranks}
        bases = {models[other]: rank.frozen for other, rank in ranks.items() if lora[other]}
        if lora[name]:
            del bases[models[name]]
        states = sorted(
            (rank.state - rank.frozen * lora[other] for other, rank in ranks.items() if other != name),
            reverse=True,
        )
        return sum(states[: pool.state_count - 1]) + sum(bases.values())

    def of_instance(self, name: PolicyName) -> Parts:
        """The parts of an instance on each of its GPUs."""
        policy, shape = self.config.policies[name], self.shapes.get(name)
        model = policy.used_model
        if model is None:
            return ()
        if shape is None:
            return (
                (("keys and values", policy.engine.reserved_bytes),) if policy.engine.reserved_bytes else ()
            )
        needed = engine_bytes(shape, policy.engine, ITEM_BYTES[model.dtype])
        return (
            ("weights", needed.weights_bytes), ("keys and values", needed.kv_cache_bytes),
            ("activations and context", needed.rest_bytes),
        )  # fmt: skip

    def on_host_of_instance(self, name: PolicyName) -> int:
        """Bytes that an instance takes for certain: those of the place at which new weights arrive for processes of its
        engine, and on CPUs weights, and what its engine takes at the start."""
        policy, shape = self.config.policies[name], self.shapes.get(name)
        model = policy.used_model
        weights = shape.parameters * ITEM_BYTES[model.dtype] if shape is not None and model is not None else 0
        staged = weights if policy.engine.stages_weights and not policy.served_as_adapter else 0
        return staged if _device_of(policy) != "cpu" else policy.engine.reserved_bytes + weights + staged

    def _rank(self, name: PolicyName) -> RankBytes | None:
        policy, shape = self.config.policies[name], self.shapes.get(name)
        if shape is None or (load := load_of(self.config, policy, shape, self.cards)) is None:
            return None
        # A rank has the most of the policy when the gang is as small as it may be.
        ranks = policy.trainer.fewest_ranks
        load = replace(load, ranks=ranks, replicas=policy.trainer.replicas_of(ranks))
        return rank_bytes(shape, load)


def _device_key(name: PolicyName, device: str) -> str:
    return f"policies.{name}.model.device={device!r}"


def _gpus(policy: PolicyConfig) -> int:
    """The number of GPUs that an instance of the policy has for itself."""
    return policy.engine.devices if _device_of(policy) == _OF_ITS_OWN else 0


def number(device: str) -> int:
    """The number in ``cuda:1``; 0 in ``cuda``."""
    return int(device.partition(":")[2] or 0)
