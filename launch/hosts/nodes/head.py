"""The head's actor that nodes join."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ....core.actor import Actor, endpoint
from ....core.errors import ActorDead
from ....core.ref import ActorRef
from ....core.supervision.remote_node import NodeApi, RemoteNode
from ....core.telemetry import get_logger
from ...errors import TooFewNodes
from ..host_description import HostDescription
from .joining import GIVEN_UP, Dismissal, Head, Joining, NameTaken, NodeRefused, NodesApi, Offer, refusals

log = get_logger(__name__)

# A dismissed node kills what still runs there, and closes its system.
_LEAVE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Joined:
    """``dismissed``: set when the node is to end."""

    node: RemoteNode
    host: HostDescription
    dismissed: asyncio.Future[Dismissal]


class Nodes(Actor, NodesApi):
    """``joined``: the nodes that are there, by name. ``on_joined``, ``on_lost``: called with each one that comes or
    goes. ``on_refused``: called with name, address and problems of each one that may not join."""

    def __init__(self, head: Head) -> None:
        self.joined: dict[str, Joined] = {}
        self.on_joined: Callable[[Joined], None] = lambda _: None
        self.on_lost: Callable[[Joined, ActorDead], None] = lambda joined, reason: None
        self.on_refused: Callable[[str, str, list[str]], None] = lambda name, address, problems: None
        self._refusals: set[tuple[str, str, tuple[str, ...]]] = set()
        self._head = head
        self._changed = asyncio.Event()
        self._dismissal: Dismissal | None = None
        """The dismissal of all nodes, once the run ends."""

    # ------------------------------------------------------------------ endpoints

    @endpoint
    async def offer(self) -> Offer:
        return self._head.offer

    @endpoint(raises=[NameTaken, NodeRefused])
    async def join(self, joining: Joining, node: ActorRef[NodeApi]) -> None:
        name = joining.host.name
        if problems := list(refusals(self._head, joining)):
            self._report_refusal(name, node.address, problems)
            raise NodeRefused(name, problems)
        if name in self.joined:
            refusal = NameTaken(name)
            self._report_refusal(name, node.address, [refusal.problem])
            raise refusal
        dismissed = asyncio.get_running_loop().create_future()
        if self._dismissal is not None:  # it comes as the run ends
            dismissed.set_result(self._dismissal)
        joined = Joined(RemoteNode(name, node), joining.host, dismissed)
        self.joined[name] = joined
        self.background(self._watch(joined), f"watch node {name}")
        log.info("node joined", node=name, address=node.address)
        self._changed.set()
        if self._dismissal is None:
            self.on_joined(joined)

    def _report_refusal(self, name: str, address: str, problems: list[str]) -> None:
        """Reports the same refusal once: a node tries a name that is taken again and again."""
        refusal = name, address, tuple(problems)
        if refusal not in self._refusals:
            self._refusals.add(refusal)
            log.warning("node refused", node=name, address=address, problems=problems)
            self.on_refused(name, address, problems)

    async def _watch(self, joined: Joined) -> None:
        lost = await joined.node.watch()
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

    async def wait_settled(
        self, count: int, settle_s: float, wait_s: float, fits: Callable[[], Awaitable[bool]]
    ) -> None:
        """Waits until ``count`` nodes are there; or fewer, if for ``settle_s`` none has come or gone and the run
        ``fits``; ``wait_s`` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while len(self.joined) < count:
                    self._changed.clear()
                    try:
                        await asyncio.wait_for(self._changed.wait(), settle_s)
                    except TimeoutError:
                        # From Python 3.12 on wait_for may time out although a change came at the same moment.
                        if not self._changed.is_set() and await fits():
                            return

    async def dismiss(self, dismissal: Dismissal) -> None:
        """Ends all nodes, also those that join meanwhile, and waits until they have left, for 10 s at most."""
        self._dismissal = dismissal
        for joined in self.joined.values():
            joined.dismissed.set_result(dismissal)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                while self.joined:
                    self._changed.clear()
                    await self._changed.wait()
                return
        log.error("nodes do not leave", nodes=sorted(self.joined), waited_s=_LEAVE_S)
