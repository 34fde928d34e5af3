"""Actors on a network in memory: what ``ProcessNode`` does with processes, in one process and on one loop.

    network = MemoryNetwork(seed=1)
    node = MemoryNode(network, directory)
    async with (
        ActorSystem("launcher", directory, wire=network.wire("launcher")) as system,
        Supervisor(system, node) as supervisor,
    ): ...

Each actor has a system of its own, at ``memory://`` and its name, and is made from a message, as in a process. Under
``virtual_time.run`` a seed decides everything. ``kill``, ``freeze`` and ``thaw`` are SIGKILL, SIGSTOP and SIGCONT.
"""

import asyncio
import io
from collections.abc import Awaitable, Callable
from pathlib import Path

from ..actor import Actor
from ..errors import LocalProtocolError, traceback_of
from ..hosted_actor import HostedActor
from ..protocol.session import DEFAULT_SETTINGS, Settings
from ..supervision.node import Launch, Node, Running
from ..supervision.worker_init import WorkerInit, read_init, write_init
from ..system import ActorSystem
from ..telemetry import get_logger
from ..wire.memory import MemoryNetwork, lineage

log = get_logger(__name__)

_CLOSING_S = 10.0


class MemoryNode(Node):
    def __init__(
        self,
        network: MemoryNetwork,
        directory: Path,
        *,
        name: str = "node",
        settings: Settings = DEFAULT_SETTINGS,
        close_files: Callable[[Actor], Awaitable[None]] | None = None,
    ) -> None:
        """``directory``: private, of all systems of this node. ``close_files``: does for a killed actor what the kernel
        does for a killed process, if it has files that are locked or mapped; nothing that it sends arrives anywhere."""
        self.name = name
        self._network = network
        self._directory = directory
        self._settings = settings
        self._close_files = close_files
        self._running: dict[str, MemoryProcess] = {}

    def first_epoch(self, actor: str) -> int:
        known = self._running.get(actor)
        return lineage(actor) if known is None else known.epoch

    def check(self, launch: Launch) -> None:
        name, address = launch.supervisor
        if not address.startswith("memory://"):
            raise LocalProtocolError(f"{name} is not in memory: no actor of this node could answer it")

    async def reserve(self, actor: str) -> str:
        return f"memory://{actor}"

    async def launch(self, launch: Launch) -> "MemoryProcess":
        name, address = launch.supervisor
        init = WorkerInit(
            launch.actor_class,
            launch.args,
            launch.kwargs,
            {"name": name, "address": address},
            None,
            None,
            None,
            self._settings,
            launch.epoch,
            [],
            launch.log_level,
        )
        sent = read_init(io.BytesIO(write_init(init)))  # as a process gets it
        process = MemoryProcess(launch.name, sent, self._network, self._directory, self._close_files)
        self._running[launch.name] = process
        return process

    def release(self, actor: str) -> None:
        """An address takes nothing."""

    def close(self) -> None:
        """Addresses take nothing."""

    @property
    def running(self) -> list[str]:
        """The actors whose incarnation has not ended, by name."""
        return sorted(name for name, process in self._running.items() if not process.has_exited())

    def kill(self, actor: str) -> None:
        """Ends an actor as SIGKILL does. Raises KeyError if it does not run."""
        self._running[actor].end()

    def freeze(self, actor: str) -> None:
        """Stops an actor as SIGSTOP does. Raises KeyError if it does not run."""
        self._network.pause(actor)

    def thaw(self, actor: str) -> None:
        """Continues an actor as SIGCONT does; nothing if its incarnation has ended."""
        if self._network.is_paused(actor):
            self._network.resume(actor)


class MemoryProcess(Running):
    """One incarnation: its system and its actor, in a task."""

    def __init__(
        self,
        name: str,
        init: WorkerInit,
        network: MemoryNetwork,
        directory: Path,
        close_files: Callable[[Actor], Awaitable[None]] | None,
    ) -> None:
        super().__init__(name, init.epoch, f"incarnation {init.epoch & 0xFFFFFF}")
        self._network = network
        self._directory = directory
        self._init = init
        self._close_files = close_files
        self._wire = network.wire(name, init.epoch)
        self._hosted = HostedActor(name, init, owns_process=False)
        self._signal = 0
        self._stopped = False
        self._task = asyncio.create_task(self._live(), name=f"process {name}")

    def has_exited(self) -> bool:
        return self._signal > 0 or self._task.done()

    async def wait_exit(self) -> str:
        await asyncio.wait([self._task])
        if self._signal:
            return f"killed by signal {self._signal}"
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            return f"exit status 1\n{traceback_of(error)}"
        return f"exit status {0 if self._stopped else 1}"

    def terminate(self) -> None:
        if not self._network.is_paused(self.name):  # else the signal waits
            self._end(15)

    def end(self) -> None:
        self._end(9)

    def _end(self, number: int) -> None:
        if self.has_exited():
            return
        self._signal = number
        if self._wire.running:
            self._network.crash(self.name)
        self._task.cancel()

    async def _live(self) -> None:
        try:
            async with ActorSystem(
                self.name, self._directory, wire=self._wire, settings=self._init.settings
            ) as system:
                self._stopped = await self._hosted.serve(system)
        finally:
            actor = self._hosted.actor
            if self._signal and self._close_files is not None and actor is not None:
                await self._closed(self._close_files(actor))

    async def _closed(self, closing: Awaitable[None]) -> None:
        try:
            await asyncio.wait_for(closing, _CLOSING_S)
        except Exception as error:  # noqa: BLE001  # the actor's state may be anything: it was killed
            log.debug("files of a killed actor are left open", actor=self.name, error=str(error))
