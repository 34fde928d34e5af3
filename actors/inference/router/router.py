"""Chooses the instance of every turn, and has instances load new versions. Pure: events and the time in, decisions out.

    requested ──> waits ──Route──> at an instance ──ended──> forgotten
                     └──Refuse──> forgotten

    joined ──Load──> loaded ──> serves ──> ... published ──Load──> loaded ──> serves ... drain, lost ──> gone

Rules:
- The states of an instance and their transitions are in ``instance_states.py``.
- A turn waits in the router, never at an instance: one has at most ``capacity`` turns, as many as it can work on.
- A turn is routed to one instance at a time, one that serves a version in the turn's range: apply, acknowledge, route.
- A turn goes to the instance with the fewest expected tokens (FlexMARL, arXiv 2602.09578, intra-agent balancing): those
  of the prompts there, and the policy's mean of generated tokens for each. The instance that had a prompt with the same
  beginning is preferred while it has fewer tokens more than the prompt, that is, than it may save.
- Waiting turns go by the time at which they should be under way: when they were asked for, less the seconds that the
  turns behind them are expected to take (critical path). Priority grows with the time of waiting, so no turn starves.
- While some instances of a policy load a version that others serve already, those get no more than their share of the
  turns: else the first to acknowledge would take them all.
- When a version is published, all live instances of its policy load it at once. The turns that no later version may
  generate are refused.
- An instance that a rollout actor or the runtime reports as lost is suspected: it gets no turns, and is probed. It is
  trusted again when it answers, and gone once its death is confirmed. The same for one that does not acknowledge its
  version in time, until it does.
- A link between a rollout actor and an instance that answers the router may be cut: the actor's turns go to other
  instances, and one of them tries the link from time to time (``cut_links.py``). An actor that has reached no instance
  of a policy for ``return_timeout_s`` ends the run, as a policy without any instance does.
- An instance may serve several policies at the same time: adapters over one base. Its capacity and its tokens are those
  of all their turns; its state and its version are each policy's own. A version of one policy interrupts no other. Of
  the waiting turns of policies that share instances, the first in line goes first.
- Instances that serve one policy move between policies by ``rebalancer.py``. One that moves gets no turns until it
  serves the other policy. While a policy installs a version, moves from it and to it wait, unless one has no instance.
- The turns of an instance that is gone are forgotten: the rollout actors learn of the loss from their calls, and ask
  again.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final

from ....core.waits import Wait
from ...messages import RouteRequest
from ...names import PolicyName, Version
from .cut_links import CutLink, CutLinks
from .instance_states import TRANSITIONS, InstanceEvent, InstanceState
from .live_instances import LiveInstances
from .load_deadlines import LoadDeadlines
from .rebalancer import Rebalancer
from .routed_policy import RoutedPolicy
from .router_config import RouterConfig
from .router_decisions import Changed, Decision, Installed, Load, Moved, NoInstances, Probe, Refuse, Route
from .router_loads import RebalanceSettings, first_to_move, hand_over, measure_load, moves_of
from .router_report import LoadsBefore, statistics_of, waits_of
from .waiting_turns import RoutedInstance, RoutedTurn

_REMEMBERED_TURNS: Final = 16384
_READ_PAUSE_S: Final = 1.0
_LOADING: Final = frozenset({InstanceState.JOINING, InstanceState.LOADING})
_SERVING: Final = InstanceState.SERVING


class Router:
    """Call ``decisions`` after the events of a round: they leave nothing that can be decided.

    It is one class because each event changes turns, instances and policies together, under one set of invariants.
    """

    def __init__(
        self, policies: Iterable[PolicyName], config: RouterConfig, balancing: RebalanceSettings | None = None
    ) -> None:
        self._config = config
        self._balancing = balancing or RebalanceSettings()
        self._balancer = Rebalancer(self._balancing.config, self._balancing.rules)
        self._policies = {
            policy: RoutedPolicy(in_turn=self._balancing.config.scope == "off", lengths=config.lengths)
            for policy in policies
        }
        self._live = LiveInstances()
        self._links = CutLinks()
        self._sessions: dict[int, dict[int, RoutedTurn]] = {}
        self._decided: list[Decision] = []
        # The policies for which something may have become possible since the last ``decisions``: events only note them,
        # and the matching is done once for all turns of a message. A dict, not a set: its order is that of the events,
        # in every process, while a set's depends on the seed of the hash.
        self._touched: dict[PolicyName, None] = {}
        self._deadlines = LoadDeadlines(self._live)
        self._due_s: float | None = math.inf
        """``due_s``; None if it has to be found again."""
        self._queue_times_s: deque[float] = deque(maxlen=_REMEMBERED_TURNS)
        self._moves = 0

    # ------------------------------------------------------------------ turns

    def requested(self, session: int, request: RouteRequest, now: float) -> None:
        """A turn of a rollout worker's session begins to wait at ``now``, in seconds of a monotonic clock. It is
        refused if it may not have the published version, but only earlier ones. Raises KeyError for an unknown
        policy."""
        policy = self._policies[request.policy]
        key = (session, request.turn)
        if policy.published is not None and request.newest is not None and request.newest < policy.published:
            self._decided.append(Refuse(key, policy.published))
            return
        latest_s = policy.latest_s(request.downstream_tokens, request.topic, now)
        versions = (request.oldest, request.newest)
        turn = RoutedTurn(
            key, request.policy, versions, request.prompt_tokens, request.prefix, now, latest_s, request.topic
        )
        self._sessions.setdefault(session, {})[request.turn] = turn
        policy.waiting.add(turn)
        self._touched[request.policy] = None

    def session_begun(self, session: int, worker: str) -> None:
        """A rollout actor will ask for turns. ``worker``: its name, for people."""
        self._links.begin(session, worker)

    def ended(self, session: int, number: int, tokens: int, now: float, *, lost: bool = False) -> None:
        """Forgets a turn that waits or is at an instance. ``tokens``: generated there. ``lost``: the rollout actor
        can't reach the instance, which is suspected then, or their link."""
        turn = self._sessions.get(session, {}).pop(number, None)
        if turn is None:  # its instance is gone, or it was refused
            return
        instance, policy = turn.instance, self._policies[turn.policy]
        self._touched[turn.policy] = None
        if instance is None:
            policy.waiting.end(turn)
            return
        service_s = now - turn.routed_s
        for totals in (instance.load.totals, policy.totals):
            totals.turns += 1
            totals.service_s += service_s
        if tokens:  # a turn without one was lost, or given up: its seconds measure nothing
            policy.lengths.ended(turn.topic, tokens)
            policy.pace_s.add(service_s / tokens)
            if instance.policy == turn.policy and instance.state is _SERVING:  # else it was interrupted
                self._balancer.turn_ended(turn.policy, service_s)
        self._take_back(turn, instance, now)
        first = instance.load.numbers[0]
        if self._live.first_number(first) is None:  # that was its last turn
            return
        if not lost:
            self._links.ended(session, first, number, well=tokens > 0)
        elif (link := self._links.lost(session, first, number, now)) is None:
            self.suspected(first, f"{self._links.worker(session)} can't reach it", now)
        else:
            self._due_s = None
            self._check_reach(turn.policy, link, now)

    def _check_reach(self, name: PolicyName, link: CutLink, now: float) -> None:
        """Ends the run if a rollout actor has reached no instance of the policy for too long."""
        limit_s, policy = self._config.return_timeout_s, self._policies[name]
        if now - link.since_s >= limit_s and self._links.all_closed(link.session, policy.instances.values()):
            reason = self._links.describe(link.session, policy.instances.values())
            self._decided.append(NoInstances(name, limit_s, reason))

    def session_ended(self, session: int, now: float) -> None:
        """Forgets all turns of a rollout actor."""
        for number in list(self._sessions.get(session, ())):
            self.ended(session, number, 0, now)
        self._sessions.pop(session, None)
        self._links.forget(session=session)

    def _take_back(self, turn: RoutedTurn, instance: RoutedInstance, now: float) -> None:
        del instance.turns[turn.key]
        instance.load.add(-1, -turn.tokens)
        for part in instance.load.parts:  # of another policy than the turn's, if the instance has moved
            self._touched[part.policy] = None
        if instance.state is _SERVING:
            self._policies[instance.policy].turns_at_serving -= 1
        elif instance.state is InstanceState.DRAINING and not instance.turns:
            self._end_drain(instance, now)

    # ------------------------------------------------------------------ instances

    def joined(self, name: str, policies: Sequence[PolicyName], capacity: int, now: float) -> tuple[int, ...]:
        """The numbers of an instance that has started, one for each policy that it serves at the same time; an earlier
        one of the same name is gone. Raises KeyError if there is no such policy."""
        rooms = {policy: self._policies[policy].room for policy in policies}
        for former in self._live.named(name):
            self._lose(former, "it was started again", now)
        parts = self._live.add(name, capacity, rooms)
        for instance in parts:
            policy = self._policies[instance.policy]
            if policy.published is None:
                instance.state_reason = ""
            policy.instances[instance.number] = instance
            policy.loading_count += 1
            policy.shared |= instance.load.is_shared
            policy.no_instance_since_s = self._due_s = None
            self._bring_up(instance, now)
        return tuple(instance.number for instance in parts)

    def numbers_of(self, name: str) -> list[int]:
        """The numbers of the live instance of that name, one for each of its policies."""
        return [part.number for part in self._live.named(name)]

    def first_number(self, number: int) -> int | None:
        """The first of all numbers of an instance; None if it is gone."""
        return self._live.first_number(number)

    def name_of(self, number: int) -> str:
        """The name of a live instance by one of its numbers. Raises KeyError if it is gone."""
        return self._live[number].name

    def suspected_policy(self, number: int) -> PolicyName | None:
        """The policy of an instance that is suspected; None if it is not, or is gone."""
        instance = self._live.get(number)
        if instance is None or instance.state is not InstanceState.SUSPECTED:
            return None
        return instance.policy

    def loaded(self, number: int, version: Version, now: float) -> None:
        """The instance serves ``version`` from now on."""
        instance = self._live.get(number)
        if instance is None:
            return
        policy = self._policies[instance.policy]
        was_suspected = instance.state is InstanceState.SUSPECTED
        if was_suspected:
            instance.state_reason = instance.state_reason or "it has acknowledged its version"
            self._change(instance, InstanceEvent.TRUST, now)
            if version != policy.published:  # it was silent while a newer one came
                self._bring_up(instance, now)
                return
            self._change(instance, InstanceEvent.LOAD, now)
        if instance.state is not InstanceState.LOADING or version != policy.published:
            return  # it drains, or loads a later version by now
        instance.version = version
        policy.served_since_s = min(policy.served_since_s, now)
        if not was_suspected:
            measure_load(self._balancer, instance, now)
        reason, instance.state_reason = instance.state_reason, ""
        self._change(instance, InstanceEvent.LOADED, now, reason)

    def load_held(self, number: int) -> None:
        """The load that was decided on waits for those of other policies: its time begins with ``load_begun``."""
        instance = self._live.get(number)
        if instance is not None and instance.state is InstanceState.LOADING:
            instance.load_by_s = self._due_s = None

    def load_begun(self, number: int, now: float) -> None:
        """The load waits no more."""
        instance = self._live.get(number)
        if instance is not None and instance.state is InstanceState.LOADING:
            self._time_load(instance, now)

    def failed(self, number: int, reason: str, now: float) -> None:
        """The instance can't load its version of this policy, and won't do better. One that has moved to it goes back,
        and no other moves there."""
        instance = self._live.get(number)
        if instance is None:
            return
        if (giver := instance.moved_from) is not None:
            self._balancer.refuse(instance.policy)
            self._policies[instance.policy].last_loss = f"{instance.name}: {reason}"
            instance.moves_to = giver
            self._change(instance, InstanceEvent.DRAIN, now, reason)
            self._end_drain(instance, now)
            instance.moved_from = None
            return
        self._lose(instance, reason, now)
        if not self._policies[instance.policy].instances:
            self._decided.append(NoInstances(instance.policy, 0.0, f"{instance.name}: {reason}"))

    def read_failed(self, number: int, reason: str, now: float) -> None:
        """The instance could not read its version, but may read it or a newer one later: within the time that a policy
        may be without an instance."""
        if (instance := self._live.get(number)) is None:
            return
        if instance.read_fails_since_s is None:
            instance.read_fails_since_s = now
        seconds = now - instance.read_fails_since_s
        if seconds >= self._config.return_timeout_s:
            self.failed(number, reason, now)
        else:
            self._suspect(instance, reason, now, max(seconds, _READ_PAUSE_S))

    def suspected(self, number: int, reason: str, now: float) -> None:
        """The instance may be lost, for all its policies."""
        for instance in self._live.parts(number):
            self._suspect(instance, reason, now, 0.0)

    def _suspect(self, instance: RoutedInstance, reason: str, now: float, pause_s: float) -> None:
        if instance.state is not InstanceState.SUSPECTED:
            instance.moves_to = None  # when it answers the loads may be others
            self._change(instance, InstanceEvent.SUSPECT, now, reason)
        # One that is late with its load is not probed before that has ended: it would have no version yet.
        if not instance.is_probed:
            instance.is_probed = True
            self._decided.append(Probe(instance.number, pause_s))

    def trusted(self, number: int, version: Version | None, now: float) -> None:
        """A suspected instance has answered: it serves ``version``."""
        instance = self._live.get(number)
        if instance is None or instance.state is not InstanceState.SUSPECTED:
            return
        instance.state_reason = "it has answered"
        if version is not None and version == self._policies[instance.policy].published:
            self.loaded(number, version, now)
        else:
            self._change(instance, InstanceEvent.TRUST, now)
            self._bring_up(instance, now)

    def lost(self, number: int, reason: str, now: float) -> None:
        """The instance has died, for certain."""
        for instance in self._live.parts(number):
            self._lose(instance, reason, now)

    def _lose(self, instance: RoutedInstance, reason: str, now: float) -> None:
        self._policies[instance.policy].last_loss = f"{instance.name}: {reason}"
        self._leave(instance, now, reason)

    def drain(self, number: int, now: float, moves_to: PolicyName | None = None) -> None:
        """Gives the instance no more turns; it leaves after its last one, or moves to another policy."""
        instance = self._live.get(number)
        if instance is None:
            return
        instance.moves_to = moves_to
        reason = f"it moves to {moves_to}" if moves_to else "it was asked to leave"
        self._change(instance, InstanceEvent.DRAIN, now, reason)
        if not instance.turns:
            self._end_drain(instance, now)

    def balance(self, now: float) -> None:
        """Begins the moves to policies without an instance, and those that pay; to be called at intervals."""
        for move, stays_until_s in moves_of(self._balancer, self._balancing, self._policies, self._live, now):
            instance = first_to_move(move, self._policies[move.giver].instances.values(), stays_until_s)
            self._moves += 1
            self._decided.append(Moved(instance.number, instance.name, move.giver, move.taker, move.reason))
            instance.moves_to = move.taker
            self._change(instance, InstanceEvent.DRAIN, now)
            if not instance.turns or move.giver in self._balancing.interruptible:
                self._end_drain(instance, now)

    def _end_drain(self, instance: RoutedInstance, now: float) -> None:
        if instance.moves_to is None:
            self._leave(instance, now, "it has left")
            return
        hand_over(instance, instance.moves_to, self._policies, self._balancing.capacities)
        self._change(instance, InstanceEvent.MOVE, now)
        self._bring_up(instance, now)

    def _leave(self, instance: RoutedInstance, now: float, reason: str) -> None:
        self._change(instance, InstanceEvent.LEAVE, now, reason)
        policy = self._policies[instance.policy]
        for session, number in instance.turns:
            self._sessions[session].pop(number)
            self._links.ended(session, instance.load.numbers[0], number, well=False)
        self._live.remove(instance)
        if not instance.load.parts:
            self._links.forget(instance=instance.load.numbers[0])
        del policy.instances[instance.number]
        for part in instance.load.parts:
            self._touched[part.policy] = None

    def _bring_up(self, instance: RoutedInstance, now: float) -> None:
        """Has an instance without a version load the newest."""
        published = self._policies[instance.policy].published
        if published is not None:
            self._time_load(instance, now)
            self._change(instance, InstanceEvent.LOAD, now)
            self._decided.append(Load(instance.number, instance.policy, published))

    def _time_load(self, instance: RoutedInstance, now: float) -> None:
        self._deadlines.begin(instance, now, self._config.load_timeout_s)
        self._due_s = None

    def _change(self, instance: RoutedInstance, event: InstanceEvent, now: float, reason: str = "") -> None:
        """``reason``: makes it an event of the run."""
        policy = self._policies[instance.policy]
        before, after = instance.state, TRANSITIONS[instance.state][event]
        # Counts of the policy are kept up here: ``next_turn`` reads them for each turn, and would have to go over all
        # instances.
        policy.loading_count += (after in _LOADING) - (before in _LOADING)
        policy.serving += (after is _SERVING) - (before is _SERVING)
        policy.turns_at_serving += len(instance.turns) * ((after is _SERVING) - (before is _SERVING))
        instance.state = after
        if before is InstanceState.SUSPECTED:
            instance.is_probed = False
        if event is InstanceEvent.TRUST:
            self._links.answered(instance.load.numbers[0])
        if after is _SERVING:
            instance.read_fails_since_s = instance.moved_from = None
            instance.room.changed(instance)
        if after not in _LOADING:
            instance.load_by_s = None
            policy.installing.discard(instance.number)
        if policy.loading_count + policy.serving:
            policy.no_instance_since_s = None
        elif policy.no_instance_since_s is None:
            policy.no_instance_since_s = now
        if reason:
            self._decided.append(Changed(instance.number, instance.name, instance.policy, after, reason))
        self._touched[instance.policy] = None
        self._due_s = None

    def statistics(self) -> dict[str, float]:
        """``moves``: of instances between policies. ``queue_p99_s``: seconds that turns waited for room, the 99th
        percentile of the last ones. For each live instance, since it joined: ``turns.<instance>`` that ended there, and
        the sums of their seconds, ``queue_s.<instance>`` before and ``service_s.<instance>`` there. The same of each
        policy, since the start, as ``policy_turns.<policy>`` and so on; ``policy_waiting.<policy>``: turns that wait
        for room now."""
        return statistics_of(self._moves, self._queue_times_s, self._live, self._policies)

    def waits(self, now: float, loads_before: LoadsBefore = lambda _: ()) -> list[Wait]:
        """Turns that wait, and instances that load or may be lost; for people. ``loads_before``: the instances whose
        loads those of a policy wait for."""
        return waits_of(self._policies, self._links, self._sessions, self._config, now, loads_before)

    # ------------------------------------------------------------------ versions and decisions

    def is_awaited(self, name: PolicyName) -> bool:
        """True if a turn waits for an instance of the policy."""
        return self._policies[name].waiting.count > 0

    def published(self, name: PolicyName, version: Version, now: float) -> None:
        """Has all instances load ``version``; ``Installed`` follows."""
        policy = self._policies[name]
        policy.published, policy.publishing, policy.served_since_s = version, True, math.inf
        for turn in policy.waiting.take_older_than(version):
            del self._sessions[turn.key[0]][turn.key[1]]
            self._decided.append(Refuse(turn.key, version))
        for instance in list(policy.instances.values()):
            if instance.state in (InstanceState.JOINING, _SERVING):
                policy.installing.add(instance.number)  # a restarted one that loads already is not waited for
            if instance.state in (InstanceState.JOINING, InstanceState.LOADING, _SERVING):
                self._bring_up(instance, now)
        policy.room.clear()  # no instance serves the new version yet
        if not policy.loading_count and policy.no_instance_since_s is None:
            policy.no_instance_since_s = now
        self._touched[name] = self._due_s = None

    @property
    def due_s(self) -> float:
        """The time at which ``decisions`` should be called although there was no event."""
        if self._due_s is None:
            self._due_s = self._first_due_s()
        return self._due_s

    def _first_due_s(self) -> float:
        return min(
            self._deadlines.first_s(),
            self._links.next_try_s,
            *(policy.return_by_s(self._config.return_timeout_s) for policy in self._policies.values()),
        )

    def decisions(self, now: float) -> list[Decision]:
        """Everything that follows from the events so far, and from the time."""
        if now >= self.due_s:
            self._expire(now)
        shared = []
        for name in self._touched:
            policy = self._policies[name]
            if policy.shared:
                shared.append(policy)
            else:
                self._match(policy, now)
        while shared:  # of policies that share instances the first in line goes first
            policy = min(shared, key=attrgetter("first_latest_s"))
            if not self._match(policy, now, once=True):
                shared.remove(policy)
        for name in self._touched:
            self._check_install(name)
        self._touched.clear()
        decided, self._decided = self._decided, []
        return decided

    def _expire(self, now: float) -> None:
        for instance in self._live:
            if instance.load_by_s is not None and instance.load_by_s <= now:
                reason = f"it has not acknowledged its version for {self._config.load_timeout_s:g} s"
                self._change(instance, InstanceEvent.SUSPECT, now, reason)
        for name, policy in self._policies.items():
            if policy.return_by_s(self._config.return_timeout_s) <= now:
                self._decided.append(NoInstances(name, self._config.return_timeout_s, policy.last_loss))
                policy.no_instance_since_s = math.inf  # decided once: the run ends
        if self._links.expire(now):
            self._touched |= dict.fromkeys(self._policies)
        self._due_s = None

    def _check_install(self, name: PolicyName) -> None:
        policy = self._policies[name]
        if policy.publishing and policy.serving and not policy.installing:
            assert policy.published is not None
            policy.publishing = False
            self._decided.append(Installed(name, policy.published))

    def _match(self, policy: RoutedPolicy, now: float, *, once: bool = False) -> bool:
        """Routes waiting turns as long as there are instances for them, or one. True: there may be more."""
        links = self._links
        while (assignment := policy.next_turn(links)) is not None:
            turn, instance = assignment
            routed = policy.route(turn, instance, now)
            if links.any_at_fault:
                links.routed(turn.key[0], instance.load.numbers[0], turn.key[1])
            self._queue_times_s.append(routed.queue_s)
            self._decided.append(Route(turn.key[0], routed))
            if once:
                return True
        return False
