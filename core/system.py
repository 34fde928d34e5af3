"""An actor system: the actors of one process, and its calls to the actors of others."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar, overload

from .actor import Actor
from .base.names import checked_name
from .base.threads import in_thread
from .delivery.peers import Network
from .durable.private_directory import PrivateDirectory, check_private
from .errors import ActorNotFound, CallNotAllowed, CallTimeout, FlexmarlError, SystemClosed, Unreachable
from .protocol.session import DEFAULT_SETTINGS, Settings
from .ref import DEFAULT_TIMEOUT_S, ActorRef
from .spans import SpanRecorder
from .supervision.local_actors import CLOSE_GRACE_S, LocalActors
from .supervision.process_node import ProcessNode
from .supervision.process_statistics import ProcessStatistics
from .supervision.restart_policy import Intensity
from .supervision.supervisor import Supervisor
from .supervision.system_actor import Directory, SystemActor
from .supervision.system_api import SystemApi
from .wire.curve import Keys
from .wire.permissions import DEFAULT_CALLS, checked_calls
from .wire.wire import Wire
from .wire.zeromq import Tcp, ZmqWire, ipc_address

Api = TypeVar("Api")
AnyActor = TypeVar("AnyActor", bound=Actor)
Setup = TypeVar("Setup")
Result = TypeVar("Result")

# Enough for failures that pass; one that comes back each time is escalated within seconds.
THREE_A_MINUTE = Intensity(max_restarts=3, period_s=60.0)


class ActorSystem:
    """The actors of one process, and its calls to the actors of others.

        async with ActorSystem("service") as system:
            greeter = await system.spawn(Greeter, "greeter")                  # in this process
            worker = await system.spawn(Worker, "worker", process=True)       # in one of its own
            print(await greeter.api.greet("world"))

    It lives on the running loop and changes nothing global: no signal handler, no logging root, no event-loop policy,
    no os.environ.
    """

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
        """``directory``: private (0700) to the user, for the system's socket and keys, and the files of its actors,
        best on tmpfs; systems of one node share it. None: a new one, which is removed at the end. The system listens on
        an ipc socket there, or on ``tcp``. ``keys``: for connections to systems that listen on TCP. ``wire``: another
        way to reach peers (``MemoryNetwork.wire``).

        Raises ValueError if ``name`` is invalid. Entering raises UnsafeDirectory if other users may have access to a
        given directory, or it is missing, and OSError, of too few file descriptors for example.

        For actors that ``spawn`` starts: ``intensity``: how often they are restarted before ``failure`` is set;
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
        self._own_supervisor: Supervisor | None = None
        self._own_directory: PrivateDirectory | None = None
        self._entered = False
        self._ids = itertools.count(1)

    def __repr__(self) -> str:
        if not hasattr(self, "_local"):
            return f"<ActorSystem {self.name}: not entered>"
        local = self._local
        state = "closed" if local.closed else "failed" if self.failure.done() else "running"
        actors = sum(local.serves(name) for name in local.network.mailboxes) - local.serves("system")
        peers = len(local.network.connections)
        return f"<ActorSystem {self.name} at {self.address}: {state}, {actors} actors, {peers} peers>"

    # ------------------------------------------------------------------ from start to end

    async def __aenter__(self) -> Self:
        if self._entered:
            raise SystemClosed(f"{self.name} has been used: make another ActorSystem")
        self._entered = True
        if self._given_directory is None:
            self._own_directory = PrivateDirectory()
            self.directory = self._own_directory.path
        else:
            check_private(self._given_directory)
            self.directory = self._given_directory
        try:
            self._wire = self._make_wire()
            network = Network(self.name, self._wire, self.settings, {})
            self._local = LocalActors(self.name, network, self._adopt)
            network.on_crash = self._local.crash
            network.start()
            self._directory = Directory(self._local)
            self._system_actor = SystemActor(self._local, self._directory)
            await self.add(self._system_actor, "system")
        except BaseException:
            self._remove_directory()
            raise
        return self

    def _adopt(self, actor: Actor) -> None:
        actor.system = self

    def _make_wire(self) -> Wire:
        if self._given_wire is not None:
            return self._given_wire
        if self.tcp is not None and self.keys is None and not self.tcp.plain:
            self.keys = Keys.make()
            self.keys.save(self.keys_file)
        return ZmqWire(self.tcp or ipc_address(self.directory, self.name), self.keys)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Closes everything, in spite of errors on the way; raises the first one if the block itself raised none."""
        local = self._local
        first: BaseException | None = None
        try:
            await local.network.wait_tells_done(CLOSE_GRACE_S)
            if self._own_supervisor is not None:
                try:
                    await self._own_supervisor.__aexit__(kind, error, trace)
                except Exception as raised:  # noqa: BLE001  # raised below: everything else is closed first
                    first = raised
            local.network.closing = True
            await local.notify_watchers()
            raised_here = await local.close()
            first = first or raised_here
        finally:
            local.closed = True
            self.failure.cancel()
            local.network.close()
            self._remove_directory()
        if first is not None and error is None:
            raise first

    def _remove_directory(self) -> None:
        if self._own_directory is not None:
            self._own_directory.remove()

    def _check_running(self) -> None:
        if not self._entered:
            raise SystemClosed(f"{self.name} has not been entered: async with ActorSystem(...) as system")
        if self._local.closed:
            raise SystemClosed(f"{self.name} is closed")

    @property
    def failure(self) -> asyncio.Future[BaseException]:
        """Set when an actor has failed that is not restarted (any more). The others run on."""
        return self._local.failure

    @property
    def address(self) -> str:
        """The address at which other systems reach this one's actors."""
        return self._local.address

    @property
    def incarnation(self) -> int:
        """The number of this system among those of its name: a restarted actor's system has a greater one than before
        (``protocol/incarnations.py``)."""
        return self._wire.epoch

    def new_id(self) -> str:
        """A text that no other call returns: not in this system, in its predecessors and successors, nor in others."""
        return f"{self._wire.epoch:x}-{next(self._ids):x}"

    @property
    def spans(self) -> SpanRecorder:
        """Records the work of this system's actors, each piece with its begin and end."""
        return self._local.spans

    def clock(self) -> float:
        """Seconds that never go back; virtual in virtual time."""
        return self._wire.now()

    async def run_blocking(
        self,
        work: Callable[..., Result],
        *args: Any,
        stop: threading.Event | None = None,
        abandon: bool = False,
    ) -> Result:
        """The result of ``work(*args)``, which may wait for a disk or compute for long, in a thread of the loop's own
        executor. In virtual time, which has no threads, the loop itself calls it.

        A cancellation sets ``stop`` and waits until ``work`` has ended, so that its caller may close what ``work`` has
        worked with; with ``abandon`` it does not wait (``base/threads.py``)."""
        if getattr(asyncio.get_running_loop(), "is_virtual", False):
            await asyncio.sleep(0)
            return work(*args)
        return await in_thread(work, *args, stop=stop, abandon=abandon)

    @property
    def keys_file(self) -> Path:
        """The file with the keys of a system that listens on TCP, for its processes and for clients from outside."""
        return self.directory / "keys.json"

    async def allow(self, public_key: str, calls: Iterable[str] = DEFAULT_CALLS) -> None:
        """Accepts one more client over TCP, by its ``Keys.client_public``: here, and in the processes that this system
        has started or will start. Again: replaces its rules.

        ``calls``: rules about the calls that it may make (``wire/permissions.py``), others raise CallNotAllowed there.
        By default all but those of ``system``: a client that looks up actors by name needs ``system:lookup`` too.
        Raises InvalidKeys, ValueError for an invalid rule, and the errors of a call to one of these processes."""
        if self.keys is None or not isinstance(self._wire, ZmqWire):
            return
        calls = checked_calls(calls)
        self.keys = self.keys.allowing(public_key, calls)
        self._wire.allow(self.keys)
        if self.keys_file.exists():
            self.keys.save(self.keys_file)
        for supervisor in self._local.supervisors:
            await supervisor.allow(public_key, calls)

    # ------------------------------------------------------------------ actors of this system

    async def add(self, actor: AnyActor, name: str) -> ActorRef[AnyActor]:
        """Starts ``actor`` in this process under ``name``, without a supervisor. Raises ValueError if the name is
        invalid or in use, SystemClosed."""
        self._check_running()
        return await self._local.add(actor, name)

    async def remove(self, name: str) -> None:
        """Stops an actor for good, in good order: its calls are cancelled, ``on_stop`` runs; raises the error of
        ``on_stop``. Also actors that ``spawn`` has started in processes. Raises KeyError if there is no actor of that
        name, LocalProtocolError if the actor itself calls: it would wait for its own end."""
        await self._local.remove(name)

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
        ``process``: in a new process, which inherits this one's environment. The reference of a class given by its path
        has no types: ``lookup(name, Class)`` returns one that has.

        When the actor may not be restarted any more, ``failure`` is set to TooManyRestarts. Raises the errors of
        ``Supervisor.spawn``.
        """
        self._check_running()
        if self._own_supervisor is None:
            node = ProcessNode(
                self,
                self.directory,
                self._log_directory or self.directory,
                None,
                directory_is_private=self._given_directory is None,
            )
            self._own_supervisor = supervisor = Supervisor(
                self, node, intensity=self._intensity, name="system-supervisor"
            )
            await supervisor.__aenter__()
            supervisor.failure.add_done_callback(self._supervisor_failed)
        return await self._own_supervisor.spawn(actor_class, name, setup, process=process)

    def _supervisor_failed(self, failure: asyncio.Future[FlexmarlError]) -> None:
        if not failure.cancelled():
            self._local.set_failure(failure.result(), "system-supervisor")

    async def process_statistics(self) -> dict[str, ProcessStatistics]:
        """The figures of this process, and of each process it has started that answers within 10 s, by actor name."""
        figures = {self.name: await self._local.system_actor(self.address).api.process_statistics()}
        for supervisor in self._local.supervisors:
            figures = await supervisor.process_statistics() | figures
        return figures

    # ------------------------------------------------------------------ actors anywhere

    def ref(self, name: str, address: str, api: type[Api] | None = None) -> ActorRef[Api]:
        """A reference to the actor ``name`` of the system at ``address``, without contacting it."""
        return self._local.ref(name, address, api)

    async def connect(self, address: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> ActorRef[SystemApi]:
        """Adds the running system at ``address`` to those that ``lookup`` asks. Raises Unreachable if it does not
        answer."""
        self._check_running()
        remote = self._local.system_actor(address)
        try:
            with suppress(CallNotAllowed):  # it answers: this client may call others than ``system``
                await remote.within(timeout_s).lookup("system")
        except CallTimeout as error:
            raise Unreachable("system", f"no answer within {timeout_s:g} s ({error.phase})") from None
        self._directory.add_upstream(address)
        return remote

    async def lookup(self, name: str, api: type[Api], timeout_s: float = DEFAULT_TIMEOUT_S) -> ActorRef[Api]:
        """The actor of that name: of this system, of its processes, or of a system that it is connected to; in a
        process that a supervisor has started, also of the supervisor's system.

        Raises ActorNotFound; CallTimeout or ActorDead if a system that had to be asked did not answer.
        """
        self._check_running()
        try:
            async with asyncio.timeout(timeout_s):
                actor = await self._directory.find(name)
        except TimeoutError:
            raise CallTimeout("system", "lookup", timeout_s, f"asking others for {name}") from None
        if actor is None:
            raise ActorNotFound(name, self.name)
        return self.ref(actor.name, actor.address, api)
