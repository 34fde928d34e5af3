"""Actors on a network in memory: what ``ProcessNode`` does with processes, in one process and on one loop.

    network = MemoryNetwork(seed=1)
    node = MemoryNode(network, directory)
    async with (
        ActorSystem("launcher", directory, wire=network.wire("launcher")) as system,
        Supervisor(system, node) as supervisor,
    ): ...

Each actor has a system of its own, at ``memory://node/actor``, and is made from a message, as in a process. Under
``virtual_time.run`` a seed decides everything. ``kill``, ``freeze`` and ``thaw`` are SIGKILL, SIGSTOP and SIGCONT; the
network cuts and pauses the host, which has the node's name. On another host than its supervisor's it belongs to a
``NodeActor`` there (``supervision/remote_node.py``), as with processes.
"""

import asyncio
import io
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from pathlib import Path

from ..actor import Actor
from ..base.texts import traceback_of
from ..errors import LocalProtocolError
from ..pacing import Pacing, pacing
from ..protocol.session import DEFAULT_SETTINGS, Settings
from ..supervision.node import Launch, Node, Running
from ..supervision.worker_init import WorkerInit, read_init, write_init
from ..system import ActorSystem
from ..telemetry import get_logger
from ..wire.memory import MemoryNetwork, MemoryWire
from ..worker.hosted_actor import HostedActor

log = get_logger(__name__)

_CLOSING_S = 10.0


class MemoryNode(Node):
    """A node whose actors run in this process and reach each other through a ``MemoryNetwork``."""

    def __init__(
        self,
        network: MemoryNetwork,
        directory: Path,
        *,
        name: str = "node",
        settings: Settings = DEFAULT_SETTINGS,
        close_files: Callable[[Actor], Awaitable[None]] | None = None,
        links_of: Callable[[str], Pacing | None] = lambda actor: None,
    ) -> None:
        """``name``: of the node and its host. ``directory``: private, of all its systems. ``close_files``: does for a
        killed actor what the kernel does for a killed process, if it has files that are locked or mapped; nothing that
        it sends arrives anywhere. ``links_of``: those that an actor's transfers take the time of; None: they take
        none."""
        self.name = name
        self._network = network
        self.directory = directory
        self._settings = settings
        self._close_files = close_files
        self._links_of = links_of
        self._running: dict[str, MemoryProcess] = {}

    def check(self, launch: Launch) -> None:
        name, address = launch.supervisor
        if not address.startswith("memory://"):
            raise LocalProtocolError(f"{name} is not in memory: no actor of this node could answer it")

    async def reserve(self, actor: str) -> str:
        return f"memory://{self._wire_name(actor)}"

    def _wire_name(self, actor: str) -> str:
        return f"{self.name}/{actor}"

    async def launch(self, launch: Launch) -> "MemoryProcess":
        init = WorkerInit.of(launch, self._settings)
        sent = read_init(io.BytesIO(write_init(init)))  # as a process gets it
        wire = self._network.wire(self._wire_name(launch.name), launch.epoch)
        context = copy_context()
        context.run(pacing.set, self._links_of(launch.name))
        process = MemoryProcess(launch.name, sent, wire, self, context)
        self._running[launch.name] = process
        return process

    def release(self, actor: str) -> None:
        """An address takes nothing."""

    def close(self) -> None:
        """Ends the actors that still run."""
        for process in self._running.values():
            process.signalled(9)

    async def wait_closed(self) -> None:
        """Waits until all actors that ``close`` or a kill has ended are gone, with their files."""
        for process in self._running.values():
            await process.wait_closed()

    @property
    def running(self) -> list[str]:
        """The actors whose incarnation has not ended, by name."""
        return sorted(name for name, process in self._running.items() if not process.has_exited())

    def kill(self, actor: str) -> None:
        """Ends an actor as SIGKILL does. Raises KeyError if it does not run."""
        self._running[actor].signalled(9)

    def freeze(self, actor: str) -> None:
        """Stops an actor as SIGSTOP does. Raises KeyError if it does not run."""
        self._network.pause(self._wire_name(actor))

    def thaw(self, actor: str) -> None:
        """Continues an actor as SIGCONT does; nothing if its incarnation has ended."""
        if self._network.is_paused(self._wire_name(actor)):
            self._network.resume(self._wire_name(actor))

    def power_off(self) -> None:
        """Ends all actors as a loss of power does: their peers notice nothing."""
        for process in self._running.values():
            process.signalled(9, silently=True)

    async def close_files(self, actor: Actor) -> None:
        """Does for a killed actor what the kernel does for a killed process. Raises what the given function raises."""
        if self._close_files is not None:
            await self._close_files(actor)


class MemoryProcess(Running):
    """One incarnation: its system and its actor, in a task."""

    def __init__(
        self, name: str, init: WorkerInit, wire: MemoryWire, node: MemoryNode, context: Context
    ) -> None:
        """``context``: of all tasks of the actor."""
        super().__init__(name, init.epoch, f"incarnation {init.epoch & 0xFFFFFF}")
        self._init = init
        self._wire = wire
        self._node = node
        self._hosted = HostedActor(name, init, owns_process=False)
        self._signal = 0
        self._stopped = False
        self._task = asyncio.create_task(self._live(), name=f"process {name}", context=context)
        self._task.add_done_callback(_take_error)  # its supervisor may have given it up before

    def has_exited(self) -> bool:
        return self._signal > 0 or self._task.done()

    async def wait_exit(self) -> str:
        await self.wait_closed()
        if self._signal:
            return f"killed by signal {self._signal}"
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            return f"exit status 1\n{traceback_of(error)}"
        return f"exit status {0 if self._stopped else 1}"

    async def wait_closed(self) -> None:
        """Waits until the actor has ended and its files are closed. Raises nothing of the actor."""
        await asyncio.wait([self._task])

    def terminate(self) -> None:
        self.signalled(15)

    def end(self) -> None:
        self.signalled(9)

    def signalled(self, number: int, *, silently: bool = False) -> None:
        """It ends now; nothing if it has ended, or if it is stopped and the signal waits."""
        if self._signal or self._task.done() or (number == 15 and self._wire.paused):
            return
        self._signal = number
        if self._wire.running:
            self._wire.crash(silently=silently)
        self._task.cancel()

    async def _live(self) -> None:
        try:
            async with ActorSystem(
                self.name, self._node.directory, wire=self._wire, settings=self._init.settings
            ) as system:
                self._stopped = await self._hosted.serve(system)
        finally:
            # Killed or failed: no ``on_stop`` was called, and a process would have ended.
            if not self._stopped and (actor := self._hosted.actor) is not None:
                await self._close_files(actor)

    async def _close_files(self, actor: Actor) -> None:
        try:
            await asyncio.wait_for(self._node.close_files(actor), _CLOSING_S)
        except Exception as error:  # noqa: BLE001  # the actor's state may be anything: it was killed
            log.debug("files of a killed actor are left open", actor=self.name, error=str(error))


def _take_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
