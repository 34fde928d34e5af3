"""The router actor: carries out the decisions of ``router.py``.

    decision     carried out                                        then reports to the router
    Route        TurnRouted to the rollout actor that asked         (ended, by the rollout actor)
    Refuse       TurnRefused to it                                  -
    Load         instance.load                                      loaded, suspected or failed
    Probe        instance.served_version, until it answers          trusted
    Installed    ends ``publish``                                   -
    Changed      console.event                                      -
    Moved        console.event                                      -
    Deserted     raises NoInstance: the run ends                    -

Decisions are taken once per round of the event loop, after all its messages: turns that are asked for at once are
ordered among each other, and instances that acknowledge at once share them.
"""

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping

from ...core.actor import Actor, DeadActor, endpoint
from ...core.errors import FlexmarlError, is_loss, text_of
from ...core.ref import ActorRef
from ..errors import EngineFailed, NoInstance, WrongPolicy
from ..messages import (
    WORK_TIMEOUT_S,
    InstanceApi,
    Loaded,
    Published,
    RouterApi,
    Routes,
    TurnAsked,
    TurnEnded,
    TurnRefused,
    TurnRouted,
)
from ..names import PolicyName
from ..run_events import InstanceChanged, InstanceMoved, InstanceNews
from .instance_states import InstanceState
from .router import Router
from .router_decisions import Changed, Decision, Deserted, Installed, Load, Moved, Probe, Refuse, Route
from .router_setup import RouterSetup

_PROBE_S = 5.0
_NEWS: dict[InstanceState, InstanceNews] = {
    InstanceState.SERVING: "serving",
    InstanceState.SUSPECTED: "suspected",
    InstanceState.DRAINING: "draining",
    InstanceState.GONE: "gone",
}


class _Session:
    """The routes that a rollout actor has not been sent yet. ``known``: numbers of the instances that it knows."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.routes = Routes()
        self.filled = asyncio.Event()

    def take(self) -> Routes:
        routes, self.routes = self.routes, Routes()
        self.filled.clear()
        return routes


class RouterActor(Actor, RouterApi):
    def __init__(self, setup: RouterSetup) -> None:
        self._setup = setup
        self._loop = asyncio.get_running_loop()
        self._router = Router(setup.policies, setup.config, setup.balancing)
        self._instances: dict[int, ActorRef[InstanceApi]] = {}
        self._sessions: dict[int, _Session] = {}
        self._opened = 0
        self._published: dict[PolicyName, Published] = {}
        self._installs: dict[PolicyName, asyncio.Future[list[Loaded]]] = {}
        self._loaded: dict[PolicyName, list[Loaded]] = {}
        """The figures of the published version, of each instance that has acknowledged it."""
        self._loads: dict[int, Load] = {}
        """The newest load of each instance that is loading."""
        self._watches: defaultdict[str, deque[int]] = defaultdict(deque)
        """The numbers of the watched instances of each name, in the order of their deaths."""
        self._leaving: dict[str, asyncio.Future[None]] = {}
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
    async def routes(self) -> AsyncIterator[Routes]:
        self._opened += 1
        number, session = self._opened, _Session()
        self._sessions[number] = session
        try:
            yield Routes(session=number)
            while True:
                await session.filled.wait()
                yield session.take()
        finally:
            del self._sessions[number]
            self._router.session_ended(number, self._loop.time())
            self._decide_soon()

    @endpoint
    async def turns(self, session: int, asked: list[TurnAsked], ended: list[TurnEnded]) -> None:
        if session not in self._sessions:
            return  # it has ended: its last messages need no answer
        now = self._loop.time()
        for turn, tokens, lost in ended:
            instance = self._router.ended(session, turn, tokens, now)
            if lost and instance is not None:
                self._router.suspected(instance.number, "a rollout actor can't reach it", now)
        for request in asked:
            self._router.asked(session, request, now)
        self._decide_soon()

    @endpoint
    async def join(self, instance: ActorRef[InstanceApi], policy: PolicyName, capacity: int) -> None:
        if policy not in self._setup.policies:
            raise WrongPolicy(", ".join(self._setup.policies), policy)
        number = self._router.joined(instance.name, policy, capacity, self._loop.time())
        self._instances[number] = instance
        self._decide_soon()

    @endpoint
    async def leave(self, instance: str) -> None:
        number = self._router.number_of(instance)
        if number is None:
            return
        gone = self._leaving.setdefault(instance, self._loop.create_future())
        self._router.drain(number, self._loop.time())
        self._decide_soon()
        async with asyncio.timeout(WORK_TIMEOUT_S):
            await asyncio.shield(gone)

    @endpoint
    async def publish(self, published: Published) -> list[Loaded]:
        policy = published.policy
        self._published[policy], self._loaded[policy] = published, []
        installed = self._installs.setdefault(policy, self._loop.create_future())
        self._router.published(policy, published.version, self._loop.time())
        self._decide_soon()
        async with asyncio.timeout(WORK_TIMEOUT_S):
            return await asyncio.shield(installed)

    async def on_dead(self, dead: DeadActor) -> None:
        number = self._watches[dead.actor].popleft()  # by now it may have been started again
        if dead.stopped:
            self._router.lost(number, dead.reason, self._loop.time())
        else:
            self._router.suspected(number, dead.reason, self._loop.time())
        self._decide_soon()

    def statistics(self) -> Mapping[str, float]:
        """See ``Router.statistics``."""
        return self._router.statistics()

    # ------------------------------------------------------------------ decisions

    async def _balance(self) -> None:
        """Lets the router look at the loads at intervals."""
        while True:
            await asyncio.sleep(self._setup.balancing.config.interval_s)
            self._router.balance(self._loop.time())
            self._decide_soon()

    def _decide_soon(self) -> None:
        if not self._deciding:
            self._deciding = True
            self._loop.call_soon(self._decide)

    def _decide(self) -> None:
        self._deciding = False
        for decision in self._router.decisions(self._loop.time()):
            self._carry_out(decision)
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
                self._send_route(number, routed)
            case Refuse((number, turn), served):
                if (session := self._sessions.get(number)) is not None:
                    session.routes.refused.append(TurnRefused(turn, served))
                    session.filled.set()
            case Load(instance):
                if instance not in self._loads:
                    ref = self._instances[instance]
                    self.background(self._load(instance, ref), f"load {ref.name}")
                self._loads[instance] = decision
            case Probe(instance):
                ref = self._instances[instance]
                self.background(self._probe(instance, ref), f"probe {ref.name}")
            case Installed(policy):
                self._installs.pop(policy).set_result(self._loaded[policy])
            case Changed():
                self._report(decision)
            case Moved(_, instance, giver, taker, reason):
                self._report_event(InstanceMoved(instance, giver, taker, reason))
            case Deserted(policy, seconds, reason):
                self.background(_fail(NoInstance(policy, seconds, reason)), "end")

    def _send_route(self, number: int, routed: TurnRouted) -> None:
        session, instance = self._sessions[number], routed.instance
        if instance not in session.known:
            session.known.add(instance)
            session.routes.instances[instance] = self._instances[instance]
        session.routes.routed.append(routed)
        session.filled.set()

    def _report(self, changed: Changed) -> None:
        if changed.state is InstanceState.GONE:
            del self._instances[changed.number]
            if (left := self._leaving.pop(changed.instance, None)) is not None:
                left.set_result(None)
        self._report_event(
            InstanceChanged(changed.instance, changed.policy, _NEWS[changed.state], changed.reason)
        )

    def _report_event(self, event: InstanceChanged | InstanceMoved) -> None:
        self.background(self._tell_console(event), "event")

    async def _tell_console(self, event: InstanceChanged | InstanceMoved) -> None:
        await self._setup.console.tell("event", event, timeout_s=WORK_TIMEOUT_S)

    # ------------------------------------------------------------------ instances

    async def _load(self, number: int, instance: ActorRef[InstanceApi]) -> None:
        """Has an instance load the newest version that was decided on, one after the other."""
        try:
            loaded = None
            while (wanted := self._loads[number]) != loaded:
                published = self._published[wanted.policy]
                figures = await instance.within(WORK_TIMEOUT_S).load(published)
                if published is self._published[wanted.policy]:
                    self._loaded[wanted.policy].append(figures)
                self._router.loaded(number, published.version, self._loop.time())
                self._decide_soon()
                if number not in self._watches[instance.name]:  # before, its start may not have ended
                    self._watches[instance.name].append(number)
                    self.watch(instance)
                loaded = wanted
        except FlexmarlError as error:
            may_return = is_loss(error) or isinstance(error, EngineFailed)
            report = self._router.suspected if may_return else self._router.failed
            report(number, text_of(error), self._loop.time())
        finally:
            del self._loads[number]
        self._decide_soon()

    async def _probe(self, number: int, instance: ActorRef[InstanceApi]) -> None:
        """Asks a suspected instance until it answers, or is known to be gone."""
        while self._router.is_suspected(number):
            try:
                version = await instance.within(_PROBE_S).served_version()
            except FlexmarlError:  # it does not answer, or not yet
                await asyncio.sleep(_PROBE_S / 5)
            else:
                self._router.trusted(number, version, self._loop.time())
                self._decide_soon()


async def _fail(error: FlexmarlError) -> None:
    """Ends the actor that runs this in the background."""
    raise error
