"""An actor system: the actors of one process, and its calls to the actors of others.

    async with ActorSystem("service") as system:
        greeter = await system.spawn(Greeter, "greeter")                  # in this process
        worker = await system.spawn(Worker, "worker", process=True)       # in one of its own
        await greeter.api.greet("world")

It lives on the loop that is running and touches nothing global: no signal handler, no logging root, no
event-loop policy, no os.environ.
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, overload

from .actor import Actor, DeadActor
from .delivery.connection import Peer, PeerStatistics
from .delivery.mailbox import Mailbox, MailboxStatistics
from .delivery.peers import Network
from .errors import (
    ActorDead,
    ActorFailed,
    ActorNotFound,
    CallTimeout,
    FlexmarlError,
    LocalProtocolError,
    SystemClosed,
    Unreachable,
    text_of,
    traceback_of,
)
from .names import checked_name
from .protocol.reply_cache import ReplyCacheStatistics
from .protocol.session import DEFAULT_SETTINGS, Settings
from .ref import DEFAULT_TIMEOUT_S, ActorRef
from .supervision.monitors import Fates
from .supervision.restart_policy import Intensity, Strategy
from .supervision.supervisor import Supervisor
from .supervision.system_actor import SystemActor
from .telemetry import get_logger
from .wire.curve import GateStatistics, Keys
from .wire.wire import Wire
from .wire.zeromq import Tcp, ZmqWire, ipc_address

log = get_logger(__name__)

Api = TypeVar("Api")
AnyActor = TypeVar("AnyActor", bound=Actor)
Setup = TypeVar("Setup")

# Enough for what goes away by itself, not for what comes back each time: that is told within seconds.
THREE_A_MINUTE = Intensity(max_restarts=3, period_s=60.0)

# Closing waits so long for cancelled calls, and for each actor's on_stop. Shorter than the supervisor's patience
# with a process that was asked to stop: the log says what hung before the process is killed.
_CLOSE_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class SystemStatistics:
    """``refused_messages``: arrived and could not be understood. ``answers``: what is remembered of idempotent calls,
    None where none was served. ``clients``: who was let in over TCP, and who was not; None where nobody is asked."""

    mailboxes: dict[str, MailboxStatistics]
    peers: list[PeerStatistics]
    refused_messages: int
    answers: ReplyCacheStatistics | None
    clients: GateStatistics | None


class ActorSystem:
    def __init__(
        self,
        name: str,
        directory: Path | None = None,
        *,
        tcp: Tcp | None = None,
        keys: Keys | None = None,
        wire: Wire | None = None,
        settings: Settings = DEFAULT_SETTINGS,
        intensity: Intensity = THREE_A_MINUTE,
        log_directory: Path | None = None,
    ) -> None:
        """``directory``: private (0700) to the run's user, for the system's socket, keys and journal; None: one is
        made, and removed at the end. The system listens on an ipc socket there, or where ``tcp`` says. ``keys``: for
        connecting to systems that listen on TCP. ``wire``: another way to reach peers (``wire_memory``).
        Raises ValueError where ``name`` can't be part of a file's name; nor can an actor have such a one.

        Of actors that ``spawn`` starts: ``intensity``: how often they are restarted before ``failure`` is set;
        ``log_directory``: for the output of those in processes, None: ``directory``.
        """
        self.name = checked_name(name)
        self.settings = settings
        self.tcp = tcp
        self.keys = keys if tcp is None or tcp.keys is None else tcp.keys
        self._given_directory = directory
        self._given_wire = wire
        self._intensity = intensity
        self._log_directory = log_directory
        self._mailboxes: dict[str, Mailbox] = {}
        self._actors: dict[str, Actor] = {}
        self._starting: dict[str, BaseException | None] = {}
        """Actors whose ``on_start`` runs, and what their background work has raised already."""
        self._expected: set[str] = set()
        self._background: dict[asyncio.Task[None], Actor] = {}
        self.fates = Fates(self)
        self.supervisors: list[Supervisor] = []
        """Of this system's actors and processes; each is asked what becomes of an actor that has failed."""
        self._own_supervisor: Supervisor | None = None
        self._upstream: list[ActorRef[SystemActor]] = []
        self._entered = self._closed = False

    # ------------------------------------------------------------------ from start to end

    async def __aenter__(self) -> Self:
        if self._entered:
            raise SystemClosed(f"{self.name} has been used: make another ActorSystem")
        self._entered = True
        self._loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[BaseException] = self._loop.create_future()
        self.directory = self._given_directory or Path(tempfile.mkdtemp(prefix="flexmarl-"))
        try:
            self._start_network()
            self.process = SystemActor(self)
            await self.add(self.process, "system")
        except BaseException:
            self._remove_directory()
            raise
        return self

    def _start_network(self) -> None:
        wire = self._given_wire
        journal = self.directory / f"{self.name}.answers"
        if wire is None:
            if self.tcp is not None and self.keys is None and not self.tcp.plain:
                self.keys = Keys.make()
                self.keys.save(self.keys_file)
            listen = self.tcp or ipc_address(self.directory, self.name)
            wire = ZmqWire(listen, self.keys)
        self._wire = wire
        self._network = Network(self.name, wire, self.settings, self._mailboxes)
        self._network.on_crash = self._crashed
        # A directory of this system's own ends with it: nothing in it is for a later incarnation.
        self._network.start(None if self._given_directory is None else journal)

    def _crashed(self) -> None:
        """As if this process had been killed: whatever runs here ends, and nothing is stopped in good order."""
        self._closed = True
        killed = SystemClosed(f"{self.name} was killed")
        for mailbox in self._mailboxes.values():
            mailbox.fail(killed)
        for task in self._background:
            task.cancel()
        for supervisor in self.supervisors:
            supervisor.crashed()
        self._actors = {"system": self.process}  # its on_stop alone is of the runtime
        if not self.failure.done():
            self.failure.set_result(killed)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Closes everything, whatever goes wrong on the way; raises the first error, if it is not leaving with one."""
        first: BaseException | None = None
        try:
            await self._network.wait_tells_done(_CLOSE_GRACE_S)
            if self._own_supervisor is not None:
                try:
                    await self._own_supervisor.__aexit__(kind, error, trace)
                except Exception as raised:  # noqa: BLE001  # raised below: everything else is closed first
                    first = raised
            await self._tell_watchers()
            self._closed = True
            closed = SystemClosed(f"{self.name} is closed")
            tasks = [task for mailbox in self._mailboxes.values() for task in mailbox.fail(closed)]
            tasks += self._background
            for task in tasks:
                task.cancel()
            await self._settled(tasks)
            raised_here = await self._stop_actors()
            first = first or raised_here
        finally:
            self._closed = True
            self.failure.cancel()
            self._network.close()
            self._remove_directory()
        if first is not None and error is None:
            raise first

    async def _stop_actors(self) -> BaseException | None:
        """Runs every ``on_stop``, the newest actor's first; the first error that one raised."""
        first = None
        for name in reversed(self._mailboxes):
            raised = await self._stop_actor(name)
            first = first or raised
        return first

    async def _stop_actor(self, name: str) -> BaseException | None:
        """Runs ``on_stop`` of what serves under ``name``; what it raised."""
        actor = self._actors.pop(name, None)
        if actor is None:
            return None
        stopping = self._loop.create_task(actor.on_stop(), name=f"{name}.on_stop")
        await self._settled([stopping])
        if not stopping.done():
            stopping.cancel()
        elif not stopping.cancelled() and (raised := stopping.exception()) is not None:
            log.error("on_stop failed", system=self.name, actor=name, error=traceback_of(raised))
            return raised
        return None

    async def _tell_watchers(self) -> None:
        """All actors here stop in good order: whoever watches one from another system is told."""
        for task in self._background:  # those that watch from here stop too
            task.cancel()
        waiting = self.fates.pending()
        for name in list(self._actors):
            self.fates.announce(name, f"{self.name} was closed", stopped=True)
        if waiting:
            await asyncio.wait(waiting, timeout=_CLOSE_GRACE_S)

    async def _settled(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Waits for ``tasks`` to end, and names in the log those that do not."""
        late = (await asyncio.wait(tasks, timeout=_CLOSE_GRACE_S))[1] if tasks else ()
        for task in late:
            log.warning(
                "did not end in time", system=self.name, task=task.get_name(), waited_s=_CLOSE_GRACE_S
            )

    def _remove_directory(self) -> None:
        if self._given_directory is None:
            shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def address(self) -> str:
        return self._network.address

    @property
    def keys_file(self) -> Path:
        """Where the keys of a system that listens on TCP are, for its processes and for clients from outside."""
        return self.directory / "keys.json"

    async def allow(self, public_key: str) -> None:
        """Lets in one more client over TCP, by its ``Keys.client_public``: here, and in the processes that this system
        has started or will start. Raises InvalidKeys, and what a call to one of these processes raises."""
        if self.keys is None or not isinstance(self._wire, ZmqWire):
            return
        self.keys = self.keys.allowing(public_key)
        self._wire.allow(public_key)
        if self.keys_file.exists():
            self.keys.save(self.keys_file)
        for supervisor in self.supervisors:
            await supervisor.allow(public_key)

    # ------------------------------------------------------------------ actors of this process

    async def add(self, actor: AnyActor, name: str) -> ActorRef[AnyActor]:
        """Starts ``actor`` in this process under ``name``. Raises ValueError where the name is none or is taken,
        SystemClosed."""
        self._check_running()
        is_taken = self.has_actor(checked_name(name)) and name not in self._expected
        if is_taken or name in self._starting:
            raise ValueError(f"{self.name} already has an actor named {name!r}")
        await self._start_actor(actor, name)
        self._expected.discard(name)
        mailbox = self._mailboxes.setdefault(name, Mailbox(name, self.name, self._network))
        mailbox.open(actor)
        return self.ref(name, self.address, type(actor))

    def expect(self, name: str) -> None:
        """What is asked of an actor of that name waits, from now on, for ``add`` to have started it."""
        self._expected.add(checked_name(name))
        self._mailboxes[name] = Mailbox(name, self.name, self._network)

    def _check_running(self) -> None:
        if not self._entered:
            raise SystemClosed(f"{self.name} has not been entered: async with ActorSystem(...) as system")
        if self._closed:
            raise SystemClosed(f"{self.name} is closed")

    def has_actor(self, name: str) -> bool:
        """Whether there is one, or its supervisor is going to restart it."""
        return name in self._mailboxes

    async def _start_actor(self, actor: Actor, name: str) -> None:
        actor.system = actor._runtime = self
        actor.ref = self.ref(name, self.address, type(actor))
        self._starting[name] = None
        try:
            await actor.on_start()
            if (raised := self._starting[name]) is not None:
                raise raised
            self._check_running()  # it may have been closed meanwhile
        except BaseException:
            self._cancel_background(actor)
            raise
        finally:
            del self._starting[name]
        self._actors[name] = actor

    async def remove(self, name: str) -> None:
        """Stops an actor for good, in good order: its calls are cancelled, ``on_stop`` runs; raises what that raised.
        Actors that ``spawn`` has started in processes too. Raises KeyError where there is none of that name,
        LocalProtocolError where the actor itself asks for it: its end would be the end of whoever waits for it."""
        if self._runs_within(name):
            raise LocalProtocolError(f"actor {name} can't remove itself: let another one do it")
        for supervisor in self.supervisors:
            if supervisor.owns(name):
                await supervisor.stop(name)
                return
        if name not in self._mailboxes:
            raise KeyError(name)
        raised = await self.halt(name)
        self.bury(name, ActorDead(name, f"{self.name} stopped it"))
        if raised is not None:
            raise raised

    def _runs_within(self, name: str) -> bool:
        """Whether the running task is one of the actor's own."""
        task = asyncio.current_task()
        mailbox = self._mailboxes.get(name)
        if mailbox is not None and mailbox.runs_in(task):
            return True
        actor = None if task is None else self._background.get(task)
        return actor is not None and actor is self._actors.get(name)

    async def halt(self, name: str) -> BaseException | None:
        """Stops an actor in good order, if it runs; what its ``on_stop`` raised. What is asked of it from now on waits
        for ``restart`` or ``bury``."""
        actor = self._actors.get(name)
        if actor is None:
            return None
        reason = f"{self.name} stopped it"
        self.fates.ends(name, reason, stopped=True)
        await self._settled(
            self._mailboxes[name].fail(ActorDead(name, reason)) + self._cancel_background(actor)
        )
        raised = await self._stop_actor(name)
        self.fates.announce(name, reason, stopped=True)
        return raised

    def bury(self, name: str, error: FlexmarlError) -> None:
        """Nothing will serve under ``name`` any more: whatever waits for that raises ActorDead."""
        mailbox = self._mailboxes.pop(name, None)
        if mailbox is not None:
            mailbox.fail(error)

    async def restart(self, name: str, actor: Actor) -> None:
        """Puts ``actor`` in the place of one that has failed: references to it go on working, and what arrived
        meanwhile is served."""
        await self._start_actor(actor, name)
        self._mailboxes[name].open(actor)

    def fail(self, name: str, error: BaseException) -> None:
        """An actor has failed: the calls that are with it raise ActorDead now, whoever watches it is told, and its
        supervisor decides what becomes of it. Without one, ``failure`` is set: whoever runs the system waits for it."""
        actor = self._actors.pop(name)
        words = f"{type(error).__name__}: {text_of(error)}"
        failed = ActorFailed(name, words, traceback_of(error))
        self._mailboxes[name].fail(failed)
        self._cancel_background(actor)
        self.fates.announce(name, words, stopped=False)
        if any(supervisor.actor_failed(name, error) for supervisor in self.supervisors):
            return
        self.bury(name, failed)
        self._set_failure(error, name)

    def _set_failure(self, error: BaseException, name: str) -> None:
        if self.failure.done():
            log.error("a second actor failed", system=self.name, actor=name, error=traceback_of(error))
        else:
            self.failure.set_result(error)

    def run_background(self, actor: Actor, work: Coroutine[Any, Any, None], name: str) -> None:
        """See ``Actor.background``."""
        task = self._loop.create_task(work, name=f"{type(actor).__name__}.{name}")
        self._background[task] = actor
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        actor = self._background.pop(task)
        name = actor.ref.name
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._actors.get(name) is actor and not self._closed:
            self.fail(name, error)
        elif name in self._starting and self._starting[name] is None and not self._closed:
            self._starting[name] = error  # its start fails with this
        else:  # it is ending already
            log.error("background work failed", task=task.get_name(), error=traceback_of(error))

    def _cancel_background(self, actor: Actor) -> list[asyncio.Task[None]]:
        tasks = [task for task, owner in self._background.items() if owner is actor]
        for task in tasks:
            task.cancel()
        return tasks

    # ------------------------------------------------------------------ finding others

    def peer(self, address: str) -> Peer:
        """For asking something of the system at ``address``. Raises SystemClosed, or why it is dead."""
        return self._network.peer(address)

    def watch_process(self, address: str) -> None:
        """Somebody here will say why the process at ``address`` ended, by ``process_ended``."""
        self._network.watch_process(address)

    def process_ended(self, address: str, error: FlexmarlError, *, for_good: bool) -> None:
        """What was asked of the process at ``address`` raises ``error``; ``for_good``: and all that will be."""
        self._network.process_ended(address, error, for_good=for_good)

    def statistics(self) -> SystemStatistics:
        return SystemStatistics(
            {name: mailbox.statistics() for name, mailbox in self._mailboxes.items()},
            [peer.statistics() for peer in self._network.peers],
            self._network.refused_messages,
            self._network.answers(),
            self._wire.clients() if isinstance(self._wire, ZmqWire) else None,
        )

    def ref(self, name: str, address: str, api: type[Api] | None = None) -> ActorRef[Api]:
        return ActorRef(name, address, self._network, api)

    @overload
    async def spawn(
        self, actor_class: str, name: str, setup: object = None, *, process: bool = False
    ) -> ActorRef[Any]: ...
    @overload
    async def spawn(
        self,
        actor_class: type[AnyActor],
        name: str,
        setup: Mapping[str, Any] | None = None,
        *,
        process: bool = False,
    ) -> ActorRef[AnyActor]: ...
    @overload
    async def spawn(
        self, actor_class: Callable[[Setup], AnyActor], name: str, setup: Setup, *, process: bool = False
    ) -> ActorRef[AnyActor]: ...
    async def spawn(
        self, actor_class: Any, name: str, setup: object = None, *, process: bool = False
    ) -> ActorRef[Any]:
        """Starts an actor that is restarted when it fails, under this system's own supervisor (one for one).

        ``actor_class``: a class, or its import path (``package.module:Class``). ``setup``: the keyword arguments of its
        constructor as a mapping, or its single argument as any other plain data (a frozen dataclass, say).
        The reference of a class given by its path knows no types: ask ``lookup(name, Class)`` for one that does.
        ``process``: in a new process, which inherits this one's environment. When it may not be restarted any more,
        ``failure`` is set to TooManyRestarts. Raises what ``Supervisor.spawn`` raises.
        """
        self._check_running()
        if self._own_supervisor is None:
            self._own_supervisor = own = Supervisor(
                self, self.directory, self._log_directory or self.directory, None,
                strategy=Strategy.ONE_FOR_ONE, intensity=self._intensity, name="system-supervisor",
                directory_is_private=self._given_directory is None,
            )  # fmt: skip
            await own.__aenter__()
            own.death.add_done_callback(self._supervisor_gave_up)
        return await self._own_supervisor.spawn(actor_class, name, setup, process=process)

    def _supervisor_gave_up(self, death: asyncio.Future[FlexmarlError]) -> None:
        if not death.cancelled():
            self._set_failure(death.result(), "system-supervisor")

    async def connect(self, address: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> ActorRef[SystemActor]:
        """Has ``lookup`` ask the running system at ``address`` too. Raises Unreachable where nobody is there."""
        self._check_running()
        remote = self.ref("system", address, SystemActor)
        try:
            await remote.within(timeout_s).statistics()
        except CallTimeout as error:
            raise Unreachable("system", f"no answer within {timeout_s:g} s ({error.phase})") from None
        self.ask_too(address)
        return remote

    def ask_too(self, address: str) -> None:
        """Has ``lookup`` ask the system at ``address`` too; unlike ``connect``, without seeing whether it is there."""
        ref = self.ref("system", address, SystemActor)
        if ref not in self._upstream:
            self._upstream.append(ref)

    async def lookup(self, name: str, api: type[Api], timeout_s: float = DEFAULT_TIMEOUT_S) -> ActorRef[Api]:
        """The actor of that name: of this system, of its processes, or of a system it has been connected to; in a
        process that a supervisor has started, also of the supervisor's system.

        Raises ActorNotFound; CallTimeout or ActorDead where a system that had to be asked did not answer.
        """
        self._check_running()
        try:
            async with asyncio.timeout(timeout_s):
                found = await self.find(name)
        except TimeoutError:
            raise CallTimeout("system", "lookup", timeout_s, f"asking others for {name}") from None
        if found is None:
            raise ActorNotFound(name, self.name)
        return self.ref(found.name, found.address, api)

    async def find(self, name: str, asked: Iterable[str] = ()) -> ActorRef[Any] | None:
        """``asked``: the addresses of the systems that ask each other already, so that none is asked twice."""
        if self.address in asked:
            return None
        if name in self._mailboxes:
            return self.ref(name, self.address)
        for supervisor in self.supervisors:
            if (child := supervisor.find(name)) is not None:
                return child
        for upstream in self._upstream:
            if (found := await upstream.api.lookup(name, (*asked, self.address))) is not None:
                return found
        return None

    # ------------------------------------------------------------------ who dies

    def watch(self, actor: Actor, ref: ActorRef[Any]) -> None:
        """See ``Actor.watch``."""
        self.fates.watch(actor, ref)

    def link(self, actor: Actor, ref: ActorRef[Any]) -> None:
        """See ``Actor.link``."""
        self.fates.link(actor, ref)

    def deaths(self, name: str) -> AsyncGenerator[DeadActor]:
        """See ``Fates.deaths``."""
        return self.fates.deaths(name)

    def serves(self, name: str) -> bool:
        """Whether an actor runs here under that name now."""
        return name in self._actors

    def fail_with(self, name: str, ref: ActorRef[Any]) -> None:
        """From now on ``name`` fails when the actor behind ``ref`` dies."""
        actor = self._actors.get(name)
        if actor is not None:  # else whoever links learns of its death as such
            self.fates.bind(actor, ref)
