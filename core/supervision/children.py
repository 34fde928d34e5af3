"""The two kinds of supervised actors: in the supervisor's process, and on a node."""

import asyncio
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..actor import Actor
from ..base.texts import text_of
from ..errors import ActorDead, ActorFailed, FlexmarlError
from ..telemetry import get_logger
from ..waits import Wait
from .local_actors import LocalActors
from .node import START_TIMEOUT_S, Launch, Node, Running
from .worker_init import constructor_arguments, import_class

if TYPE_CHECKING:
    from .supervisor import Supervisor

log = get_logger(__name__)


class Child(ABC):
    """An actor under supervision, through all of its incarnations. ``address``: empty until it is known. ``runs``: it
    has been started, and has not ended since."""

    def __init__(self, name: str, local: LocalActors, address: str) -> None:
        self.name = name
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
    """An actor of the supervisor's process. ``setup``: see ``Supervisor.spawn``."""

    def __init__(self, name: str, actor_class: type[Actor] | str, setup: object, local: LocalActors) -> None:
        super().__init__(name, local, local.address)
        self._class = actor_class
        self._setup = setup

    async def launch(self) -> None:
        actor_class: Any = import_class(self._class) if isinstance(self._class, str) else self._class
        args, kwargs = constructor_arguments(self._setup)
        actor = actor_class(*args, **kwargs)
        # The name is still in use after a failure: its mailbox holds the requests that wait for the next incarnation.
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


class NodeChild(Child):
    """An actor on a node. ``spec``: its last launch, or the first one to be. ``running``: its newest incarnation.
    ``watches``: one per incarnation that has not ended."""

    def __init__(self, spec: Launch, node: Node, local: LocalActors, owner: "Supervisor") -> None:
        super().__init__(spec.name, local, "")
        self.spec = spec
        self.node = node
        self.running: Running | None = None
        self._launching = False
        self._began = 0.0
        """The time of the newest start."""
        self._early: Callable[[], None] | None = None
        """A report of the incarnation that is being launched: it has overtaken the node's answer."""
        self._owner = owner
        self.watches: set[asyncio.Task[None]] = set()

    async def launch(self) -> None:
        network = self._local.network
        self._began = asyncio.get_running_loop().time()
        if not self.address:
            self.address = await self.node.reserve(self.name)
        self.spec = dataclasses.replace(self.spec, epoch=self.spec.epoch + 1)
        network.heard_incarnation(self.spec.epoch)  # should its predecessor still run: it is refused
        # The process connects to this system by itself: its report may be here before the node has answered, above all
        # from another host. A report that was dropped then would leave the start waiting for its whole timeout.
        self._early, self._launching = None, True
        try:
            self.running = running = await self.node.launch(self.spec)
        finally:
            self._launching = False
        network.watch_process(self.address)
        watch = asyncio.create_task(self._watch(running), name=f"watch {self.name}")
        self.watches.add(watch)
        watch.add_done_callback(self.watches.discard)
        if self._owner.stopping:  # since before there was a process
            running.kill()
        self._take_early()
        await running.wait_ready()
        self.runs = True

    def starting(self, now: float) -> Wait | None:
        """Its start, while it lasts."""
        if self._launching:
            return Wait(f"a process for {self.name}, from {self.node.starter}", now - self._began)
        if self.running is None or self.runs or self.running.ended.is_set():
            return None
        what = f"the start of {self.name} ({self.running.label})"
        return Wait(what, now - self._began, f"at most {START_TIMEOUT_S:g} s", self.name)

    def _take_early(self) -> None:
        if self._early is not None:
            self._early()

    def ready(self, epoch: int) -> None:
        """An incarnation has reported its actor's start. An earlier one is ignored."""
        running = self.running
        if self._launching:
            self._early = lambda: self.ready(epoch)
        elif running is not None and running.epoch == epoch:
            running.started.set()
            log.info("actor ready", name=self.name, process=running.label)

    def failed(self, reason: FlexmarlError) -> None:
        """The process has reported the failure of its actor, and is about to end. The restart is decided now: actors
        that fail in consequence may end before the process does."""
        if self._launching:
            self._early = lambda: self.failed(reason)
        elif self.running is not None:
            self.running.exit_reason = reason
            self._handle_exit(self.running, reason)

    def lost(self, reason: FlexmarlError, epoch: int | None) -> None:
        """The incarnation ``epoch``, by default the newest, is silent: it is killed, and has failed for ``reason``. One
        that has ended already has a better reason, which ``_watch`` gets."""
        if self._launching:
            if epoch == self.spec.epoch:
                self._early = lambda: self.lost(reason, epoch)
            return
        running = self.running
        if running is None or epoch not in (None, running.epoch) or running.stop_requested:
            return
        # The reason is set before the kill: "killed by signal 9", which ``_watch`` gets, would say nothing.
        if running.exit_reason is None and not running.has_exited():
            running.exit_reason = reason
            if self.runs:
                self._handle_exit(running, reason)
                running.kill()
            else:  # its report is not here yet: its start raises the reason
                running.end()

    async def _watch(self, running: Running) -> None:
        node, address = self.node, self.address  # it may be moved
        reason = await running.wait_ended()
        self._handle_exit(running, reason)
        final = self._owner.final_error(reason)
        for_good = final is not None or node.lost is not None
        self._local.network.process_ended(address, final or _as_dead(reason), for_good=for_good)

    def move(self, node: Node, env: Mapping[str, str]) -> None:
        """Its next incarnation will be on ``node``, at another address, with the variables of ``env`` too; the present
        node is lost."""
        # Without an address ``launch`` reserves one on the new node. At the old one no exit reason will come any more,
        # and callers that lose their connection to it wait for none.
        self._local.network.unwatch_process(self.address)
        self.spec = dataclasses.replace(self.spec, env={**self.spec.env, **env})
        self.node, self.address = node, ""

    def _handle_exit(self, running: Running, reason: FlexmarlError) -> None:
        if running.stop_requested or running.exit_handled or self.running is not running:
            return
        # A start that fails raises its reason in ``launch``: its end is not handled twice. Nor is that of an actor
        # whose process has reported the failure first and ends afterwards.
        running.exit_handled = self.runs
        self._owner.child_exited(self, reason)

    async def halt(self) -> BaseException | None:
        self.runs = False
        if self.running is not None:
            await self.running.stop(self._local.system_actor(self.address))
        return None

    async def stop(self) -> BaseException | None:
        await self.halt()
        if self.address:
            reason = ActorDead(self.name, f"{self._local.name} stopped it", stopped=True)
            self._local.network.process_ended(self.address, reason, for_good=True)
        return None

    def give_up(self, error: FlexmarlError) -> None:
        if self.running is not None and self.running.ended.is_set():  # else when it has
            self._local.network.process_ended(self.address, error, for_good=True)

    async def wait_ended(self) -> None:
        running = self.running
        if running is not None and not running.ended.is_set():  # the next incarnation takes its address
            await running.stop(self._local.system_actor(self.address))
            if not running.ended.is_set():
                raise ActorDead(self.name, f"{running.label} does not end")

    async def release(self) -> None:
        try:
            if self.running is not None:
                await self.running.wait_gone()
        finally:
            self._local.network.unwatch_process(self.address)
            self.node.release(self.name)


def _as_dead(reason: FlexmarlError) -> FlexmarlError:
    """The error for callers of an actor that is restarted."""
    if isinstance(reason, ActorFailed):
        return ActorDead(reason.actor, f"it failed: {text_of(reason)}")
    return reason
