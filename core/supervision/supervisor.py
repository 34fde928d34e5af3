"""Starts actors, on nodes or in this process, watches them, restarts them, and stops them.

    node = ProcessNode(system, directory, log_directory, env)
    async with Supervisor(system, node) as supervisor:
        await supervisor.spawn("pkg.module:Store", "store", {"budget": 10})
        store = supervisor.reference("store", StoreApi)
        await supervisor.wait_failed()      # raises ActorDead or ActorFailed

``restart_policy.py`` decides about restarts, one actor at a time; a restarted actor keeps its name, its node and its
address. By default a supervisor restarts nothing: the first failure ends the run.

From kill -9 to ready. Three messengers bring the news of a process's death, each from another side:

    the kernel        makes the process's pidfd readable: ``ForkedProcess._has_ended`` sets ``exited``. This is the
                      first one, and enough to act
    the fork server   waits for its child (``fork_server._report_ended``) and sends the exit status, which a pidfd does
                      not have: ``ForkedProcess.reported``. ``wait_exit`` waits for it: the reason names the signal
    the connections   libzmq's monitor sees the socket close: ``Network.disconnected``. A caller of the dead actor
                      waits ``EXIT_REASON_WAIT_S`` for the other two, so that its ActorDead has the better reason

Then, in this order:

    NodeChild._watch           wakes up with the reason, and passes it to its owner
    Supervisor.child_exited    has ``Restarts.died`` decide (pure: how often in which period), or gives the actor up.
                               Actors of a lost node move to another one, which is not counted
    Supervisor._restart        waits until the old process has ended, as the new one takes its address
    NodeChild.launch           counts the epoch up and announces it *before* there is a process: a message of the old
                               one that is still under way is refused (``heard_incarnation``)
    ProcessNode.launch         -> ``ForkServer.fork`` -> ``fork_server._fork`` -> ``worker_main.main``, which reads its
                               ``WorkerInit`` from standard input: the end of that input later shows the parent's end
    HostedActor.serve          reserves the name first, so that calls wait instead of failing, builds the actor, and
                               asks the supervisor's endpoint ``ready``
    NodeChild.ready            sets ``started``. It may overtake the node's answer to ``launch``: then it is kept until
                               that is there (``_take_early``). ``launch`` returns, and ``runs`` is True again

A process that is alive and silent takes the same way from ``end_lost`` on: it is killed, and its silence is the reason.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, overload

from ..actor import Actor, endpoint
from ..base.names import checked_name
from ..base.texts import text_of
from ..errors import ActorDead, ActorFailed, FlexmarlError, TooManyRestarts, failure_of
from ..ref import ActorRef
from ..spans import LastSpans, SpanBatch
from ..telemetry import LogLevel, get_logger
from ..waits import ProcessWaits, Wait
from .children import Child, LocalChild, NodeChild
from .node import Launch, Node
from .process_statistics import ProcessStatistics
from .restart_policy import Escalate, Intensity, Restarts
from .system_api import SystemApi, ask_processes
from .worker_init import constructor_arguments, import_path

if TYPE_CHECKING:
    from ..system import ActorSystem

log = get_logger(__name__)

Api = TypeVar("Api")
AnyActor = TypeVar("AnyActor", bound=Actor)
Setup = TypeVar("Setup")
Env: TypeAlias = Mapping[str, str] | None
AnotherNode: TypeAlias = Callable[[str, ActorDead], tuple[Node, Mapping[str, str]] | None]

NO_RESTARTS = Intensity(max_restarts=0)


class Supervisor(Actor):
    """An actor of its system, by default under the name ``supervisor``. ``failure``: set when an actor has failed that
    is not restarted; the others run on. ``stopping``: all actors are being stopped or killed.

    It is one class because starts, stops and restarts of an actor exclude each other: each looks at all the others.
    """

    def __init__(
        self,
        system: "ActorSystem",
        node: Node,
        *,
        intensity: Intensity = NO_RESTARTS,
        is_restarted: Callable[[FlexmarlError], bool] = lambda _: True,
        name: str = "supervisor",
        log_level: LogLevel = "info",
    ) -> None:
        """``node``: the one on which actors run, unless ``spawn`` gets another. ``is_restarted``: False for failures
        that another start would meet again: the first of them is escalated, without regard to the intensity.
        ``log_level``: the least one of the lines in the logs of actors on nodes.
        """
        self._local = system._local
        self._name = name
        self._node = node
        self._log_level = log_level
        self.on_restart: Callable[[str, FlexmarlError], None] = lambda name, reason: None
        """Called with the name of an actor that is about to be restarted, and the reason."""
        self.on_late: Callable[[str], None] = lambda name: None
        """Called with the name of an actor that did not end in good order when it was asked to, and was killed."""
        self.another_node: AnotherNode | None = None
        """The place of an actor whose node is lost: node and variables, by name and reason; None: it is given up."""
        self._restarts = Restarts(intensity)
        self._is_restarted = is_restarted
        self._children: dict[str, Child] = {}
        self._restarting: dict[str, asyncio.Task[None]] = {}
        self._last_spans = LastSpans()
        self.stopping = False

    def __repr__(self) -> str:
        failed = hasattr(self, "failure") and self.failure.done()
        state = "stopping" if self.stopping else "failed" if failed else "running"
        running = sum(child.runs for child in self._children.values())
        return f"<Supervisor {self._name}: {running} of {len(self._children)} actors run, {state}>"

    # ------------------------------------------------------------------ from start to end

    async def __aenter__(self) -> Self:
        self.failure: asyncio.Future[FlexmarlError] = asyncio.get_running_loop().create_future()
        await self._local.add(self, self._name)
        self._local.supervisors.append(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.stop_all()
        finally:
            for name, child in self._children.items():
                if isinstance(child, NodeChild):
                    child.node.release(name)
            self._local.supervisors.remove(self)
            self.failure.cancel()

    async def wait_failed(self) -> None:
        """Waits for the first failure of an actor that is not restarted, and raises it: ActorDead or ActorFailed;
        TooManyRestarts, an ActorDead, if it had been restarted before."""
        # A waiter that is cancelled would cancel the future for all others.
        raise await asyncio.shield(self.failure)

    async def stop_all(self) -> None:
        """Stops every actor in good order; processes that do not end in time are killed.

        Raises the first error of an ``on_stop`` of a local actor.
        """
        self.stopping = True
        await _cancel(*self._restarting.values())
        children = list(self._children.values())
        on_nodes = [child for child in children if isinstance(child, NodeChild)]
        # Processes side by side: each may take its whole grace period. Local actors afterwards, one by one and the
        # newest first: the actors in processes may have called them until now.
        await asyncio.gather(*(child.halt() for child in on_nodes))
        for name in [
            child.name for child in on_nodes if child.running is not None and child.running.was_late
        ]:
            self.on_late(name)
        await _cancel(*(watch for child in on_nodes for watch in child.watches))  # outlived SIGKILL
        first: BaseException | None = None
        for child in reversed(children):
            if not isinstance(child, NodeChild):
                raised = await child.stop()
                first = first or raised
        if first is not None:
            raise first

    def crashed(self) -> None:
        """The process has ended as if it had been killed: nothing is restarted any more."""
        self.stopping = True
        for task in self._restarting.values():
            task.cancel()

    async def allow(self, public_key: str, calls: tuple[str, ...]) -> None:
        """See ``ActorSystem.allow``."""
        for name in self.running:
            await self._local.system_actor(self._children[name].address).api.allow(public_key, calls)

    async def kill_all(self) -> None:
        """Ends every actor on a node at once."""
        self.stopping = True
        newest = [child.running for child in self._children.values() if isinstance(child, NodeChild)]
        started = [running for running in newest if running is not None]
        for running in started:
            running.kill()
        await asyncio.gather(*(running.wait_gone() for running in started))

    # ------------------------------------------------------------------ starting and stopping one

    @overload
    async def spawn(
        self,
        actor_class: str,
        name: str,
        setup: object = None,
        *,
        process: bool = True,
        env: Env = None,
        node: Node | None = None,
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
        self,
        actor_class: Any,
        name: str,
        setup: object = None,
        *,
        process: bool = True,
        env: Env = None,
        node: Node | None = None,
    ) -> ActorRef[Any]:
        """Starts an actor, on a node or in this process, and returns after its ``on_start``.

        ``actor_class``: a class, or its import path (``package.module:Class``). ``setup``: the keyword arguments of its
        constructor as a mapping, or its single argument as any other plain data (a frozen dataclass, say).
        ``process``: False starts it in this process. ``env``: variables of its process beside those of the node, which
        must be known there. ``node``: None: the supervisor's.

        A first start that fails is not repeated: it raises the error of the constructor or of ``on_start``, for a
        process as ActorFailed; ActorDead if the process ended otherwise or is not ready within an hour. Raises
        ValueError if the name is invalid or in use, or the environment is not known; LocalProtocolError if a process
        could not import the class.
        """
        self._check_free(name, process=process)
        child = self._child(name, actor_class, setup, env, node, process=process)
        # Before the start: the process reports to ``ready`` by its name while ``launch`` waits. A policy of restarts
        # knows it only afterwards, so that a first start that fails is not repeated.
        self._children[name] = child
        try:
            await child.launch()
        except BaseException:
            await self._forget(child)
            raise
        self._restarts.add(name)
        api = actor_class if isinstance(actor_class, type) else None
        return self._local.ref(name, child.address, api)

    def _check_free(self, name: str, *, process: bool) -> None:
        local = self._local
        checked_name(name)
        if name in self._children or local.has_actor(name) or (process and name == local.name):
            raise ValueError(f"{local.name} already has an actor named {name!r}")

    def _child(
        self, name: str, actor_class: Any, setup: object, env: Env, node: Node | None, *, process: bool
    ) -> Child:
        local = self._local
        if not process:
            return LocalChild(name, actor_class, setup, local)
        node = node or self._node
        args, kwargs = constructor_arguments(setup)
        reports_to, before = (self._name, local.address), local.network.first_epoch(name)
        launch = Launch(
            name, import_path(actor_class), args, kwargs, reports_to, before, self._log_level, dict(env or {})
        )
        node.check(launch)
        return NodeChild(launch, node, local, self)

    async def stop(self, name: str) -> None:
        """Stops one actor for good, in good order. Raises KeyError for an unknown name, and the error of the
        ``on_stop`` of a local actor."""
        child = self._children[name]
        self._restarts.remove(name)
        if (restarting := self._restarting.get(name)) is not None:
            await _cancel(restarting)
        raised = await child.stop()
        await self._forget(child)
        if raised is not None:
            raise raised

    async def _forget(self, child: Child) -> None:
        """Frees the name of a child that has ended or was killed."""
        try:
            await child.release()
        finally:
            self._children.pop(child.name, None)

    def reference(self, name: str, api: type[Api]) -> ActorRef[Api]:
        """A reference to the actor ``name`` that has been spawned. Raises KeyError for another name."""
        return self._local.ref(name, self._children[name].address, api)

    def owns(self, name: str) -> bool:
        """True if ``name`` is an actor of this supervisor."""
        return name in self._children

    @endpoint
    async def locate(self, name: str) -> str:
        """The address of the actor ``name``: another one after its node was lost, empty while none is known."""
        child = self._children.get(name)
        return "" if child is None else child.address

    @endpoint
    async def locate_node(self, name: str) -> str:
        """The address of the process that starts those of the actor ``name`` on another host; empty if that is this
        host, or the actor is unknown."""
        child = self._children.get(name)
        return child.node.address if isinstance(child, NodeChild) else ""

    def find(self, name: str) -> ActorRef[Any] | None:
        """The actor of that name, if it runs or is being restarted."""
        child = self._children.get(name)
        if child is None or name not in self._restarts or (self.failure.done() and not child.runs):
            return None
        return self._local.ref(name, child.address)

    # ------------------------------------------------------------------ reports of children

    @endpoint
    async def ready(self, name: str, epoch: int) -> None:
        """Reports that ``on_start`` of the actor ``name`` has ended, in the incarnation ``epoch``. For the actor's
        process."""
        child = self._children[name]
        if isinstance(child, NodeChild):
            child.ready(epoch)

    @endpoint
    async def failed(
        self, name: str, raised_in: str, kind: str, error: str, remote_traceback: str, spans: SpanBatch
    ) -> None:
        """Reports that the actor ``name`` has failed, and that its process is about to end. ``raised_in``, ``kind``,
        ``error``: see ``Origin``. ``spans``: those that may not have been taken yet. For the actor's process."""
        child = self._children[name]
        self._last_spans.add(name, spans)
        if isinstance(child, NodeChild):
            child.failed(ActorFailed(name, error, remote_traceback, kind=kind, raised_in=raised_in))

    @endpoint
    async def lost(self, name: str, epoch: int, reason: str) -> None:
        """Another actor has lost the incarnation ``epoch`` of ``name``. If that one still runs, it hangs or is stopped:
        it is killed, and counts as failed. An actor that has been restarted since is left alone."""
        self.end_lost(ActorDead(name, reason), epoch)

    def end_lost(self, error: ActorDead, epoch: int | None = None) -> None:
        """As ``lost``, for ``error.actor``; by default its newest incarnation, if that has started."""
        child = self._children.get(error.actor)
        # An incarnation that another actor names has begun to serve, though its own report may still be on the way. If
        # it were left alone it would live on, and those that have given it up would never take it in again.
        if isinstance(child, NodeChild) and (child.runs or epoch is not None) and not self.stopping:
            child.lost(error, epoch)

    def actor_failed(self, name: str, error: BaseException) -> bool:
        """Takes care of the local actor ``name``, which has failed; False if it is not one of its children."""
        child = self._children.get(name)
        if not isinstance(child, LocalChild) or self.stopping:
            return False
        if child.runs:
            self.child_exited(child, failure_of(name, error))
        return True

    def child_exited(self, child: Child, reason: FlexmarlError) -> None:
        """A child has failed, or its process has ended, without a request to stop."""
        if child.runs:
            child.runs = False
            self._restart_after(child, reason)
        # else its start raises the reason

    def final_error(self, reason: FlexmarlError) -> FlexmarlError | None:
        """The error of later calls to a child that has ended for ``reason``; None if it may be restarted."""
        if not (self.stopping or self.failure.done()):
            return None
        final = self.failure.result() if self.failure.done() and not self.failure.cancelled() else None
        return final if final is not None and final.__cause__ is reason else reason

    # ------------------------------------------------------------------ restarting

    def _restart_after(self, child: Child, reason: FlexmarlError) -> None:
        if self.stopping or child.name not in self._restarts:
            return
        if isinstance(child, NodeChild) and child.node.lost is not None and self.another_node is not None:
            self._leave_node(child, ActorDead(child.name, child.node.lost.reason), self.another_node)
            return
        if self._is_restarted(reason):
            escalation = self._restarts.died(child.name, asyncio.get_running_loop().time())
        else:
            escalation = self._restarts.give_up(child.name)
        if escalation is not None:
            self._escalate(child, reason, escalation)
            return
        log.warning("actor is restarted", name=child.name, after=text_of(reason))
        self.on_restart(child.name, reason)
        self._begin_restart(child)

    def _leave_node(self, child: NodeChild, lost: ActorDead, another_node: AnotherNode) -> None:
        """Such restarts are not counted: the loss of a node says nothing about its actors."""
        place = another_node(child.name, lost)
        if place is None:
            log.warning("actor is given up", name=child.name, reason=lost.reason)
            self._restarts.remove(child.name)
            child.give_up(lost)
            return
        self._move(child, lost, *place)

    def _move(self, child: NodeChild, lost: ActorDead, node: Node, env: Mapping[str, str]) -> None:
        log.warning("actor moves", name=child.name, to=node.name, reason=lost.reason)
        self.on_restart(child.name, lost)
        child.move(node, env)
        self._begin_restart(child)

    def take_up(self, name: str, lost: ActorDead, node: Node, env: Mapping[str, str]) -> None:
        """Starts an actor again that was given up because its node was ``lost``: now there is a place for it. Does
        nothing while all are being stopped."""
        child = self._children[name]
        if isinstance(child, NodeChild) and not self.stopping:
            self._restarts.add(name)
            self._move(child, lost, node, env)

    def _begin_restart(self, child: Child) -> None:
        name = child.name
        work = self._restart(child, self._restarting.get(name))
        self._restarting[name] = task = asyncio.create_task(work, name=f"restart {name}")
        task.add_done_callback(lambda ended: self._restart_ended(name, ended))

    def _restart_ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._restarting.get(name) is task:
            del self._restarting[name]
        if not task.cancelled() and (error := task.exception()) is not None:  # a defect of the supervisor
            self._give_up(failure_of(self._name, error))

    async def _restart(self, child: Child, replaced: asyncio.Task[None] | None) -> None:
        # A failure in the middle of a restart begins another one: two at once would start two incarnations.
        if replaced is not None:
            await _cancel(replaced)
        name = child.name
        if name not in self._restarts:  # it has been stopped for good meanwhile
            return
        try:
            await child.wait_ended()
            await child.launch()
        except Exception as error:  # noqa: BLE001  # any error of a start is the next failure
            if name in self._restarts:
                reason = error if isinstance(error, ActorDead | ActorFailed) else failure_of(name, error)
                self._restart_after(child, reason)

    def _escalate(self, child: Child, reason: FlexmarlError, decision: Escalate) -> None:
        final = reason
        if decision.restarts:
            final = TooManyRestarts(child.name, decision.restarts, decision.period_s, reason)
        self._give_up(final)
        for task in self._restarting.values():
            if task is not asyncio.current_task():
                task.cancel()
        for lost in self._children.values():
            if lost.runs or lost.name not in self._restarts:
                continue
            lost.give_up(final)

    def _give_up(self, reason: FlexmarlError) -> None:
        if not self.stopping and not self.failure.done():
            self.failure.set_result(reason)

    # ------------------------------------------------------------------ statistics

    @property
    def running(self) -> list[str]:
        """The names of the actors on nodes that have started and have not ended."""
        return [name for name, child in self._children.items() if isinstance(child, NodeChild) and child.runs]

    async def process_statistics(
        self, reported: Callable[[str, ProcessStatistics], None] = lambda name, figures: None
    ) -> dict[str, ProcessStatistics]:
        """The figures of this process, and of every running one that answers within 10 s, by actor name. ``reported``:
        is called with each as it comes."""
        systems = self._systems(self.running)
        return await ask_processes(systems, lambda _, system: system.process_statistics(), reported=reported)

    async def process_spans(
        self, share: float, received: Mapping[str, int], timeout_s: float
    ) -> dict[str, SpanBatch]:
        """The spans of this process, of every running one that answers within ``timeout_s``, and of those whose actors
        have failed, by actor name. ``received``: the number of the last batch of each that has arrived; see
        ``SpanRecorder.take``."""
        self._last_spans.forget(received)
        systems = self._systems(self.running)
        batches = await ask_processes(
            systems, lambda name, system: system.process_spans(share, received.get(name, 0)), timeout_s
        )
        # An actor that has failed may have answered before: its last batch has that answer in it. If its successor has
        # answered, that one keeps its spans for the next call.
        return batches | self._last_spans.since(received)

    async def process_waits(self, timeout_s: float) -> dict[str, ProcessWaits]:
        """``SystemApi.process_waits`` of this process, and of every one that runs or is being started, by actor name.
        Waits ``timeout_s`` for the answers."""
        processes = {
            name: child.running
            for name, child in self._children.items()
            if isinstance(child, NodeChild) and child.running is not None
        }
        systems = self._systems(name for name, running in processes.items() if not running.ended.is_set())
        waits = await ask_processes(systems, lambda _, system: system.process_waits(), timeout_s)
        labels = {name: running.description() for name, running in processes.items()}
        return {name: ProcessWaits(labels.get(name, "this process"), waits.get(name)) for name in systems}

    def _systems(self, names: Iterable[str]) -> dict[str, ActorRef[SystemApi]]:
        """Those of ``names``, and this one."""
        addresses = {name: self._children[name].address for name in names}
        addresses[self._local.name] = self._local.address
        return {name: self._local.system_actor(address) for name, address in addresses.items()}

    def waits(self) -> list[Wait]:
        """The actors that are being started."""
        now = asyncio.get_running_loop().time()
        children = [child for child in self._children.values() if isinstance(child, NodeChild)]
        return [wait for child in children if (wait := child.starting(now)) is not None]


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    """Cancels ``tasks`` and waits until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
