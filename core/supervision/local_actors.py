"""The actors of one process: their mailboxes, background work, failures and restarts.

``ActorSystem`` is the view of users on it; supervisors, monitors and the system actor use it directly.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ..actor import Actor
from ..base.names import checked_name
from ..base.texts import text_of, traceback_of
from ..delivery.mailbox import Mailbox
from ..delivery.peers import Network
from ..errors import ActorDead, FlexmarlError, LocalProtocolError, SystemClosed, failure_of
from ..ref import ActorRef
from ..spans import SpanRecorder
from ..telemetry import LoopLag, get_logger, process_usage
from ..waits import Wait
from .monitors import Monitors
from .process_statistics import ProcessStatistics, sum_of_mailboxes, sum_of_peers
from .system_api import SystemApi

if TYPE_CHECKING:
    from .supervisor import Supervisor

log = get_logger(__name__)

Api = TypeVar("Api")
AnyActor = TypeVar("AnyActor", bound=Actor)
Report = TypeVar("Report")

# Closing waits this long for cancelled calls, and for each actor's on_stop. Shorter than a supervisor waits for a
# process that it has asked to stop: the log names the task that hung before the process is killed.
CLOSE_GRACE_S = 3.0


@dataclass(slots=True)
class _Start:
    """An actor in ``on_start``, and the first error of its background work. ``scope``: of ``on_start``, which ends with
    that error: it may wait for what the background work would have done."""

    actor: Actor
    began: float
    scope: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.scope.reschedule(0.0)


class LocalActors:
    """``failure``: set when an actor has failed that no supervisor restarts. ``supervisors``: of this system.
    ``closed``: no actor is started any more."""

    def __init__(self, name: str, network: Network, adopt: Callable[[Actor], None]) -> None:
        """``name``: of the system. ``adopt``: gives an actor its system."""
        self.name = name
        self.network = network
        self.monitors = Monitors(self)
        self.supervisors: list[Supervisor] = []
        self.spans = SpanRecorder(network.now, network.wall)
        self._loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[BaseException] = self._loop.create_future()
        self._adopt = adopt
        self._mailboxes = network.mailboxes
        self._actors: dict[str, Actor] = {}
        self._starting: dict[str, _Start] = {}
        self._reserved: set[str] = set()
        self._background: dict[asyncio.Task[None], Actor] = {}
        self.closed = False

    @property
    def address(self) -> str:
        """The address of the system."""
        return self.network.address

    def ref(self, name: str, address: str, api: type[Api] | None = None) -> ActorRef[Api]:
        """See ``ActorSystem.ref``."""
        return ActorRef(name, address, self.network, api)

    def system_actor(self, address: str) -> ActorRef[SystemApi]:
        """The actor ``system`` of the process at ``address``."""
        return self.ref("system", address, SystemApi)

    def has_actor(self, name: str) -> bool:
        """True if ``name`` is in use: its actor runs or is being restarted, or the name is reserved."""
        return name in self._mailboxes

    def serves(self, name: str) -> bool:
        """True if an actor runs under ``name`` now."""
        return name in self._actors

    def runs_within(self, name: str) -> bool:
        """True if the running task is one of the actor's own."""
        task = asyncio.current_task()
        mailbox = self._mailboxes.get(name)
        if mailbox is not None and mailbox.runs_in(task):
            return True
        actor = None if task is None else self._background.get(task)
        return actor is not None and actor is self._actors.get(name)

    # ------------------------------------------------------------------ starting

    async def add(self, actor: AnyActor, name: str) -> ActorRef[AnyActor]:
        """See ``ActorSystem.add``."""
        is_taken = self.has_actor(checked_name(name)) and name not in self._reserved
        if is_taken or name in self._starting:
            raise ValueError(f"{self.name} already has an actor named {name!r}")
        await self._start(actor, name)
        self._reserved.discard(name)
        mailbox = self._mailboxes.setdefault(name, Mailbox(name, self.name, self.network, self.network.now))
        mailbox.open(actor)
        return self.ref(name, self.address, type(actor))

    def reserve(self, name: str) -> None:
        """Reserves a name: requests to it are queued until ``add``."""
        self._reserved.add(checked_name(name))
        self._mailboxes[name] = Mailbox(name, self.name, self.network, self.network.now)

    async def restart(self, name: str, actor: Actor) -> None:
        """Replaces an actor that has failed. References to it stay valid, and requests that arrived meanwhile are
        served."""
        await self._start(actor, name)
        self._mailboxes[name].open(actor)

    async def _start(self, actor: Actor, name: str) -> None:
        self._adopt(actor)
        actor._runtime = self
        actor.ref = self.ref(name, self.address, type(actor))
        self._starting[name] = start = _Start(actor, self._loop.time())
        try:
            try:
                async with start.scope:
                    await actor.on_start()
            except TimeoutError:
                if start.error is None:  # it is a timeout of its own
                    raise
            if start.error is not None:
                raise start.error
            if self.closed:
                raise SystemClosed(f"{self.name} is closed")
        except BaseException:
            self._cancel_background(actor)
            raise
        finally:
            del self._starting[name]
        self._actors[name] = actor

    # ------------------------------------------------------------------ stopping

    async def remove(self, name: str) -> None:
        """See ``ActorSystem.remove``."""
        if self.runs_within(name):
            raise LocalProtocolError(f"actor {name} can't remove itself: let another one do it")
        for supervisor in self.supervisors:
            if supervisor.owns(name):
                await supervisor.stop(name)
                return
        if name not in self._mailboxes:
            raise KeyError(name)
        raised = await self.stop(name)
        self.unregister(name, ActorDead(name, f"{self.name} stopped it"))
        if raised is not None:
            raise raised

    async def stop(self, name: str) -> BaseException | None:
        """Stops an actor in good order, if it runs; returns the error of its ``on_stop``. Later requests to it are
        queued until ``restart`` or ``unregister``."""
        actor = self._actors.get(name)
        if actor is None:
            return None
        reason = f"{self.name} stopped it"
        self.monitors.remember(name, reason, stopped=True)
        await self._wait_ended(
            self._mailboxes[name].fail(ActorDead(name, reason)) + self._cancel_background(actor)
        )
        raised = await self._run_on_stop(name)
        self.monitors.notify(name, reason, stopped=True)
        return raised

    def unregister(self, name: str, error: FlexmarlError) -> None:
        """Frees a name for good: requests that are queued for it get ActorDead with the text of ``error``."""
        mailbox = self._mailboxes.pop(name, None)
        if mailbox is not None:
            mailbox.fail(error)

    async def _run_on_stop(self, name: str) -> BaseException | None:
        actor = self._actors.pop(name, None)
        if actor is None:
            return None
        stopping = self._loop.create_task(actor.on_stop(), name=f"{name}.on_stop")
        await self._wait_ended([stopping])
        if not stopping.done():
            stopping.cancel()
        elif not stopping.cancelled() and (raised := stopping.exception()) is not None:
            log.error("on_stop failed", system=self.name, actor=name, error=traceback_of(raised))
            return raised
        return None

    async def _wait_ended(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Waits for ``tasks``, at most ``CLOSE_GRACE_S``; logs those that have not ended."""
        late = (await asyncio.wait(tasks, timeout=CLOSE_GRACE_S))[1] if tasks else ()
        for task in late:
            log.warning("did not end in time", system=self.name, task=task.get_name(), waited_s=CLOSE_GRACE_S)

    # ------------------------------------------------------------------ the end of the process

    async def notify_watchers(self) -> None:
        """Reports all actors as stopped in good order, and waits until watchers in other systems know."""
        for task in self._background:  # local watchers stop too
            task.cancel()
        waiting = self.monitors.undelivered()
        for name in list(self._actors):
            self.monitors.notify(name, f"{self.name} was closed", stopped=True)
        if waiting:
            await asyncio.wait(waiting, timeout=CLOSE_GRACE_S)

    async def close(self) -> BaseException | None:
        """Cancels all calls, then runs every ``on_stop``, the newest actor's first; returns the first error."""
        # All calls end before the first ``on_stop``: that may close what another actor's handler still uses. The newest
        # actor is the first to stop, as it may have been made with references to the older ones.
        self.closed = True
        closed = SystemClosed(f"{self.name} is closed")
        tasks = [task for mailbox in self._mailboxes.values() for task in mailbox.fail(closed)]
        tasks += self._background
        for task in tasks:
            task.cancel()
        await self._wait_ended(tasks)
        first = None
        for name in reversed(self._mailboxes):
            raised = await self._run_on_stop(name)
            first = first or raised
        return first

    def crash(self) -> None:
        """Ends everything as if this process had been killed: no actor is stopped in good order."""
        self.closed = True
        killed = SystemClosed(f"{self.name} was killed")
        for mailbox in self._mailboxes.values():
            mailbox.fail(killed)
        for task in self._background:
            task.cancel()
        for supervisor in self.supervisors:
            supervisor.crashed()
        # The system's own actor stays: it holds a timer.
        self._actors = {name: actor for name, actor in self._actors.items() if name == "system"}
        if not self.failure.done():
            self.failure.set_result(killed)

    # ------------------------------------------------------------------ failures

    def fail(self, name: str, error: BaseException) -> None:
        """Ends an actor that has failed: its calls raise ActorDead, its watchers are notified, and its supervisor
        decides about a restart. Without a supervisor ``failure`` is set."""
        actor = self._actors.pop(name)
        words = f"{type(error).__name__}: {text_of(error)}"
        failed = failure_of(name, error)
        # Watchers come before the supervisor: the exit is reported before a successor can answer in its place.
        self._mailboxes[name].fail(failed)
        self._cancel_background(actor)
        self.monitors.notify(name, words, stopped=False)
        if any(supervisor.actor_failed(name, error) for supervisor in self.supervisors):
            return
        self.unregister(name, failed)
        self.set_failure(error, name)

    def set_failure(self, error: BaseException, name: str) -> None:
        """Sets ``failure`` to the error of the actor ``name``; a second failure is logged."""
        if self.failure.done():
            log.error("a second actor failed", system=self.name, actor=name, error=traceback_of(error))
        else:
            self.failure.set_result(error)

    # ------------------------------------------------------------------ for Actor

    def watch(self, actor: Actor, ref: ActorRef[Any]) -> None:
        """See ``Actor.watch``."""
        self.monitors.watch(actor, ref)

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
        if self._actors.get(name) is actor and not self.closed:
            self.fail(name, error)
        elif (start := self._starting.get(name)) is not None and start.error is None and not self.closed:
            start.fail(error)
        else:  # it is ending already
            log.error("background work failed", task=task.get_name(), error=traceback_of(error))

    def _cancel_background(self, actor: Actor) -> list[asyncio.Task[None]]:
        tasks = [task for task, owner in self._background.items() if owner is actor]
        for task in tasks:
            task.cancel()
        return tasks

    # ------------------------------------------------------------------ for people

    def process_statistics(self, lag: LoopLag) -> ProcessStatistics:
        """The figures of this process. ``lag``: of its loop."""
        usage = process_usage(lag)
        return ProcessStatistics(
            usage.pid,
            usage.loop_lag_ms,
            usage.rss_mib,
            usage.cpu_s,
            sum_of_mailboxes(mailbox.statistics() for mailbox in self._mailboxes.values()),
            sum_of_peers(
                [connection.session.statistics() for connection in self.network.connections],
                self.network.refused_messages,
            ),
            {name: figures for name, actor in self._actors.items() if (figures := _figures_of(name, actor))},
            sum(_report_of(name, actor.progress, 0) for name, actor in self._actors.items()),
        )

    def waits(self) -> dict[str, list[Wait]]:
        """See ``SystemApi.process_waits``."""
        by_actor = {name: _waits_of(name, actor) for name, actor in self._actors.items()}
        for name, start in self._starting.items():
            begun = Wait("its start (on_start)", self._loop.time() - start.began)
            by_actor[name] = _waits_of(name, start.actor) or [begun]
        return {name: waits for name, waits in by_actor.items() if waits}


def _figures_of(name: str, actor: Actor) -> dict[str, float]:
    def figures() -> dict[str, float]:
        return {figure: float(value) for figure, value in actor.statistics().items()}

    return _report_of(name, figures, {})


def _waits_of(name: str, actor: Actor) -> list[Wait]:
    return _report_of(name, lambda: [*actor.waits()], [])


def _report_of(name: str, report: Callable[[], Report], nothing: Report) -> Report:
    """The result of an actor's own code, which must not hide the report of its process: ``nothing`` if it raises."""
    try:
        return report()
    except Exception as error:  # noqa: BLE001  # the actor's own code
        log.error("report failed", actor=name, error=traceback_of(error))
        return nothing
