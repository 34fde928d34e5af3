"""The head's actor that nodes join."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ...core.actor import Actor, endpoint
from ...core.errors import ActorDead
from ...core.ref import ActorRef
from ...core.supervision.remote_node import NodeApi, RemoteNode
from ...core.telemetry import get_logger
from ..errors import TooFewNodes
from ..host_description import HostDescription
from .joining import GIVEN_UP, Dismissal, Head, Joining, NodeRefused, NodesApi, Offer, refusals

log = get_logger(__name__)

# A dismissed node kills what still runs there, and closes its system.
_LEAVE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Joined:
    """``dismissed``: set when the node is to end. ``left``: it has, or it is lost."""

    node: RemoteNode
    host: HostDescription
    dismissed: asyncio.Future[Dismissal]
    left: asyncio.Event


class Nodes(Actor, NodesApi):
    """``joined``: the nodes that are there, by name. ``on_joined``, ``on_lost``: called with each one that comes or
    goes."""

    def __init__(self, head: Head) -> None:
        self.joined: dict[str, Joined] = {}
        self.on_joined: Callable[[Joined], None] = lambda _: None
        self.on_lost: Callable[[Joined, ActorDead], None] = lambda joined, reason: None
        self._head = head
        self._changed = asyncio.Event()

    # ------------------------------------------------------------------ endpoints

    @endpoint
    async def offer(self) -> Offer:
        return self._head.offer

    @endpoint(raises=[NodeRefused])
    async def join(self, joining: Joining, node: ActorRef[NodeApi]) -> None:
        name = joining.host.name
        if problems := list(refusals(self._head, joining, list(self.joined))):
            log.warning("node refused", node=name, address=node.address, problems=problems)
            raise NodeRefused(name, problems)
        dismissed = asyncio.get_running_loop().create_future()
        joined = Joined(RemoteNode(name, node), joining.host, dismissed, asyncio.Event())
        self.joined[name] = joined
        self.background(self._watch(joined), f"watch node {name}")
        log.info("node joined", node=name, address=node.address)
        self._changed.set()
        self.on_joined(joined)

    async def _watch(self, joined: Joined) -> None:
        lost = await joined.node.watch()
        joined.left.set()
        del self.joined[joined.node.name]
        self._changed.set()
        if not joined.dismissed.done():  # a node that was only silent ends when it can be reached again
            joined.dismissed.set_result(GIVEN_UP)
            log.warning("node lost", node=joined.node.name, reason=lost.reason)
            self.on_lost(joined, lost)

    @endpoint
    async def stay(self, name: str) -> Dismissal:
        joined = self.joined.get(name)
        return GIVEN_UP if joined is None else await asyncio.shield(joined.dismissed)

    # ------------------------------------------------------------------ for the run

    async def wait_joined(self, count: int, wait_s: float, progress: Callable[[int], None]) -> None:
        """Waits until ``count`` nodes are there. ``progress``: called with their number. Raises TooFewNodes after
        ``wait_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while len(self.joined) < count:
                    progress(len(self.joined))
                    self._changed.clear()
                    await self._changed.wait()
                return
        raise TooFewNodes(count, sorted(self.joined), wait_s)

    async def dismiss(self, dismissal: Dismissal) -> None:
        """Ends all nodes, and waits until they have left, for 10 s at most."""
        leaving = list(self.joined.values())
        for joined in leaving:
            joined.dismissed.set_result(dismissal)
        waits = [asyncio.ensure_future(joined.left.wait()) for joined in leaving]
        if waits:
            for late in (await asyncio.wait(waits, timeout=_LEAVE_S))[1]:
                late.cancel()
        if self.joined:
            log.error("nodes do not leave", nodes=sorted(self.joined), waited_s=_LEAVE_S)
