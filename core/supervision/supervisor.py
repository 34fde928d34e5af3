"""Starts actors, in processes of their own or in this one, watches them, restarts them, and stops them.

    async with Supervisor(system, directory, log_directory, env) as supervisor:
        await supervisor.spawn("pkg.module:Store", "store", {"budget": 10})
        store = supervisor.reference("store", StoreApi)
        await supervisor.wait_for_death()      # raises ActorDead or ActorFailed

A process holds one actor, whose name is its log file's. What is restarted, and how often, is decided in
``restart_policy.py``; a restarted actor keeps its name and its address. Unless told otherwise a supervisor restarts
nothing: the first death ends the run.
"""

import asyncio
import dataclasses
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, overload

from ..actor import Actor, endpoint
from ..errors import (
    ActorDead,
    ActorFailed,
    CallTimeout,
    FlexmarlError,
    LocalProtocolError,
    TooManyRestarts,
    text_of,
    traceback_of,
)
from ..names import checked_name
from ..protocol.session import Settings
from ..ref import ActorRef
from ..telemetry import ProcessStatistics, get_logger
from ..wire.curve import Keys
from ..wire.zeromq import Tcp, ipc_address
from .child_process import ChildProcess
from .restart_policy import Escalate, Intensity, Restart, Restarts, Strategy
from .system_actor import SystemActor
from .worker_init import (
    WorkerInit,
    constructor_arguments,
    import_class,
    import_path,
    search_path,
    write_init,
)

log = get_logger(__name__)

Api = TypeVar("Api")
AnyActor = TypeVar("AnyActor", bound=Actor)
Setup = TypeVar("Setup")

NO_RESTARTS = Intensity(max_restarts=0)
STATISTICS_TIMEOUT_S = 10.0


@asynccontextmanager
async def private_directory(base: Path) -> AsyncIterator[Path]:
    """A new 0700 directory for sockets and shared memory, removed at the end with all that is in it."""
    directory = Path(tempfile.mkdtemp(prefix="flexmarl-", dir=base))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@dataclass(slots=True)
class _Child:
    """An actor under supervision, through all of its incarnations. ``address``: empty until it is known."""

    name: str
    actor_class: type[Actor] | str
    setup: object
    own_process: bool
    address: str
    process: ChildProcess | None = None
    runs: bool = False
    """Has been started, and has not died since."""


class SupervisedSystem(Protocol):
    """The part of a system that its supervisors use."""

    name: str
    tcp: Tcp | None
    keys: Keys | None
    settings: Settings
    supervisors: "list[Supervisor]"

    @property
    def address(self) -> str: ...
    @property
    def keys_file(self) -> Path: ...
    async def add(self, actor: AnyActor, name: str) -> ActorRef[AnyActor]: ...
    def ref(self, name: str, address: str, api: type[Api] | None = None) -> ActorRef[Api]: ...
    def has_actor(self, name: str) -> bool: ...
    async def halt(self, name: str) -> BaseException | None: ...
    async def restart(self, name: str, actor: Actor) -> None: ...
    def bury(self, name: str, error: FlexmarlError) -> None: ...
    def watch_process(self, address: str) -> None: ...
    def process_ended(self, address: str, error: FlexmarlError, *, for_good: bool) -> None: ...


class Supervisor(Actor):
    """An actor of its system, named ``supervisor`` where ``name`` does not say otherwise."""

    def __init__(
        self,
        system: SupervisedSystem,
        directory: Path,
        log_directory: Path,
        env: Mapping[str, str] | None,
        *,
        strategy: Strategy = Strategy.ONE_FOR_ALL,
        intensity: Intensity = NO_RESTARTS,
        name: str = "supervisor",
        directory_is_private: bool = True,
    ) -> None:
        """``directory``: for the sockets of the spawned processes; where it is private to this run, processes that lose
        their parent remove it with all that is in it. ``env``: the whole environment of the spawned processes; None:
        they inherit this process's, and its ``sys.path``.
        """
        self._host_system = system
        self._directory = directory
        self._log_directory = log_directory
        self._env = None if env is None else dict(env)
        self._name = name
        self._directory_is_private = directory_is_private
        self._restarts = Restarts(strategy, intensity)
        self._children: dict[str, _Child] = {}
        self._restarting: dict[str, asyncio.Task[None]] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._stopping = False

    # ------------------------------------------------------------------ from start to end

    async def __aenter__(self) -> Self:
        self.death: asyncio.Future[FlexmarlError] = asyncio.get_running_loop().create_future()
        """Set when a child has died that is not restarted: what becomes of the others is for whoever waits for this."""
        await self._host_system.add(self, self._name)
        self._host_system.supervisors.append(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.stop_all()
        finally:
            self._host_system.supervisors.remove(self)
            self.death.cancel()

    async def wait_for_death(self) -> None:
        """Raises ActorDead or ActorFailed when the first actor is gone that is not restarted: TooManyRestarts, an
        ActorDead, where it had been."""
        raise await asyncio.shield(self.death)

    async def stop_all(self) -> None:
        """Asks every actor to end, then makes its process: none is left when this returns.

        Raises the first error that the ``on_stop`` of an actor of this process raised.
        """
        self._stopping = True
        await _cancelled(*self._restarting.values())
        children = list(self._children.values())
        await asyncio.gather(*(self._halt(child) for child in children if child.own_process))
        await _cancelled(*self._watches)  # of what outlived SIGKILL
        first: BaseException | None = None
        for child in reversed(children):
            if not child.own_process:
                raised = await self._stop_here(child.name)
                first = first or raised
        if first is not None:
            raise first

    def crashed(self) -> None:
        """Its system has ended as a process does that is killed: nothing is restarted any more."""
        self._stopping = True
        for task in self._restarting.values():
            task.cancel()

    async def allow(self, public_key: str) -> None:
        """See ``ActorSystem.allow``."""
        for name in self.running:
            address = self._children[name].address
            await self._system_actor(address).api.allow(public_key)

    async def kill_all(self) -> None:
        """Ends every process at once, whatever it is doing."""
        self._stopping = True
        processes = [child.process for child in self._children.values() if child.process is not None]
        for process in processes:
            process.kill()
        await asyncio.gather(*(process.until_gone() for process in processes))

    # ------------------------------------------------------------------ starting and stopping one

    @overload
    async def spawn(
        self, actor_class: str, name: str, setup: object = None, *, process: bool = True
    ) -> ActorRef[Any]: ...
    @overload
    async def spawn(
        self,
        actor_class: type[AnyActor],
        name: str,
        setup: Mapping[str, Any] | None = None,
        *,
        process: bool = True,
    ) -> ActorRef[AnyActor]: ...
    @overload
    async def spawn(
        self, actor_class: Callable[[Setup], AnyActor], name: str, setup: Setup, *, process: bool = True
    ) -> ActorRef[AnyActor]: ...
    async def spawn(
        self, actor_class: Any, name: str, setup: object = None, *, process: bool = True
    ) -> ActorRef[Any]:
        """Starts an actor, in a new process or in this one, and returns after its ``on_start``.

        ``actor_class``: a class, or its import path (``package.module:Class``). ``setup``: the keyword arguments of its
        constructor as a mapping, or its single argument as any other plain data (a frozen dataclass, say).

        A first start that fails is not tried again: it raises what ``on_start`` or the constructor raised, in a process
        ActorFailed, or ActorDead where the process ended otherwise or is not ready within an hour. For one-for-all it
        is a death that can't be mended. Raises ValueError where the name is taken, LocalProtocolError where a process
        could not import the class.
        """
        system = self._host_system
        checked_name(name)
        if name in self._children or system.has_actor(name) or (process and name == system.name):
            raise ValueError(f"{system.name} already has an actor named {name!r}")
        if process:
            import_path(actor_class)  # refused here where the class can't be imported
            if not system.address.startswith(("ipc://", "tcp://")):
                raise LocalProtocolError(f"{system.name} is reached by no socket: no process could answer it")
        predicted = ipc_address(self._directory, name) if system.tcp is None else ""
        child = _Child(name, actor_class, setup, process, predicted if process else system.address)
        self._children[name] = child
        try:
            await self._launch(child)
        except BaseException as error:
            if self._restarts.strategy is Strategy.ONE_FOR_ONE:
                await self._forget(child)
            elif isinstance(error, ActorDead | ActorFailed):
                self._give_up(error)
            raise
        self._restarts.add(name)
        api = actor_class if isinstance(actor_class, type) else None
        return system.ref(name, child.address, api)

    async def stop(self, name: str) -> None:
        """Stops one actor for good, in good order. Raises KeyError where there is none of that name."""
        child = self._children[name]
        self._restarts.remove(name)
        if (restarting := self._restarting.get(name)) is not None:
            await _cancelled(restarting)
        if child.own_process:
            await self._halt(child)
        raised = None if child.own_process else await self._stop_here(name)
        if child.own_process and child.address:
            words = ActorDead(name, f"{self._host_system.name} stopped it", stopped=True)
            self._host_system.process_ended(child.address, words, for_good=True)
        await self._forget(child)
        if raised is not None:
            raise raised

    def reference(self, name: str, api: type[Api]) -> ActorRef[Api]:
        """To the actor spawned, or to be spawned in a process of its own, under ``name``.

        Raises LocalProtocolError where the system listens on TCP and no actor of that name has been started: which
        port it will get is not known.
        """
        child = self._children.get(name)
        address = child.address if child is not None else ""
        if not address and self._host_system.tcp is None:
            address = ipc_address(self._directory, name)
        if not address:
            raise LocalProtocolError(f"the address of {name} is not known before it has been started")
        return self._host_system.ref(name, address, api)

    def _system_actor(self, address: str) -> ActorRef[SystemActor]:
        return self._host_system.ref("system", address, SystemActor)

    def owns(self, name: str) -> bool:
        return name in self._children

    def find(self, name: str) -> ActorRef[Any] | None:
        """The actor of that name, if it lives or is being restarted."""
        child = self._children.get(name)
        if child is None or name not in self._restarts or (self.death.done() and not child.runs):
            return None
        return self._host_system.ref(name, child.address)

    async def _launch(self, child: _Child) -> None:
        """Starts an actor, for the first time or anew."""
        if child.own_process:
            await self._launch_process(child)
        else:
            known = child.actor_class
            actor_class: Any = import_class(known) if isinstance(known, str) else known
            args, kwargs = constructor_arguments(child.setup)
            actor = actor_class(*args, **kwargs)
            if self._host_system.has_actor(child.name):
                await self._host_system.restart(child.name, actor)
            else:
                await self._host_system.add(actor, child.name)
        child.runs = True

    async def _launch_process(self, child: _Child) -> None:
        init = self._init_of(child)
        private = "private" if self._directory_is_private else "shared"
        child.process = process = await ChildProcess.start(
            child.name,
            [str(self._directory), child.name, private],
            write_init(init),
            self._log_directory / f"{child.name}.log",
            self._env,
        )
        if child.address:
            self._host_system.watch_process(child.address)
        process.address = child.address
        watch = asyncio.create_task(self._watch(child, process), name=f"watch {child.name}")
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        if self._stopping:  # since before there was a process that could be stopped
            process.kill()
        await process.until_ready()

    def _init_of(self, child: _Child) -> WorkerInit:
        system = self._host_system
        tcp, keys_file = None, None
        if system.tcp is not None:  # the port that it had is the one its references know
            port = int(child.address.rpartition(":")[2]) if child.address else 0
            tcp = dataclasses.replace(system.tcp, port=port, keys=None)
        if system.keys is not None:
            keys_file = system.keys_file
            if not keys_file.exists():
                system.keys.save(keys_file)
        return WorkerInit(
            import_path(child.actor_class),
            *constructor_arguments(child.setup),
            {"name": self._name, "address": system.address},
            tcp,
            None if keys_file is None else str(keys_file),
            system.settings,
            search_path() if self._env is None else [],
        )

    async def _halt(self, child: _Child) -> None:
        """Stops what runs of a child; whoever asked something of it is told."""
        child.runs = False
        if child.process is not None:
            await child.process.stop(self._system_actor(child.process.address))
        elif not child.own_process:
            await self._host_system.halt(child.name)

    async def _stop_here(self, name: str) -> BaseException | None:
        """Stops an actor of this process for good; what its ``on_stop`` raised."""
        raised = await self._host_system.halt(name)
        self._host_system.bury(name, ActorDead(name, f"{self._host_system.name} stopped it"))
        return raised

    async def _forget(self, child: _Child) -> None:
        """Lets go of the name of a child that has ended, or was killed."""
        try:
            if child.process is not None:
                await child.process.until_gone()
        finally:
            self._children.pop(child.name, None)
            if child.own_process:
                _remove_socket(child.address)

    # ------------------------------------------------------------------ what children tell, and what is seen of them

    @endpoint
    async def ready(self, name: str, pid: int, address: str) -> None:
        child = self._children[name]
        process = child.process
        if process is None or process.pid != pid:  # of an earlier incarnation
            return
        log.info("actor ready", name=name, pid=pid)
        child.address = process.address = address
        self._host_system.watch_process(address)
        process.started.set()

    @endpoint
    async def failed(self, name: str, error: str, remote_traceback: str) -> None:
        child = self._children[name]
        death = ActorFailed(name, error, remote_traceback)
        if child.process is not None:
            child.process.death = death
            # Now, not when its process has ended: others that fail in consequence may be gone before it.
            self._process_died(child, child.process, death)

    def actor_failed(self, name: str, error: BaseException) -> bool:
        """An actor of this process has failed: whether this supervisor takes care of it."""
        child = self._children.get(name)
        if child is None or child.own_process or self._stopping:
            return False
        if child.runs:
            child.runs = False
            self._died(child, _failure(name, error))
        return True

    async def _watch(self, child: _Child, process: ChildProcess) -> None:
        death = await process.until_ended()
        self._process_died(child, process, death)
        if process.address:
            for_good = self._stopping or self.death.done()
            words = self._last_words(death) if for_good else _as_dead(death)
            self._host_system.process_ended(process.address, words, for_good=for_good)

    def _process_died(self, child: _Child, process: ChildProcess, death: FlexmarlError) -> None:
        if process.unwanted or process.mourned or child.process is not process:
            return
        if child.runs:
            process.mourned = True
            child.runs = False
            self._died(child, death)
        elif child.name not in self._restarts and self._restarts.strategy is Strategy.ONE_FOR_ALL:
            self._give_up(death)
        # else whoever starts it is told

    def _last_words(self, death: FlexmarlError) -> FlexmarlError:
        """What is told to those who call an actor that has died."""
        final = self.death.result() if self.death.done() and not self.death.cancelled() else None
        return final if final is not None and final.__cause__ is death else death

    # ------------------------------------------------------------------ restarting

    def _died(self, child: _Child, death: FlexmarlError) -> None:
        if self._stopping or child.name not in self._restarts:
            return
        decision = self._restarts.died(child.name, asyncio.get_running_loop().time())
        if isinstance(decision, Escalate):
            self._escalate(child, death, decision)
            return
        log.warning(
            "actor is restarted", name=child.name, together_with=list(decision.stop), after=text_of(death)
        )
        for name in decision.stop:  # they end with it: their own deaths are not counted
            self._children[name].runs = False
        key = child.name if self._restarts.strategy is Strategy.ONE_FOR_ONE else ""
        work = self._restart(decision, self._restarting.get(key))
        self._restarting[key] = task = asyncio.create_task(work, name=f"restart {child.name}")
        task.add_done_callback(lambda ended: self._restart_ended(key, ended))

    def _restart_ended(self, key: str, task: asyncio.Task[None]) -> None:
        if self._restarting.get(key) is task:
            del self._restarting[key]
        if not task.cancelled() and (error := task.exception()) is not None:  # a defect of ours is no secret
            self._give_up(_failure(self._name, error))

    async def _restart(self, decision: Restart, replaced: asyncio.Task[None] | None) -> None:
        if replaced is not None:
            await _cancelled(replaced)
        for name in decision.stop:
            if name in self._restarts:
                await self._halt(self._children[name])
        for name in decision.start:
            if name not in self._restarts:  # stopped for good meanwhile
                continue
            child = self._children[name]
            try:
                await self._make_room(child)
                await self._launch(child)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is the next death
                if name in self._restarts:
                    self._died(
                        child, error if isinstance(error, ActorDead | ActorFailed) else _failure(name, error)
                    )
                    return

    async def _make_room(self, child: _Child) -> None:
        """Waits for the end of a process that said that it has failed: its successor takes its address."""
        process = child.process
        if process is not None and not process.ended.is_set():
            await process.stop(self._system_actor(process.address))
            if not process.ended.is_set():
                raise ActorDead(child.name, f"process {process.pid} does not end")

    def _escalate(self, child: _Child, death: FlexmarlError, decision: Escalate) -> None:
        if decision.restarts:
            final: FlexmarlError = TooManyRestarts(child.name, decision.restarts, decision.period_s, death)
        else:
            final = death
        self._give_up(final)
        for task in self._restarting.values():
            if task is not asyncio.current_task():
                task.cancel()
        for lost in self._children.values():
            if lost.runs or lost.name not in self._restarts:
                continue
            if not lost.own_process:
                self._host_system.bury(lost.name, final)
            elif lost.process is not None and lost.process.ended.is_set():  # else when it has
                self._host_system.process_ended(lost.address, final, for_good=True)

    def _give_up(self, death: FlexmarlError) -> None:
        if not self._stopping and not self.death.done():
            self.death.set_result(death)

    # ------------------------------------------------------------------ figures

    @property
    def running(self) -> list[str]:
        """The names of the actors in processes that have started and have not ended."""
        return [name for name, child in self._children.items() if child.own_process and child.runs]

    async def statistics(self) -> dict[str, ProcessStatistics]:
        """The own figures of this process, and of every running one that answers within 10 s, by actor name."""
        addresses = {name: self._children[name].address for name in self.running}
        addresses[self._host_system.name] = self._host_system.address
        refs = {name: self._system_actor(at) for name, at in addresses.items()}
        figures = await asyncio.gather(*(_statistics_of(ref) for ref in refs.values()))
        return {name: figure for name, figure in zip(refs, figures, strict=True) if figure is not None}


def _remove_socket(address: str) -> None:
    """The file that a killed process leaves behind."""
    if address.startswith("ipc://"):
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def _as_dead(death: FlexmarlError) -> FlexmarlError:
    """What is told to those who called an actor that will be back."""
    return ActorDead(death.actor, f"it failed: {text_of(death)}") if isinstance(death, ActorFailed) else death


def _failure(name: str, error: BaseException) -> ActorFailed:
    return ActorFailed(name, f"{type(error).__name__}: {text_of(error)}", traceback_of(error))


async def _cancelled(*tasks: asyncio.Task[None]) -> None:
    """Cancels them and waits for their ends, whatever these are."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def _statistics_of(ref: ActorRef[SystemActor]) -> ProcessStatistics | None:
    """None where the process is gone, or too busy or too stuck to answer."""
    try:
        return await ref.within(STATISTICS_TIMEOUT_S).statistics()
    except (ActorDead, ActorFailed, CallTimeout):
        return None
