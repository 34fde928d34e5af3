"""The router actor: carries out the decisions of ``router.py``.

    decision     carried out                                        then reports to the router
    Route        RouteAssigned to the rollout actor that asked      (ended, by the rollout actor)
    Refuse       RouteRefused to it                                 -
    Load         instance.load                                      loaded, suspected or failed
    Probe        instance.served_version, until it answers          trusted
    Installed    ends ``publish``                                   -
    Changed      console.event                                      -
    Moved        console.event                                      -
    NoInstances  raises NoInstance: the run ends                    -

Decisions are taken at once for the turns of one message, which are ordered among each other: the routes that there are
travel in its answer. All others are taken once per round of the event loop, after its messages: instances that
acknowledge at once share the turns that wait. Loads begin in the order of ``load_order.py``.
"""

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import replace

from ....core.actor import Actor, DeadActor, endpoint
from ....core.base.task_groups import first_error
from ....core.base.texts import text_of
from ....core.errors import FlexmarlError, is_loss
from ....core.ref import ActorRef
from ....core.waits import Wait
from ....transport.statistics import Chosen
from ...errors import EngineFailed, NoInstance, ReadFailed, WrongPolicy
from ...messages import (
    WORK_TIMEOUT_S,
    InstanceApi,
    Loaded,
    Published,
    RouteAssigned,
    RouterApi,
    RouteRefused,
    RouteRequest,
    Routes,
    TurnEnded,
)
from ...names import PolicyName
from ...run_events import InstanceChanged, InstanceMoved, InstanceNews, WeightsPathChosen, WeightsReloaded
from ...spans import record, record_time
from .instance_states import InstanceState
from .load_order import LoadOrder
from .router import Router
from .router_decisions import Changed, Decision, Installed, Load, Moved, NoInstances, Probe, Refuse, Route
from .router_setup import RouterSetup

_News = InstanceChanged | InstanceMoved | WeightsPathChosen | WeightsReloaded
_PROBE_S = 5.0
# Shorter than the turns that it decides about, long enough to cost nothing.
_BALANCE_INTERVAL_S = 0.1
_NEWS: dict[InstanceState, InstanceNews] = {
    InstanceState.SERVING: "serving",
    InstanceState.SUSPECTED: "suspected",
    InstanceState.DRAINING: "draining",
    InstanceState.GONE: "gone",
}


class _Session:
    """The routes that a rollout actor has not been sent yet. ``filled``: there are some.

    They travel by its stream or in an answer, and may overtake each other there: each way names its instances itself.
    """

    def __init__(self) -> None:
        self.filled = asyncio.Event()
        self._routes = Routes()
        self._instances: dict[int, ActorRef[InstanceApi]] = {}
        """Those that its turns were routed to, by number."""
        self._named_by_stream: set[int] = set()
        self._named_in_answers: set[int] = set()

    def add(self, routed: RouteAssigned, instances: Mapping[int, ActorRef[InstanceApi]]) -> None:
        if routed.instance not in self._instances:  # it may be gone when the route leaves
            self._instances[routed.instance] = instances[routed.instance]
        self._routes.routed.append(routed)
        self.filled.set()

    def refuse(self, refused: RouteRefused) -> None:
        self._routes.refused.append(refused)
        self.filled.set()

    def take(self, *, in_answer: bool) -> Routes:
        routes, self._routes = self._routes, Routes()
        self.filled.clear()
        named = self._named_in_answers if in_answer else self._named_by_stream
        for routed in routes.routed:
            if routed.instance not in named:
                named.add(routed.instance)
                routes.instances[routed.instance] = self._instances[routed.instance]
        return routes


class RouterActor(Actor, RouterApi):
    """Takes the messages of workers, trainer and instances, and carries out the decisions of ``Router``."""

    def __init__(self, setup: RouterSetup) -> None:
        self._setup = setup
        self._loop = asyncio.get_running_loop()
        self._router = Router(setup.policies, setup.config, setup.balancing)
        self._order = LoadOrder(self._router.is_awaited)
        self._held: dict[int, asyncio.Event] = {}
        """Set when an instance whose load waits for others may begin it, by instance."""
        self._instances: dict[int, ActorRef[InstanceApi]] = {}
        self._sessions: dict[int, _Session] = {}
        self._opened = 0
        self._published: dict[PolicyName, Published] = {}
        self._installs: dict[PolicyName, asyncio.Future[list[Loaded]]] = {}
        self._loaded: dict[PolicyName, list[Loaded]] = {}
        """The figures of the published version, of each instance that has acknowledged it."""
        self._loads: dict[int, Load] = {}
        """The newest load of each instance that is loading."""
        self._paths: dict[tuple[str, PolicyName], Chosen] = {}
        """The way that the last weights of a policy took to an instance."""
        self._watches: defaultdict[str, deque[int]] = defaultdict(deque)
        """The watched incarnations of each instance, by their first numbers, in the order of their deaths."""
        self._leaving: dict[int, asyncio.Future[None]] = {}
        """By the numbers of the instances that were asked to leave."""
        self._acknowledged = 0
        self._deciding = False
        self._timer: asyncio.TimerHandle | None = None

    async def on_start(self) -> None:
        if self._setup.balancing.config.scope == "intra+inter":
            self.background(self._balance(), "balance")

    async def on_stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # ------------------------------------------------------------------ endpoints

    @endpoint
    async def routes(self, worker: str) -> AsyncGenerator[Routes]:
        self._opened += 1
        number, session = self._opened, _Session()
        self._sessions[number] = session
        self._router.session_begun(number, worker)
        try:
            yield Routes(session=number)
            while True:
                await session.filled.wait()
                if session.filled.is_set():  # else they have travelled in an answer
                    yield session.take(in_answer=False)
        finally:
            del self._sessions[number]
            self._router.session_ended(number, self._loop.time())
            self._decide_soon()

    @endpoint
    async def turns(self, session: int, requests: list[RouteRequest], ended: list[TurnEnded]) -> Routes:
        asker = self._sessions.get(session)
        if asker is None:
            return Routes()  # it has ended: its last messages need no answer
        now = self._loop.time()
        for turn, tokens, lost in ended:
            self._router.ended(session, turn, tokens, now, lost=lost)
        for request in requests:
            self._router.requested(session, request, now)
        if not requests:
            self._decide_soon()
            return Routes()
        self._decide()
        return asker.take(in_answer=True)

    @endpoint
    async def join(
        self, instance: ActorRef[InstanceApi], policies: tuple[PolicyName, ...], capacity: int
    ) -> None:
        for policy in policies:
            if policy not in self._setup.policies:
                raise WrongPolicy(", ".join(self._setup.policies), policy)
        numbers = self._router.joined(instance.name, policies, capacity, self._loop.time())
        self._instances |= dict.fromkeys(numbers, instance)
        self._decide_soon()

    @endpoint
    async def leave(self, instance: str) -> None:
        departures = []
        for number in self._router.numbers_of(instance):
            departures.append(self._leaving.setdefault(number, self._loop.create_future()))
            self._router.drain(number, self._loop.time())
        self._decide_soon()
        async with asyncio.timeout(WORK_TIMEOUT_S):
            for departure in departures:
                # Not awaited itself: all callers share it, and the cancellation of one would cancel it for the others.
                await asyncio.shield(departure)

    @endpoint
    async def publish(self, published: Published) -> list[Loaded]:
        follower = self._setup.followers.get(published.policy)
        if follower is None:
            return await self._install(published)
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                installed = tasks.create_task(self._install(published))
                tasks.create_task(self._install(replace(published, policy=follower)))
        return installed.result()

    async def _install(self, published: Published) -> list[Loaded]:
        policy = published.policy
        self._published[policy], self._loaded[policy] = published, []
        # A version that comes before the one before is installed takes its place: both callers wait for the newest.
        installed = self._installs.setdefault(policy, self._loop.create_future())
        self._router.published(policy, published.version, self._loop.time())
        self._decide_soon()
        versions = record_time(
            self.system.spans, self.ref.name, "versions", policy=policy, version=published.version
        )
        async with asyncio.timeout(WORK_TIMEOUT_S):
            with versions:
                return await asyncio.shield(installed)  # shared by all callers, as a departure is

    async def on_dead(self, dead: DeadActor) -> None:
        number = self._watches[dead.actor].popleft()  # by now it may have been started again
        report = self._router.lost if dead.stopped else self._router.suspected
        report(number, dead.reason, self._loop.time())
        self._decide_soon()

    def statistics(self) -> Mapping[str, float]:
        """See ``Router.statistics``."""
        return self._router.statistics()

    def progress(self) -> int:
        """Versions that instances have acknowledged."""
        return self._acknowledged

    def waits(self) -> list[Wait]:
        return self._router.waits(self._loop.time(), self._order.before)

    # ------------------------------------------------------------------ decisions

    async def _balance(self) -> None:
        """Lets the router look at the loads at intervals."""
        while True:
            await asyncio.sleep(_BALANCE_INTERVAL_S)
            self._router.balance(self._loop.time())
            self._decide_soon()

    def _decide_soon(self) -> None:
        if not self._deciding:
            self._deciding = True
            self._loop.call_soon(self._decide_now)

    def _decide_now(self) -> None:
        self._deciding = False
        self._decide()

    def _decide(self) -> None:
        for decision in self._router.decisions(self._loop.time()):
            self._carry_out(decision)
        for number, may_begin in self._held.items():
            if not self._order.before(self._loads[number].policy):
                may_begin.set()
        due_s = self._router.due_s
        if self._timer is not None and self._timer.when() != due_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and due_s < math.inf:
            self._timer = self._loop.call_at(due_s, self._due)

    def _due(self) -> None:
        self._timer = None
        self._decide()

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Route(number, routed):
                self._sessions[number].add(routed, self._instances)
            case Refuse((number, turn), served):
                if (session := self._sessions.get(number)) is not None:
                    session.refuse(RouteRefused(turn, served))
            case Load(instance):
                # One load at a time: the task of an instance that is loading takes the newest one next.
                if instance not in self._loads:
                    ref = self._instances[instance]
                    self.background(self._load(instance, ref), f"load {ref.name}")
                self._loads[instance] = decision
                if instance in self._held:
                    self._router.load_held(instance)
            case Probe(instance, pause_s):
                ref = self._instances[instance]
                self.background(self._probe(instance, ref, pause_s), f"probe {ref.name}")
            case Installed(policy):
                self._installs.pop(policy).set_result(self._loaded[policy])
            case Changed():
                self._report(decision)
            case Moved(_, instance, giver, taker, reason):
                self._report_event(InstanceMoved(instance, giver, taker, reason))
                now = self.system.spans.now()
                note = f"{instance} goes to {taker}: {reason}"
                record(self.system.spans, self.ref.name, "move", now, now, policy=giver, note=note)
            case NoInstances(policy, seconds, reason):
                self.background(_fail(NoInstance(policy, seconds, reason)), "end")

    def _report(self, changed: Changed) -> None:
        if changed.state is InstanceState.GONE:
            del self._instances[changed.number]
            if (departure := self._leaving.pop(changed.number, None)) is not None:
                departure.set_result(None)
        self._order.ended(changed.number)  # one that is late would hold others' loads as long as it hangs
        self._report_event(
            InstanceChanged(changed.instance, changed.policy, _NEWS[changed.state], changed.reason)
        )

    def _report_path(self, instance: str, loaded: Loaded) -> None:
        """Reports the way that weights have taken, if it is not that of the weights before."""
        chosen, of = loaded.chosen, (instance, loaded.policy)
        if chosen is None or self._paths.get(of) == chosen:
            return
        self._paths[of] = chosen
        refused = {str(path): reason for path, reason in chosen.refused.items()}
        self._report_event(WeightsPathChosen(*of, chosen.path, chosen.reason, refused))

    def _report_mismatch(self, instance: str, loaded: Loaded) -> None:
        if (mismatch := loaded.mismatch) is not None:
            difference, bound = mismatch.difference, mismatch.bound
            self._report_event(
                WeightsReloaded(instance, loaded.policy, loaded.version, difference, bound, mismatch.wrong)
            )

    def _report_event(self, event: _News) -> None:
        self.background(self._tell_console(event), "event")

    async def _tell_console(self, event: _News) -> None:
        await self._setup.console.tell("event", event, timeout_s=WORK_TIMEOUT_S)

    # ------------------------------------------------------------------ instances

    async def _load(self, number: int, instance: ActorRef[InstanceApi]) -> None:
        """Has an instance load the newest version that was decided on, one after the other."""
        try:
            loaded = None
            while (load := self._loads[number]) != loaded:
                await self._wait_turn(number)
                load = self._loads[number]  # another one may have been decided on meanwhile
                published = self._published[load.policy]
                self._order.begun(number, instance.name, load.policy)
                try:
                    figures = await instance.within(WORK_TIMEOUT_S).load(published)
                finally:
                    self._order.ended(number)
                self._acknowledged += 1
                self._report_path(instance.name, figures)
                self._report_mismatch(instance.name, figures)
                if published is self._published[load.policy]:
                    self._loaded[load.policy].append(figures)
                if self._loads[number].policy == load.policy:  # else it has moved meanwhile
                    self._router.loaded(number, published.version, self._loop.time())
                self._decide_soon()
                first = self._router.first_number(number)
                if first is not None and first not in self._watches[instance.name]:  # its start has ended
                    self._watches[instance.name].append(first)
                    self.watch(instance)
                loaded = load
        except ReadFailed as error:
            self._router.read_failed(number, text_of(error), self._loop.time())
        except FlexmarlError as error:
            may_return = is_loss(error) or isinstance(error, EngineFailed)
            report = self._router.suspected if may_return else self._router.failed
            report(number, text_of(error), self._loop.time())
        finally:
            del self._loads[number]
        self._decide_soon()

    async def _wait_turn(self, number: int) -> None:
        """Returns when an instance may begin its load: by the order, or once it has waited as long as a load may take,
        since others may follow those that it waits for."""
        if not self._order.before(self._loads[number].policy):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._setup.config.load_timeout_s):
                while self._order.before(self._loads[number].policy):
                    self._router.load_held(number)
                    self._held[number] = asyncio.Event()
                    try:
                        await self._held[number].wait()
                    finally:
                        del self._held[number]
        self._router.load_begun(number, self._loop.time())

    async def _probe(self, number: int, instance: ActorRef[InstanceApi], pause_s: float) -> None:
        """Asks a suspected instance until it answers, or is known to be gone. Begins after a pause."""
        await asyncio.sleep(pause_s)
        while (policy := self._router.suspected_policy(number)) is not None:
            try:
                version = await instance.within(_PROBE_S).served_version(policy)
            except FlexmarlError:  # it does not answer, or not yet
                await asyncio.sleep(_PROBE_S / 5)
            else:
                if self._router.suspected_policy(number) == policy:  # else another answer was faster
                    self._router.trusted(number, version, self._loop.time())
                    self._decide_soon()


async def _fail(error: FlexmarlError) -> None:
    """Ends the actor that runs this in the background."""
    raise error
