"""The two kinds of supervised actors: in the supervisor's process, and in a process of its own."""

import asyncio
import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..actor import Actor
from ..errors import ActorDead, ActorFailed, FlexmarlError, text_of
from ..protocol.incarnations import new_epoch
from ..protocol.session import Settings
from ..telemetry import LogLevel
from ..wire.curve import Keys
from ..wire.zeromq import Tcp, ipc_address
from .child_process import ChildProcess
from .local_actors import LocalActors
from .worker_init import (
    WorkerInit,
    constructor_arguments,
    import_class,
    import_path,
    search_path,
    write_init,
)


class SupervisedSystem(Protocol):
    """The part of an ``ActorSystem`` that its supervisors use."""

    tcp: Tcp | None
    keys: Keys | None
    settings: Settings
    _local: LocalActors

    @property
    def keys_file(self) -> Path: ...


class ChildOwner(Protocol):
    """The supervisor of a child, as the child sees it. ``stopping``: all children are being stopped or killed."""

    stopping: bool

    def child_exited(self, child: "Child", reason: FlexmarlError) -> None:
        """The child has failed, or its process has ended, without a request to stop."""
        ...

    def final_error(self, reason: FlexmarlError) -> FlexmarlError | None:
        """The error of later calls to a child that has ended for ``reason``; None if it may be restarted."""
        ...


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """``actor_class``: a class, or its import path. ``setup``, ``env``: see ``Supervisor.spawn``."""

    actor_class: type[Actor] | str
    setup: object
    env: Mapping[str, str] = field(default_factory=dict)


class Child(ABC):
    """An actor under supervision, through all of its incarnations. ``address``: empty until it is known. ``runs``: it
    has been started, and has not ended since."""

    def __init__(self, name: str, spec: ActorSpec, local: LocalActors, address: str) -> None:
        self.name = name
        self.spec = spec
        self.address = address
        self.runs = False
        self._local = local

    @abstractmethod
    async def launch(self) -> None:
        """Starts the actor, for the first time or again. Returns after its ``on_start``, whose errors it raises."""

    @abstractmethod
    async def halt(self) -> BaseException | None:
        """Ends what runs of it; callers wait for the next incarnation. Returns the error of ``on_stop``, if known."""

    @abstractmethod
    async def stop(self) -> BaseException | None:
        """Like ``halt``, for good: pending and later calls raise ActorDead."""

    @abstractmethod
    def give_up(self, error: FlexmarlError) -> None:
        """It is not restarted: pending and later calls raise ``error``."""

    @abstractmethod
    async def wait_ended(self) -> None:
        """Waits for the end of an incarnation that has failed. Raises ActorDead if it does not end."""

    @abstractmethod
    async def release(self) -> None:
        """Frees the resources of a child that has ended or was killed."""


class LocalChild(Child):
    """An actor of the supervisor's process."""

    async def launch(self) -> None:
        known = self.spec.actor_class
        actor_class: Any = import_class(known) if isinstance(known, str) else known
        args, kwargs = constructor_arguments(self.spec.setup)
        actor = actor_class(*args, **kwargs)
        if self._local.has_actor(self.name):
            await self._local.restart(self.name, actor)
        else:
            await self._local.add(actor, self.name)
        self.runs = True

    async def halt(self) -> BaseException | None:
        self.runs = False
        return await self._local.stop(self.name)

    async def stop(self) -> BaseException | None:
        raised = await self.halt()
        self.give_up(ActorDead(self.name, f"{self._local.name} stopped it"))
        return raised

    def give_up(self, error: FlexmarlError) -> None:
        self._local.unregister(self.name, error)

    async def wait_ended(self) -> None:
        """An actor that has failed has ended."""

    async def release(self) -> None:
        """The system has released everything."""


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """``directory``: for sockets; ``directory_is_private``: processes that lose their parent remove it. ``env``: None:
    inherited. ``supervisor``: the name of the actor that children report to. ``log_level``: of their logs."""

    directory: Path
    directory_is_private: bool
    log_directory: Path
    env: Mapping[str, str] | None
    supervisor: str
    log_level: LogLevel


class ProcessChild(Child):
    """An actor in a process of its own. ``process``: its newest incarnation. ``watches``: one per process that has not
    ended."""

    def __init__(
        self, name: str, spec: ActorSpec, system: SupervisedSystem, owner: ChildOwner, options: ProcessOptions
    ) -> None:
        if spec.env and options.env is None:
            raise ValueError(
                f"{name}: its supervisor inherits its environment, and has none to add variables to"
            )
        address = ipc_address(options.directory, name) if system.tcp is None else ""
        super().__init__(name, spec, system._local, address)
        self.process: ChildProcess | None = None
        self._epoch = new_epoch()
        self._system = system
        self._owner = owner
        self._options = options
        self.watches: set[asyncio.Task[None]] = set()

    async def launch(self) -> None:
        options = self._options
        private = "private" if options.directory_is_private else "shared"
        self._epoch += 1
        self._local.network.heard_incarnation(self._epoch)  # should its predecessor still run: it is refused
        self.process = process = await ChildProcess.start(
            self.name,
            [str(os.getpid()), str(options.directory), self.name, private],
            write_init(self._init()),
            options.log_directory / f"{self.name}.log",
            None if options.env is None else {**options.env, **self.spec.env},
        )
        if self.address:
            self._local.network.watch_process(self.address)
        process.address = self.address
        watch = asyncio.create_task(self._watch(process), name=f"watch {self.name}")
        self.watches.add(watch)
        watch.add_done_callback(self.watches.discard)
        if self._owner.stopping:  # since before there was a process
            process.kill()
        await process.wait_ready()
        self.runs = True

    def _init(self) -> WorkerInit:
        system, options = self._system, self._options
        tcp, keys_file = None, None
        if system.tcp is not None:  # a restarted process takes the port that references to it know
            port = int(self.address.rpartition(":")[2]) if self.address else 0
            tcp = dataclasses.replace(system.tcp, port=port, keys=None)
        if system.keys is not None:
            keys_file = system.keys_file
            if not keys_file.exists():
                system.keys.save(keys_file)
        return WorkerInit(
            import_path(self.spec.actor_class),
            *constructor_arguments(self.spec.setup),
            {"name": options.supervisor, "address": self._local.address},
            tcp,
            None if keys_file is None else str(keys_file),
            system.settings,
            self._epoch,
            search_path() if options.env is None else [],
            options.log_level,
        )

    def ready(self, pid: int, address: str) -> bool:
        """The process has reported its actor's start; False if it is one of an earlier incarnation."""
        process = self.process
        if process is None or process.pid != pid:
            return False
        self.address = process.address = address
        self._local.network.watch_process(address)
        process.started.set()
        return True

    def failed(self, reason: FlexmarlError) -> None:
        """The process has reported the failure of its actor, and is about to end. The restart is decided now: actors
        that fail in consequence may end before the process does."""
        if self.process is not None:
            self.process.exit_reason = reason
            self._exited(self.process, reason)

    def lost(self, reason: FlexmarlError, pid: int | None) -> None:
        """The process ``pid``, by default the newest, is silent: it is killed, and has failed for ``reason``. One that
        has ended already has a better reason, which ``_watch`` gets."""
        process = self.process
        if process is None or pid not in (None, process.pid):
            return
        if process.exit_reason is None and not process.has_exited():
            process.exit_reason = reason
            self._exited(process, reason)
            process.kill()

    async def _watch(self, process: ChildProcess) -> None:
        reason = await process.wait_ended()
        self._exited(process, reason)
        if process.address:
            final = self._owner.final_error(reason)
            self._local.network.process_ended(
                process.address, final or _as_dead(reason), for_good=final is not None
            )

    def _exited(self, process: ChildProcess, reason: FlexmarlError) -> None:
        if process.stop_requested or process.exit_handled or self.process is not process:
            return
        process.exit_handled = self.runs
        self._owner.child_exited(self, reason)

    async def halt(self) -> BaseException | None:
        self.runs = False
        if self.process is not None:
            await self.process.stop(self._local.system_actor(self.process.address))
        return None

    async def stop(self) -> BaseException | None:
        await self.halt()
        if self.address:
            reason = ActorDead(self.name, f"{self._local.name} stopped it", stopped=True)
            self._local.network.process_ended(self.address, reason, for_good=True)
        return None

    def give_up(self, error: FlexmarlError) -> None:
        if self.process is not None and self.process.ended.is_set():  # else when it has
            self._local.network.process_ended(self.address, error, for_good=True)

    async def wait_ended(self) -> None:
        process = self.process
        if process is not None and not process.ended.is_set():  # the next incarnation takes its address
            await process.stop(self._local.system_actor(process.address))
            if not process.ended.is_set():
                raise ActorDead(self.name, f"process {process.pid} does not end")

    async def release(self) -> None:
        try:
            if self.process is not None:
                await self.process.wait_gone()
        finally:
            self._local.network.unwatch_process(self.address)
            _remove_socket(self.address)


def _remove_socket(address: str) -> None:
    """Removes the file that a killed process leaves behind."""
    if address.startswith("ipc://"):
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def _as_dead(reason: FlexmarlError) -> FlexmarlError:
    """The error for callers of an actor that is restarted."""
    if isinstance(reason, ActorFailed):
        return ActorDead(reason.actor, f"it failed: {text_of(reason)}")
    return reason
