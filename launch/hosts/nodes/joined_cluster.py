"""The start and the end of a run's cluster."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from ....actors.errors import ConfigError
from ....actors.run_events import NodeRefused, NodesAwaited
from ....core.supervision.node import Node
from ....core.system import ActorSystem
from ...config.run_config import RunConfig
from ...errors import Interrupted
from ...monitoring.console.run_console import RunConsole
from ...run.actor_specs import modules_of
from ...run.prepared_run import PreparedRun
from ...run.resuming import code_digests
from ...run.run_address import RunAddress
from ..host_description import HostDescription, describe_host
from ..placement.actor_needs import fewest_slots
from ..placement.nearest_plan import plan_run
from ..placement.plan import DoesNotFit
from ..placement.run_placement import place_run
from .cluster import Cluster
from .head import Nodes
from .hosts_file import SshHost
from .joining import NAME, Dismissal, Head, Offer
from .ssh import SshNodes

WAIT_S: Final = 600.0
# A node that waits for the run's next life looks for it twice a second.
_SETTLE_S: Final = 5.0
_REMIND_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """``count``: of other hosts that have to join before the actors are started. ``wait_s``: the longest wait.
    ``hosts``: those of them on which the head starts the node itself. ``fewer``: the run begins also with fewer, if it
    fits them: a restart, after which hosts may be lost."""

    count: int = 0
    wait_s: float = WAIT_S
    hosts: tuple[SshHost, ...] = ()
    fewer: bool = False


@asynccontextmanager
async def joined_cluster(
    system: ActorSystem, head_node: Node, prepared: PreparedRun, request: NodeRequest, console: RunConsole
) -> AsyncIterator[Cluster]:
    """Publishes the address of the run, waits for its nodes and places its actors. At the end the nodes are dismissed.

    Raises TooFewNodes, and DoesNotFit if the hosts are too small.
    """
    config, directory = prepared.start.config, prepared.directory
    if request.count and config.network.listen is None:
        raise ConfigError(
            f"--nodes {request.count}: other hosts can't reach this one: write network.listen=ADDRESS, its address, or "
            "network.listen=auto"
        )
    host = await asyncio.to_thread(describe_host)
    nodes = await _offer_run(system, prepared, host, console)
    ssh = SshNodes(request.hosts, RunAddress.of(system), directory.logs)
    dismissal = Dismissal("the run has failed", failed=True)
    try:
        with RunAddress.of(system).published(directory.control_address):
            await ssh.start()
            if request.count and request.fewer:
                console.ref.tell_nowait("phase", "waiting for nodes that are still there", None, None)
                fits = partial(_fits, config, host, nodes, ssh)
                await nodes.wait_settled(request.count, _SETTLE_S, request.wait_s, fits)
            elif request.count:
                await _wait_for_nodes(nodes, ssh, request, directory.control_address.absolute(), console)
            plan = partial(plan_run, config, _hosts(host, nodes), all_models=False)
            _, placement = await asyncio.to_thread(plan)
            yield Cluster(
                head_node,
                nodes,
                placement,
                config.hosts.share_gpus,
                fewest_slots(config),
                lambda event: console.ref.tell_nowait("event", event),
            )
        dismissal = Dismissal("the run has ended")
    except (Interrupted, asyncio.CancelledError):  # cancelled: it was stopped as it waited for nodes
        dismissal = Dismissal("the run was stopped")
        raise
    finally:
        await nodes.dismiss(dismissal)
        await ssh.close()


async def _offer_run(
    system: ActorSystem, prepared: PreparedRun, host: HostDescription, console: RunConsole
) -> Nodes:
    """The actor that other hosts join the run by. ``host``: this one."""
    config = prepared.start.config
    offer = Offer(
        str(prepared.directory.path.absolute()),
        config.recipe,
        system.settings,
        dict(prepared.environment),
        modules_of(config),
    )
    recipe_files = await asyncio.to_thread(code_digests, Path(config.recipe))
    nodes = Nodes(Head(host, offer, recipe_files, system.address))
    nodes.on_refused = lambda name, address, problems: console.ref.tell_nowait(
        "event", NodeRefused(name, address, problems)
    )
    await system.add(nodes, NAME)
    return nodes


def _hosts(head: HostDescription, nodes: Nodes) -> list[HostDescription]:
    return [head, *(joined.host for joined in nodes.joined.values())]


async def _fits(config: RunConfig, head: HostDescription, nodes: Nodes, ssh: SshNodes) -> bool:
    """False also if a node that ssh has started may still come."""
    if ssh.coming(nodes.joined):
        return False
    try:
        await asyncio.to_thread(place_run, config, _hosts(head, nodes))
    except DoesNotFit:
        return False
    return True


async def _wait_for_nodes(
    nodes: Nodes, ssh: SshNodes, request: NodeRequest, join: Path, console: RunConsole
) -> None:
    def progress(joined: int) -> None:
        text = f"waiting for nodes, on each host: flexmarl node --join {join}"
        if request.hosts:
            text = "waiting for nodes that were started by ssh"
        console.ref.tell_nowait("phase", text, joined, request.count)

    waits = [asyncio.create_task(nodes.wait_joined(request.count, request.wait_s, progress))]
    waits.append(asyncio.create_task(_remind(nodes, request, join, console)))
    if request.hosts:
        waits.append(asyncio.create_task(ssh.wait_failed()))
    try:
        for done in (await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED))[0]:
            done.result()
    finally:
        for task in waits:
            task.cancel()
        await asyncio.wait(waits)


async def _remind(nodes: Nodes, request: NodeRequest, join: Path, console: RunConsole) -> None:
    """Reports every 30 s for whom the run waits; until it is cancelled."""
    next_step = f"on each host that is missing: flexmarl node --join {join}"
    if request.hosts:
        missing = ", ".join(f"logs/node-{host.name}.log" for host in request.hosts)
        next_step = f"the nodes write to {missing}"
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        await asyncio.sleep(_REMIND_S)
        waited_s = round(loop.time() - began)
        awaited = NodesAwaited(sorted(nodes.joined), request.count, waited_s, request.wait_s, next_step)
        console.ref.tell_nowait("event", awaited)
