"""The reasons why the ranks of a policy can't lie on the hosts of a plan."""

from collections.abc import Iterator, Sequence

from ....actors.errors import PlainGang
from ....actors.trainer.pool.pool_config import SharedPoolConfig
from ...config.run_config import RunConfig
from ..host_description import HostDescription
from .plan import Plan


def gang_problems(config: RunConfig, hosts: Sequence[HostDescription], plan: Plan) -> Iterator[str]:
    """A sentence for each reason; nothing if all slots are on one host, or no process group is made."""
    if not isinstance(config.pool, SharedPoolConfig) or config.simulated:
        return
    gangs = [name for name, policy in config.trained.items() if policy.trainer.most_ranks > 1]
    slots = [placed for actor, placed in plan.actors.items() if actor.startswith("slot-")]
    nodes = {placed.node for placed in slots}
    if not gangs or len(nodes) < 2:
        return
    # Any slots may become a gang: the plan does not say which ones will.
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
