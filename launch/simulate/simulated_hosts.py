"""Hosts of a simulated run that join it as real ones do: a node's process on each, with actors in memory.

    head                                    host-1
    Nodes   <──── join, stay ─────────────  node (``hosts/nodes/membership.py``)
    RemoteNode ── launch, end ───────────>  NodeActor ── MemoryNode ──┬─ actor
              <── exits ─────────────────                             └─ actor

The process of a node that was dismissed by a loss, or was killed, starts again, as ``flexmarl node --again``.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Final

from ...core.errors import FlexmarlError, is_loss
from ...core.pacing import Pacing, pacing
from ...core.protocol.session import Settings
from ...core.system import ActorSystem
from ...core.testing.memory_node import MemoryNode
from ...core.wire.memory import MemoryNetwork
from ..hosts.host_description import HostDescription
from ..hosts.nodes.joining import NAME, Joining, NameTaken, NodesApi
from ..hosts.nodes.membership import given_up_within, serve_run

PROCESS: Final = "node"
"""The name of a node's own process."""

_START_S: Final = 0.2
"""Seconds from the end of a node's process to its next start."""


def describe(name: str) -> HostDescription:
    """A host with 8 cores, 1 TiB of memory and no GPU, whose versions are those of any other simulated host."""
    return HostDescription(name, 8, 1 << 40, (), "", "", 0, 0, "", {})


class SimulatedHost:
    """``node``: of its actors. ``head``: the address of the head's system. ``links``: of the node's process; None: its
    transfers take no time."""

    def __init__(
        self,
        network: MemoryNetwork,
        node: MemoryNode,
        settings: Settings,
        head: str,
        links: Pacing | None = None,
    ) -> None:
        self.name = node.name
        self.node = node
        self._network = network
        self._settings = settings
        self._head = head
        self._links = links
        self._powered = asyncio.Event()
        self._powered.set()
        self._lives = 0
        self._life: asyncio.Task[bool] | None = None

    async def run(self) -> None:
        """Returns when the run has ended. Raises NodeRefused."""
        try:
            while True:
                await self._powered.wait()
                self._life = asyncio.create_task(self._live(), name=f"node {self.name}")
                await asyncio.wait([self._life])
                if not self._life.cancelled() and self._life.result():
                    return
                await asyncio.sleep(_START_S)
        finally:
            if self._life is not None:
                self._life.cancel()
                await asyncio.wait([self._life])

    async def _live(self) -> bool:
        """One process of the node. True if the run has ended."""
        pacing.set(self._links)  # in the tasks of this process alone
        wire = self._network.wire(f"{self.name}/{PROCESS}")
        try:
            async with ActorSystem(
                PROCESS, self._own_directory(), wire=wire, settings=self._settings
            ) as system:
                head = system.ref(NAME, self._head, NodesApi)
                dismissal = await serve_run(
                    system,
                    self.node,
                    head,
                    Joining(describe(self.name), {}, self._head, ""),
                    memory=self.node.directory,
                    name_taken_s=given_up_within(self._settings),
                    joined=lambda: None,
                )
                return not dismissal.failed
        except NameTaken:
            return False
        except FlexmarlError as error:
            if not is_loss(error):
                raise
            return False
        finally:
            self.node.close()

    def _own_directory(self) -> Path:
        """A new one for each process, as on a real host; that of the actors is one for all hosts."""
        self._lives += 1
        directory = self.node.directory / f"{self.name}-{self._lives}"
        directory.mkdir(mode=0o700)
        return directory

    def kill(self) -> None:
        """Ends the node's process as SIGKILL does, and its actors with it."""
        self._crash(silently=False)

    def power_off(self) -> None:
        """All processes end, and their peers notice nothing; none starts before ``power_on``."""
        self._powered.clear()
        self._crash(silently=True)

    def power_on(self) -> None:
        """Lets the node's process start again after ``power_off``. Without effect on a host that has power."""
        self._powered.set()

    def _crash(self, *, silently: bool) -> None:
        with suppress(KeyError):  # it is just being started again
            self._network.crash(f"{self.name}/{PROCESS}", silently=silently)
        if self._life is not None:
            self._life.cancel()
        if silently:
            self.node.power_off()
        else:
            self.node.close()
