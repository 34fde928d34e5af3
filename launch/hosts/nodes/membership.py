"""A node's membership of a run, from its joining to its dismissal."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ....actors.trainer.pool.lender import LENDER, HostLender
from ....core.protocol.session import Settings
from ....core.ref import ActorRef
from ....core.supervision.node import Node
from ....core.supervision.remote_node import NodeActor, NodeApi
from ....core.supervision.system_api import FOR_EVER
from ....core.system import ActorSystem
from .joining import Dismissal, Joining, NameTaken, NodesApi

_JOIN_S: Final = 60.0
_RETRY_S: Final = 0.5


async def serve_run(
    system: ActorSystem,
    node: Node,
    head: ActorRef[NodesApi],
    joining: Joining,
    *,
    memory: Path,
    name_taken_s: float,
    joined: Callable[[], None],
) -> Dismissal:
    """Joins the run of ``head``, which starts actors on ``node`` from then on; returns when it has dismissed the node,
    and none of them runs any more. ``system``: of the node's own process, which lends the host's memory to the run's
    trainer. ``memory``: its directory, and that of all actors here. ``name_taken_s``: the longest wait for a name that
    is taken. ``joined`` is called when the node has joined.

    Raises NodeRefused or NameTaken; ActorDead or CallTimeout if the head is lost.
    """
    node_actor = NodeActor(node)
    await system.add(HostLender(joining.host.name, memory), LENDER)
    await join(head, joining, await system.add(node_actor, "node"), name_taken_s)
    joined()
    try:
        return await head.within(FOR_EVER).stay(joining.host.name)
    finally:
        await node_actor.kill_all()


async def join(
    head: ActorRef[NodesApi], joining: Joining, node: ActorRef[NodeApi], name_taken_s: float
) -> None:
    """See ``serve_run``."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + name_taken_s
    while True:
        try:
            return await head.within(_JOIN_S).join(joining, node)
        except NameTaken:
            if loop.time() >= deadline:
                raise
        await asyncio.sleep(_RETRY_S)


def given_up_within(settings: Settings) -> float:
    """Seconds after which the head has given up a node that is silent."""
    return 2 * settings.heartbeat_s * settings.missed_heartbeats
