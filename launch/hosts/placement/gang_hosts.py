"""The reasons why the ranks of a policy can't lie on the hosts of a plan."""

from collections import Counter
from collections.abc import Iterator, Sequence

from ....actors.errors import PlainGang
from ....actors.names import PolicyName
from ....actors.trainer.pool.pool_config import SharedPoolConfig
from ...config.run_config import RunConfig
from ..host_description import HostDescription
from .plan import Placed, Plan


def gang_problems(config: RunConfig, hosts: Sequence[HostDescription], plan: Plan) -> Iterator[str]:
    """A sentence for each reason; nothing if no process group is made."""
    if not isinstance(config.pool, SharedPoolConfig) or config.simulated:
        return
    gangs = [name for name, policy in config.trained.items() if policy.trainer.most_ranks > 1]
    slots = [placed for actor, placed in plan.actors.items() if actor.startswith("slot-")]
    nodes = {placed.node for placed in slots}
    if not gangs:
        return
    yield from _parts_of_one_gpu(gangs[0], slots, hosts)
    if len(nodes) < 2:
        return
    # Any slots may become a gang: the plan does not say which ones will.
    for name in gangs:
        yield from _divided_replicas(config, name, slots)
    if config.network.encrypted:
        yield str(PlainGang(gangs[0]))
    on_gpus = {placed.node for placed in slots if placed.gpus}
    drivers = {host.name: host.driver for host in hosts if host.name in on_gpus}
    if len(set(drivers.values())) > 1:
        listed = ", ".join(f"{driver or 'unknown'} on {host}" for host, driver in sorted(drivers.items()))
        yield (
            f"the ranks of policy {gangs[0]} lie on several hosts, with other versions of NVIDIA's driver: {listed}; "
            "install one version on all, or write hosts.spread=false"
        )


def _parts_of_one_gpu(
    name: PolicyName, slots: Sequence[Placed], hosts: Sequence[HostDescription]
) -> Iterator[str]:
    """NCCL identifies a device by its place on the host's bus, which all parts of a GPU share, and refuses two at one
    (`Duplicate GPU detected`, its init.cc): in the first step, behind all other checks."""
    gpus = {host.name: host.gpus for host in hosts}
    counts = Counter(
        (placed.node, gpus[placed.node][number].index) for placed in slots for number in placed.gpus
    )
    for (node, index), count in counts.items():
        if count > 1:
            yield (
                f"policies.{name}.trainer.ranks: {count} slots are parts (MIG) of GPU {index} of {node}: NCCL joins no "
                "two parts of one GPU; write ranks=1, or show the run one part of each GPU (CUDA_VISIBLE_DEVICES)"
            )


def _divided_replicas(config: RunConfig, name: PolicyName, slots: Sequence[Placed]) -> Iterator[str]:
    """The ranks of each replica are on consecutive slots."""
    trainer = config.trained[name].trainer
    size = trainer.replica_size
    of_replicas = [slots[first : first + size] for first in range(0, len(slots), size)]
    if trainer.replicas == 1 or all(len({placed.node for placed in replica}) == 1 for replica in of_replicas):
        return
    counts = Counter(placed.node for placed in slots)
    listed = ", ".join(f"{count} on {node}" for node, count in counts.items())
    yield (
        f"policies.{name}.trainer.replicas={trainer.replicas}: the {size} ranks of a replica lie on one host, and "
        f"the {len(slots)} slots do not divide so: {listed}; change ranks, replicas or pool.slots until each host has "
        "whole replicas, or write replicas=1"
    )
