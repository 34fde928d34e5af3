"""The needs of each actor of a run, from its config. Pure."""

from collections.abc import Iterator, Mapping
from typing import Final

from ....actors.names import PolicyName
from ....actors.trainer.pool.pool_config import SharedPoolConfig
from ...config.config_sections import PolicyConfig
from ...config.run_config import RunConfig
from .plan import Need

_OF_ITS_OWN: Final = "cuda"
_HEAD: Final = ("store", "router", "orchestrator")


def needs_of(config: RunConfig, weights: Mapping[PolicyName, int] | None = None) -> list[Need]:
    """The needs of all actors, by the names that ``References`` gives them. ``weights``: bytes of each policy's model,
    as far as they are known.

    An actor with ``device: cuda`` has GPUs of its own; ``cuda:1`` names that GPU of the head for all actors of the
    policy. The first rollout worker is on the head: a run can't do without any.
    """
    sizes = weights or {}
    head = [Need(name, name, on_head=True) for name in _HEAD]
    workers, spread = config.rollout.workers, config.hosts.spread
    rollout = [
        Need(f"rollout-{n}", f"rollout.workers={workers}", on_head=n == 0 or not spread)
        for n in range(workers)
    ]
    return [*head, _trainer(config, sizes), *_slots(config, sizes), *_instances(config, sizes), *rollout]


def _device_of(policy: PolicyConfig) -> str:
    """The device that the config names for the policy's model; ``cpu`` for a policy without a model, as in a
    simulation."""
    model = policy.used_model
    return "cpu" if model is None else model.device


def _trainer(config: RunConfig, weights: Mapping[PolicyName, int]) -> Need:
    """The trainer's process computes itself if the pool is static."""
    if isinstance(config.pool, SharedPoolConfig):
        return Need("trainer", "pool.name=shared", on_head=True)
    devices = {name: _device_of(policy) for name, policy in config.policies.items()}
    on_gpus = [name for name, device in devices.items() if device != "cpu"]
    on_cpu = sum(weights.get(name, 0) for name in devices if name not in on_gpus)
    named = tuple(sorted({number(device) for name in on_gpus if (device := devices[name]) != _OF_ITS_OWN}))
    if named and _OF_ITS_OWN in devices.values():  # in a process that sees all GPUs it is the first
        named = tuple(sorted({0, *named}))
    key = _device_key(on_gpus[0], devices[on_gpus[0]]) if on_gpus else "pool.name=static"
    gpu_bytes = sum(weights.get(name, 0) for name in on_gpus) if len(named) < 2 else 0
    return Need(
        "trainer", key, on_head=True, purpose="training", memory_bytes=on_cpu,
        gpus=1 if on_gpus and not named else 0, gpu_bytes=gpu_bytes, named=named,
    )  # fmt: skip


def _slots(config: RunConfig, weights: Mapping[PolicyName, int]) -> Iterator[Need]:
    """Slots of the largest policy's ranks are a gang, from the first slot on; any slots may become one. Without GPUs
    there are none: the ranks of a policy then compute fastest on the hosts with the most cores for each, as all others
    do."""
    if not isinstance(config.pool, SharedPoolConfig):
        return
    slots = config.pool.slots
    trained = config.trained
    ranks = max(policy.trainer.ranks for policy in trained.values())
    on_gpus = any(_device_of(policy) != "cpu" for policy in trained.values())
    held = max(weights.get(name, 0) // _parts(policy) for name, policy in trained.items())
    for slot in range(slots):
        gang = slot // ranks if on_gpus and ranks > 1 and slot < slots // ranks * ranks else None
        yield Need(
            f"slot-{slot}", f"pool.slots={slots}", on_head=not config.hosts.spread, purpose="training",
            gpus=int(on_gpus), gpu_bytes=held * on_gpus, memory_bytes=held * (not on_gpus), gang=gang,
        )  # fmt: skip


def fewest_slots(config: RunConfig) -> int:
    """The slots without which a policy could never be bound; 0 without a pool of slots."""
    if not isinstance(config.pool, SharedPoolConfig):
        return 0
    return max(policy.trainer.fewest_ranks for policy in config.trained.values())


def _parts(policy: PolicyConfig) -> int:
    """The number of slots that a policy's model is divided over: the base of an adapter is whole on each."""
    return 1 if policy.lora is not None else policy.trainer.ranks


def _instances(config: RunConfig, weights: Mapping[PolicyName, int]) -> Iterator[Need]:
    moving = config.balance.scope == "intra+inter"
    gpus_of = {name: _gpus(policy) for name, policy in config.policies.items()}
    for (name, *_), instances in config.served_together().items():
        policy = config.policies[name]
        gpus, device = gpus_of[name], _device_of(policy)
        if moving:  # it has the GPUs for each policy that it may move to
            gpus = gpus and max(gpus_of.values())
        named = (number(device),) if device not in ("cpu", _OF_ITS_OWN) else ()
        held = weights.get(name, 0)
        gpu_bytes = policy.engine.reserved_bytes + held // policy.engine.devices
        on_host = policy.engine.reserved_bytes + held if device == "cpu" and not policy.simulated else 0
        key = _device_key(name, device) if named else f"policies.{name}.instances={instances}"
        for instance in range(instances):
            yield Need(
                f"{name}-{instance}", key, on_head=bool(named), gpus=gpus,
                gpu_bytes=0 if device == "cpu" else gpu_bytes, memory_bytes=on_host, named=named,
            )  # fmt: skip


def _device_key(name: PolicyName, device: str) -> str:
    return f"policies.{name}.model.device={device!r}"


def _gpus(policy: PolicyConfig) -> int:
    """The number of GPUs that an instance of the policy has for itself."""
    return policy.engine.devices if _device_of(policy) == _OF_ITS_OWN else 0


def number(device: str) -> int:
    """The number in ``cuda:1``; 0 in ``cuda``."""
    return int(device.partition(":")[2] or 0)
