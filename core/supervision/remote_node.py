"""Actors on another host, as processes of a ``NodeActor`` there.

    here                                          the other host
    Supervisor ── RemoteNode ── calls ──────────> NodeActor ── ProcessNode ──┬─ process
                       <── exits (a stream) ──                               └─ process

The node is lost when that stream ends: at once if its process has ended, within a few heartbeats if it is silent. Its
actors have ended then, as far as this side knows: should they still run, their successors replace them
(``protocol/incarnations.py``).
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Final, Protocol

from ..actor import Actor, endpoint
from ..base.texts import text_of
from ..errors import ActorDead, CallTimeout, FlexmarlError, LocalProtocolError, RemoteError
from ..ref import ActorRef
from ..telemetry import get_logger
from .node import Launch, Node, Running
from .system_api import FOR_EVER

log = get_logger(__name__)

# The start of a process takes milliseconds; a host that swaps takes longer.
_CALL_TIMEOUT_S: Final = 60.0
_KILL_GRACE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of an incarnation. ``how``: see ``Running.wait_exit``. ``log_tail``: see ``Running.log_tail``."""

    actor: str
    epoch: int
    how: str
    log_tail: str


class NodeApi(Protocol):
    @endpoint
    async def reserve(self, actor: str) -> str:
        """See ``Node.reserve``."""

    @endpoint
    async def launch(self, launch: Launch) -> str:
        """Starts an incarnation; returns its label."""

    @endpoint
    async def end(self, actor: str, epoch: int, at_once: bool) -> None:
        """Ends an incarnation, as SIGKILL does or as SIGTERM does; nothing if it has ended."""

    @endpoint
    async def release(self, actor: str) -> None:
        """See ``Node.release``."""

    @endpoint
    def exits(self) -> AsyncGenerator[Exit]:
        """The ends of all incarnations. For one reader."""


class NodeActor(Actor, NodeApi):
    """Starts the actors of others on ``node``, which is of this host. All of them end with it."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._running: dict[str, Running] = {}
        self._starting: dict[tuple[str, int], bool] = {}
        """Incarnations that are being started, by actor and epoch; True: they are to end at once."""
        self._ending = False
        self._none_starting = asyncio.Event()
        self._none_starting.set()
        self._exits: asyncio.Queue[Exit] = asyncio.Queue()

    @endpoint
    async def reserve(self, actor: str) -> str:
        return await self._node.reserve(actor)

    @endpoint
    async def launch(self, launch: Launch) -> str:
        self._node.check(launch)
        starting = launch.name, launch.epoch
        self._starting[starting] = self._ending
        self._none_starting.clear()
        try:
            self._running[launch.name] = running = await self._node.launch(launch)
            if self._starting[starting]:
                running.kill()
        finally:
            del self._starting[starting]
            if not self._starting:
                self._none_starting.set()
        self.background(self._watch(running), f"watch {launch.name}")
        return running.label

    async def _watch(self, running: Running) -> None:
        how = await running.wait_exit()
        running.ended.set()
        await running.wait_gone()
        self._exits.put_nowait(Exit(running.name, running.epoch, how, running.log_tail()))

    @endpoint
    async def end(self, actor: str, epoch: int, at_once: bool) -> None:
        if (actor, epoch) in self._starting:  # it has nothing to end in good order yet
            self._starting[actor, epoch] = True
        running = self._running.get(actor)
        if running is not None and running.epoch == epoch and not running.ended.is_set():
            if at_once:
                running.end()
            else:
                running.terminate()

    @endpoint
    async def release(self, actor: str) -> None:
        self._node.release(actor)

    @endpoint
    async def exits(self) -> AsyncGenerator[Exit]:
        while True:
            yield await self._exits.get()

    async def on_stop(self) -> None:
        await self.kill_all()
        self._node.close()

    async def kill_all(self) -> None:
        """Kills all actors, also those that are being started from now on, and waits until they have ended, for 2 s at
        most."""
        self._ending = True
        self._starting = dict.fromkeys(self._starting, True)
        self._kill_running()
        with suppress(TimeoutError):
            async with asyncio.timeout(_KILL_GRACE_S):
                # Killed a second time below: those that were being started have a process only now.
                await self._none_starting.wait()
                await asyncio.gather(*(running.wait_exit() for running in self._kill_running()))

    def _kill_running(self) -> list[Running]:
        alive = [running for running in self._running.values() if not running.ended.is_set()]
        for running in alive:
            running.kill()
        return alive


class RemoteRunning(Running):
    """One incarnation on another host. ``exit``: set when it has ended, or its node is lost."""

    def __init__(self, name: str, epoch: int, node: "RemoteNode") -> None:
        super().__init__(name, epoch, f"process on node {node.name}")
        self.exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._node = node

    def has_exited(self) -> bool:
        return self.exit.done()

    async def wait_exit(self) -> str:
        return (await self.exit).how

    def terminate(self) -> None:
        self._node.end(self, at_once=False)

    def end(self) -> None:
        self._node.end(self, at_once=True)

    def log_tail(self) -> str:
        return self.exit.result().log_tail if self.exit.done() else ""


class RemoteNode(Node):
    """The node of a ``NodeActor``. ``watch`` has to run for as long as the node is used."""

    def __init__(self, name: str, actor: ActorRef[NodeApi]) -> None:
        self.name = name
        self._actor = actor
        self._running: dict[str, RemoteRunning] = {}
        """The newest incarnation of each actor."""
        self._lost: ActorDead | None = None

    @property
    def lost(self) -> ActorDead | None:
        return self._lost

    @property
    def address(self) -> str:
        return self._actor.address

    async def watch(self) -> ActorDead:
        """Receives the ends of actors until the node is lost; returns the reason."""
        # One stream for all ends, and not a call for each process: it is open as long as the node lives, so that the
        # node is pinged, and its end is the loss of the node, with all actors at once.
        reason = "it left"
        try:
            async with aclosing(self._actor.within(FOR_EVER).exits()) as exits:
                async for end in exits:
                    self._handle_exit(end)
        except FlexmarlError as error:
            reason = error.reason if isinstance(error, ActorDead) else text_of(error)
        return self._lose(reason)

    def _lose(self, reason: str) -> ActorDead:
        if self._lost is None:
            self._lost = ActorDead(self._actor.name, f"node {self.name} is lost: {reason}")
            for running in self._running.values():
                self._handle_exit(Exit(running.name, running.epoch, f"has ended: {self._lost.reason}", ""))
        return self._lost

    def _handle_exit(self, end: Exit) -> None:
        running = self._running.get(end.actor)
        if running is not None and running.epoch == end.epoch and not running.exit.done():
            running.exit.set_result(end)

    def check(self, launch: Launch) -> None:
        name, address = launch.supervisor
        if address.startswith("ipc://"):
            raise LocalProtocolError(f"{name} listens on no network: no actor of another host could reach it")

    async def reserve(self, actor: str) -> str:
        """Raises OSError, and ActorDead if the node is lost."""
        return await self._answer(actor, lambda node: node.reserve(actor))

    async def launch(self, launch: Launch) -> RemoteRunning:
        """Raises OSError, and ActorDead if the node is lost."""
        # Its exit may arrive in the same message as the answer.
        running = self._running[launch.name] = RemoteRunning(launch.name, launch.epoch, self)
        try:
            label = await self._answer(launch.name, lambda node: node.launch(launch))
        except BaseException:
            # The node may have started it all the same: the answer may be late or lost, or this wait was cancelled.
            running.end()
            raise
        running.label = f"{label} on node {self.name}"
        return running

    async def _answer(self, actor: str, call: Callable[[NodeApi], Awaitable[str]]) -> str:
        if self._lost is not None:
            raise ActorDead(actor, self._lost.reason)
        try:
            return await call(self._actor.within(_CALL_TIMEOUT_S))
        except (RemoteError, CallTimeout) as error:
            raise OSError(f"node {self.name}: {text_of(error)}") from error
        except ActorDead as error:
            raise ActorDead(actor, self._lose(error.reason).reason) from error

    def end(self, running: RemoteRunning, *, at_once: bool) -> None:
        """Asks the node to end an incarnation, without an answer: as SIGKILL does, or as SIGTERM does."""
        self._send("end", running.name, running.epoch, at_once)

    def release(self, actor: str) -> None:
        self._running.pop(actor, None)
        self._send("release", actor)

    def _send(self, endpoint: str, *args: object) -> None:
        """Without an answer; nothing if the node is lost."""
        # No call: a kill is often the last step of something that was cancelled, and must not wait for another host.
        if self._lost is None:
            try:
                self._actor.tell_nowait(endpoint, *args)
            except ActorDead as error:  # ``watch`` does not know yet
                self._lose(error.reason)

    def close(self) -> None:
        """The node ends with this side, and frees its addresses itself."""
