"""The placement of a run: its config, the hosts that it has, and the plan."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...config.run_config import RunConfig
from ..host_description import HostDescription, describe_host, version_problems
from .actor_needs import needs_of
from .gang_hosts import gang_problems
from .model_memory import known_weights
from .place import place
from .plan import DoesNotFit, Plan


@dataclass(frozen=True, slots=True)
class RunPlacement:
    """``hosts``: those of the plan, the head first."""

    hosts: tuple[HostDescription, ...]
    plan: Plan

    def own_gpus(self) -> dict[str, tuple[str, ...]]:
        """The UUIDs of each actor's GPUs, for the actors whose processes see no others."""
        gpus = {host.name: host.gpus for host in self.hosts}
        return {
            actor: tuple(gpus[placed.node][number].uuid for number in placed.gpus)
            for actor, placed in self.plan.actors.items()
            if placed.gpus and not placed.sees_all
        }


def place_here(config: RunConfig) -> RunPlacement:
    """Places all actors on this host. Raises DoesNotFit."""
    return place_run(config, [describe_host()])


def like_this_host(count: int) -> list[HostDescription]:
    """This host, and others that are made up: as large as this one."""
    host = describe_host()
    made_up = (
        replace(host, name=f"node-{n}", gpus=tuple(replace(gpu, uuid=f"{gpu.uuid}-{n}") for gpu in host.gpus))
        for n in range(1, count + 1)
    )
    return [host, *made_up]


def place_run(config: RunConfig, hosts: Sequence[HostDescription]) -> RunPlacement:
    """Places all actors; the first host is the head. Raises DoesNotFit, also for hosts that don't fit each other."""
    if problems := [*_same_names(hosts), *version_problems(hosts)]:
        raise DoesNotFit(problems)
    needs = needs_of(config, known_weights(config))
    plan = place(needs, hosts, hosts[0].name, share_gpus=config.hosts.share_gpus)
    if problems := list(gang_problems(config, hosts, plan)):
        raise DoesNotFit(problems)
    return RunPlacement(tuple(hosts), plan)


def _same_names(hosts: Sequence[HostDescription]) -> Iterator[str]:
    for name, count in Counter(host.name for host in hosts).items():
        if count > 1:
            yield f"{count} hosts have the name {name}: each needs one of its own"
