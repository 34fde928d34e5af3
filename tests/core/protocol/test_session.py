"""Sessions: two of them on a link that does everything links do wrong, against a model; and each rule by itself."""

import random
import sys
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from flexmarl.core.protocol.envelopes import Kind
from flexmarl.core.protocol.open_requests import Request
from flexmarl.core.protocol.reply_cache import ReplyCache
from flexmarl.core.protocol.session import (
    TRANSITIONS,
    Admission,
    Effects,
    LinkEvent,
    LinkState,
    Session,
    Settings,
)

SMALL = Settings(
    heartbeat_s=1.0, missed_heartbeats=3, connect_timeout_s=2.0, window_requests=4, window_bytes=300
)
ACTORS = ("a", "b")
ANSWERED = (Kind.CALL, Kind.IDEMPOTENT_CALL, Kind.STREAM)


class Caller:
    """Waits for the end of one request, of which there must be one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ends: list[str] = []
        self.gave_up = False

    def done(self) -> bool:
        return self.gave_up or bool(self.ends)

    def end(self, how: str) -> None:
        assert not self.ends, f"{self.name} ends as {how} and ended as {self.ends}"
        if not self.gave_up:
            self.ends.append(how)


@dataclass
class Wanted:
    """A request that waits for credit."""

    kind: Kind
    actor: str
    timeout_s: float
    size_bytes: int
    caller: Caller = field(default_factory=lambda: Caller("turn"))

    def done(self) -> bool:
        return self.caller.done()


def _caller(request: Request[Any]) -> Caller:
    assert isinstance(request.waiter, Caller)
    return request.waiter


Envelope = tuple[Any, ...]


class Node:
    """One side: a session, with the work of ``Peer`` around it. The test decides when it answers a request."""

    def __init__(self, name: str, epoch: int, world: "World") -> None:
        self.name = name
        self.epoch = epoch
        self.world = world
        self.session: Session[Any] = Session(SMALL)
        self.replies = ReplyCache()
        self.serving: dict[
            int, tuple[Kind, int, int, str]
        ] = {}  # kind, epoch of the caller, acknowledged_below, identity
        self.theirs = 0
        self.granted = 0  # turns that hold credit and have not sent yet: none outlives a step here
        self.requests: dict[int, Request[Any]] = {}

    # asking

    def ask(self, kind: Kind, actor: str, timeout_s: float, size_bytes: int) -> None:
        wanted = Wanted(kind, actor, timeout_s, size_bytes)
        if self.session.requests.credit(actor).take():
            self.send_request(wanted)
        else:
            self.session.requests.credit(actor).waiting.append(wanted)
            happened["waited"] += 1
            self.session.need(self.world.now)

    def send_request(self, wanted: Wanted) -> None:
        session, world = self.session, self.world
        caller = Caller(f"{self.name}.{self.epoch}.{session.requests.last_id + 1}")
        world.callers.append((caller, wanted.kind))
        waiter = None if wanted.kind is Kind.TELL else caller
        request_id = session.requests.next_id()
        acknowledged_below = session.requests.acknowledged_below(request_id)
        assert acknowledged_below <= request_id, "acknowledges a request that may be repeated"
        request = session.requests.add(
            world.now,
            request_id,
            wanted.kind,
            wanted.actor,
            "endpoint",
            wanted.timeout_s,
            waiter,
            wanted.size_bytes,
        )
        session.need(world.now)
        identity = f"{self.name}.{self.epoch}.{request.id}"
        envelope = (wanted.kind, request.id, acknowledged_below, identity)
        request.frames = envelope  # type: ignore[assignment]  # the session does not look at it
        self.requests[request.id] = request
        world.send(self, envelope)

    def give_up(self, request: Request[Any]) -> None:
        if request.kind is Kind.TELL:
            return
        if self.session.requests.abandon(request):
            _caller(request).gave_up = True
            self.world.send(self, (Kind.CANCEL, request.id))

    # what the link does

    def carry_out(self, effects: Effects[Any]) -> None:
        for request in effects.expired:
            _caller(request).end("expired")
            self.world.send(self, (Kind.CANCEL, request.id))
        for request in effects.dead:
            _caller(request).end("dead")
        for _, wanted in effects.waiting:
            wanted.caller.end("dead")
        for wanted in effects.granted:
            self.send_request(wanted)
        for request in effects.repeat:
            assert request.kind is Kind.IDEMPOTENT_CALL and not _caller(request).done()
            self.world.send(self, request.frames)  # type: ignore[arg-type]
        for request_id in effects.cancel:
            self.world.send(self, (Kind.CANCEL, request_id))
        if effects.ping is not None:
            self.world.send(self, (Kind.PING, effects.ping))

    def received(self, epoch: int, envelope: Envelope) -> None:
        if self.session.is_over(epoch):
            return
        if epoch != self.theirs:
            self.serving, self.theirs = {}, epoch
        effects = self.session.heard(epoch)
        if effects is not None:
            self.carry_out(effects)
        kind, *fields = envelope
        if kind in (*ANSWERED, Kind.TELL):
            self.on_request(kind, *fields)
        elif kind in (Kind.REPLY, Kind.ERROR):
            self.on_answer(*fields)
        elif kind is Kind.DONE:
            self.send_granted(self.session.requests.done(fields[0]))
        elif kind is Kind.PING:
            self.reply((Kind.PONG, fields[0], list(self.serving)))
        elif kind is Kind.PONG:
            self.carry_out(self.session.pong(*fields))
        elif kind is Kind.CANCEL and fields[0] in self.serving:
            self.answer(fields[0], error=True)

    def reply(self, envelope: Envelope) -> None:
        """By the connection that the request came by: to the incarnation that asked, and to no later one."""
        if self.world.other(self).epoch == self.theirs:
            self.world.send(self, envelope)

    def send_granted(self, granted: list[Wanted]) -> None:
        for wanted in granted:
            self.send_request(wanted)

    def on_answer(self, request_id: int, value: str) -> None:
        asked = self.requests.get(request_id)  # None: of an earlier incarnation of this node
        if asked is not None and asked.kind is Kind.IDEMPOTENT_CALL and value.startswith("value"):
            known = self.world.answers.setdefault(f"{self.name}.{self.epoch}.{request_id}", value)
            assert value == known, "an idempotent call with two answers"
        late = self.session.statistics().late_replies
        waited_for = request_id in self.requests and not self.requests[request_id].abandoned
        was_open = request_id in self.session.requests._open
        request, granted = self.session.requests.finish(request_id)
        if request is not None:
            assert request.id == request_id and waited_for
            _caller(request).end("answered")
        assert self.session.statistics().late_replies == late + (not (was_open and waited_for))
        self.send_granted(granted)

    def on_request(self, kind: Kind, request_id: int, acknowledged_below: int, identity: str) -> None:
        admission = self.session.admit(request_id, kind)
        if admission is Admission.OUT_OF_ORDER and kind is not Kind.TELL:
            self.reply((Kind.ERROR, request_id, "overtaken"))
        if admission is not Admission.DELIVER:
            return
        if kind is Kind.IDEMPOTENT_CALL:
            key = ("peer", self.theirs, request_id)
            if request_id in self.serving or self.replies.is_settled(key):
                return
            before = self.replies.get(key)
            if before is not None:
                self.reply((Kind.REPLY, request_id, before.decode()))
                return
        self.world.delivered(self, kind, identity)
        self.serving[request_id] = (kind, self.theirs, acknowledged_below, identity)

    def answer(self, request_id: int, *, error: bool = False) -> None:
        kind, epoch, acknowledged_below, identity = self.serving.pop(request_id)
        if kind is Kind.TELL:
            self.reply((Kind.DONE, [request_id, request_id]))
        elif error:
            self.reply((Kind.ERROR, request_id, "cancelled"))
        else:
            value = f"value {next(self.world.numbers)}"
            if kind is Kind.IDEMPOTENT_CALL:
                self.replies.settle("peer", epoch, acknowledged_below)
                self.replies.put(("peer", epoch, request_id), value.encode())
                self.world.completed.add(identity)
            self.reply((Kind.REPLY, request_id, value))


class World:
    """Two nodes, the time, and what is under way between them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.up = True
        self.numbers = iter(range(10**9))
        self.callers: list[tuple[Caller, Kind]] = []
        self.answers: dict[str, str] = {}
        self.seen: set[str] = set()
        self.completed: set[str] = set()
        self.highest: dict[tuple[str, str], int] = {}
        self.link: dict[str, deque[tuple[int, Envelope]]] = {"x": deque(), "y": deque()}  # by sender
        self.nodes = {"x": Node("x", 1, self), "y": Node("y", 1, self)}
        for node in self.nodes.values():
            node.carry_out(node.session.connected())

    def other(self, node: Node) -> Node:
        return self.nodes["y" if node.name == "x" else "x"]

    def send(self, node: Node, envelope: Envelope) -> None:
        if self.up:
            self.link[node.name].append((node.epoch, envelope))

    def delivered(self, to: Node, kind: Kind, identity: str) -> None:
        sender, epoch, number = identity.split(".")
        if kind is Kind.IDEMPOTENT_CALL:  # may run again where its first run was cut short
            assert identity not in self.completed, f"{identity} runs again"
            return
        assert identity not in self.seen, f"{identity} delivered twice"
        self.seen.add(identity)
        pair = (sender, epoch)
        assert int(number) > self.highest.get(pair, 0), f"{identity} overtook"
        self.highest[pair] = int(number)

    def arrive(self, sender: str, index: int, *, keep: bool = False) -> None:
        queue = self.link[sender]
        if queue:
            index %= len(queue)
            epoch, envelope = queue[index]
            if not keep:
                del queue[index]
            self.other(self.nodes[sender]).received(epoch, envelope)

    def cut(self) -> None:
        if self.up:
            self.up = False
            for node in self.nodes.values():
                self.link[node.name].clear()
                node.carry_out(node.session.disconnected(self.now, "cut"))

    def mend(self) -> None:
        if not self.up:
            self.up = True
            for node in self.nodes.values():
                node.carry_out(node.session.connected())

    def restart(self, name: str) -> None:
        """A crash: what its callers waited for ends with it, and what is under way to it. Its replies are in a journal;
        what it has sent may still arrive."""
        self.link[self.other(self.nodes[name]).name].clear()
        old = self.nodes[name]
        happened["restarts"] += 1
        for request in old.session.requests._open.values():
            if request.waiter is not None:
                _caller(request).gave_up = True
        new = self.nodes[name] = Node(name, old.epoch + 1, self)
        new.replies, new.theirs = old.replies, old.theirs
        if self.up:
            new.carry_out(new.session.connected())

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        for _ in range(10_000):
            due = min(
                (d for n in self.nodes.values() if (d := n.session.wake_at()) is not None), default=None
            )
            if due is None or due > until:
                break
            self.now = max(self.now, due)
            for node in self.nodes.values():
                before = node.session.wake_at()
                if before is not None and before <= self.now:
                    node.carry_out(node.session.advance(self.now))
                    after = node.session.wake_at()
                    assert (
                        after is None
                        or after > before
                        or after > self.now
                        or node.session._connect_by is None
                    )
        else:
            raise AssertionError("something is due for ever")
        self.now = until

    def settle(self) -> None:
        """Everything works from now on: all open requests must end."""
        self.mend()
        for _ in range(40):
            self.exchange()
            self.pass_time(0.5)
        self.exchange()

    def exchange(self) -> None:
        for _ in range(1000):
            busy = False
            for name, node in self.nodes.items():
                while self.link[name]:
                    self.arrive(name, 0)
                    busy = True
                for request_id in list(node.serving):
                    node.answer(request_id)
                    busy = True
            if not busy:
                return
        raise AssertionError("the two never come to an end")


steps = 0
happened: Counter[str] = Counter()


class Conversation(RuleBasedStateMachine):
    """Each rule is a step, and draws little: most of the time goes into the sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.storms = 0

    def node(self, number: int) -> Node:
        return self.world.nodes["xy"[number & 1]]

    @rule(seed=st.integers(0, 2**32 - 1))
    def storm(self, seed: int) -> None:
        """Many steps drawn at once: hypothesis draws, shrinks and repeats the seed."""
        self.storms += 1
        rng = random.Random(f"{seed} {self.storms}")
        for _ in range(60):
            self.step(rng)

    def step(self, rng: random.Random) -> None:
        global steps
        steps += 1
        world, node = self.world, self.node(rng.getrandbits(1))
        match rng.randrange(24):
            case 0 | 1 | 2 | 3 | 4 | 5:
                kind = rng.choice((Kind.CALL, Kind.IDEMPOTENT_CALL, Kind.TELL, Kind.STREAM))
                node.ask(
                    kind, rng.choice(ACTORS), rng.choice((0.1, 0.7, 3.0, 60.0)), rng.choice((10, 90, 500))
                )
            case 6 | 7 | 8 | 9 | 10 | 11 | 12:
                world.arrive(node.name, 0)
            case 13:
                world.arrive(node.name, rng.randrange(8))  # reordered
            case 14:
                world.arrive(node.name, rng.randrange(8), keep=True)  # duplicated
            case 15:
                if world.link[node.name]:
                    world.link[node.name].popleft()  # lost
            case 16 | 17 | 18 | 19:
                if node.serving:
                    node.answer(rng.choice(list(node.serving)), error=rng.random() < 0.2)
            case 20:
                if node.session.requests._open:
                    node.give_up(rng.choice(list(node.session.requests._open.values())))
            case 21:
                world.pass_time(rng.choice((0.01, 0.3, 1.0, 4.0)))
            case 22:
                world.mend() if not world.up else (world.cut() if rng.random() < 0.4 else None)
            case 23:
                if rng.random() < 0.15:
                    world.restart(node.name)
                elif (waiting := node.session.requests.credit(ACTORS[0]).waiting) and rng.random() < 0.5:
                    waiting[0].caller.gave_up = True  # and its task has not run yet
        self.check()

    def check(self) -> None:
        for node in self.world.nodes.values():
            session = node.session
            opened = list(session.requests._open.values())
            for actor, credit in session.requests._credit.items():
                mine = [request for request in opened if request.actor == actor]
                assert credit.requests == len(mine) <= SMALL.window_requests
                assert credit.size_bytes == sum(request.size_bytes for request in mine)
                assert not credit.waiting or mine, "waits for credit that no request holds"
            if opened:
                assert session.wake_at() is not None, "a request that nothing watches"
            if session.state is not LinkState.UP and opened:
                assert session._connect_by is not None, "waits for ever for a connection"

    @rule(actions=st.lists(st.sampled_from(("cut", "mend", "restart x", "restart y", "settle")), max_size=3))
    def upheaval(self, actions: list[str]) -> None:
        for action in actions:
            if action.startswith("restart"):
                self.world.restart(action[-1])
            else:
                getattr(self.world, action)()

    @invariant()
    def agrees(self) -> None:
        self.check()

    def teardown(self) -> None:
        self.world.settle()
        for node in self.world.nodes.values():
            session = node.session
            for what in (
                "requests",
                "expired",
                "late_replies",
                "lost",
                "repeated",
                "duplicates",
                "out_of_order",
            ):
                happened[what] += getattr(session.statistics(), what)
            assert (
                not session.requests._open and not session.requests._repeatable and session.wake_at() is None
            )
            assert all(
                c.requests == c.size_bytes == 0 and not c.waiting for c in session.requests._credit.values()
            )
        for caller, kind in self.world.callers:
            assert kind is Kind.TELL or caller.done(), f"{caller.name} waits for ever"


def test_two_sessions_keep_their_promises_whatever_the_link_does() -> None:
    global steps
    steps = 0
    happened.clear()
    # Steps are cheap and there are many: no database of examples, no limit on how long one may take.
    run_state_machine_as_test(
        Conversation,
        settings=settings(
            max_examples=400,
            stateful_step_count=15,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    sys.stdout.write(f"{steps} steps: {dict(happened)}\n")
    assert steps >= 100_000
    rare = ("expired", "late_replies", "lost", "repeated", "duplicates", "out_of_order", "waited", "restarts")
    assert all(happened[what] >= 20 for what in rare), happened


# --------------------------------------------------------------------------- each rule by itself

CALL, IDEMPOTENT_CALL, TELL, STREAM = Kind.CALL, Kind.IDEMPOTENT_CALL, Kind.TELL, Kind.STREAM


def ask(session: Session[Any], kind: Kind, now: float = 0.0, timeout_s: float = 60.0) -> Request[Any]:
    assert session.requests.credit("a").take()
    waiter, requests = None if kind is TELL else Caller(kind.name), session.requests
    request = requests.add(now, requests.next_id(), kind, "a", "endpoint", timeout_s, waiter, 10)
    session.need(now)
    return request


def up() -> Session[Any]:
    session: Session[Any] = Session(Settings(heartbeat_s=1.0, missed_heartbeats=3, connect_timeout_s=2.0))
    session.connected()
    session.heard(1)
    return session


def test_ids_ascend_without_a_gap() -> None:
    session = up()
    assert [ask(session, kind).id for kind in (CALL, IDEMPOTENT_CALL, TELL, STREAM)] == [1, 2, 3, 4]


def test_a_reply_ends_its_request_once_and_a_later_one_is_counted() -> None:
    session = up()
    request = ask(session, CALL)
    assert session.requests.finish(request.id) == (request, [])
    assert session.requests.finish(request.id) == (None, [])
    assert session.statistics().late_replies == 1
    assert session.requests.credit("a").requests == session.requests.credit("a").size_bytes == 0


def test_a_one_way_message_that_is_answered_has_nobody_to_tell() -> None:
    session = up()
    request = ask(session, TELL)
    assert session.requests.finish(request.id) == (None, [])
    assert session.statistics().late_replies == 0 and session.requests.credit("a").requests == 0


def test_credit_is_held_until_the_answer_and_not_until_the_deadline() -> None:
    session = up()
    request = ask(session, CALL, timeout_s=0.5)
    effects = session.advance(0.5)
    assert effects.expired == [request] and session.requests.credit("a").requests == 1
    assert session.requests.finish(request.id)[0] is None
    assert session.requests.credit("a").requests == 0 and session.statistics().late_replies == 1


def test_an_abandoned_request_is_cancelled_again_with_every_tick() -> None:
    session = up()
    request = ask(session, CALL)
    assert session.requests.abandon(request) and not session.requests.abandon(request)
    assert session.advance(1.0).cancel == [request.id]
    assert session.requests.finish(request.id)[0] is None
    assert session.advance(2.0).cancel == []


def test_the_floor_is_the_oldest_request_that_may_be_repeated() -> None:
    session = up()
    assert session.requests.acknowledged_below(session.requests.last_id + 1) == 1
    first, second, third = ask(session, IDEMPOTENT_CALL), ask(session, IDEMPOTENT_CALL), ask(session, CALL)
    assert session.requests.acknowledged_below(session.requests.last_id + 1) == first.id
    session.requests.abandon(first)
    assert session.requests.acknowledged_below(session.requests.last_id + 1) == second.id
    session.requests.finish(second.id)
    assert session.requests.acknowledged_below(session.requests.last_id + 1) == third.id + 1


def test_an_id_that_was_not_used_is_not_used_again() -> None:
    session = up()
    assert session.requests.next_id() == 1
    assert ask(session, CALL).id == 2


def test_a_duplicate_is_ignored_and_what_was_overtaken_is_refused() -> None:
    session = up()
    order = (1, 1, 4, 2, 2, 5, 3, 5)
    d, dup, over = Admission.DELIVER, Admission.DUPLICATE, Admission.OUT_OF_ORDER
    assert [session.admit(number, CALL) for number in order] == [d, dup, d, over, dup, d, over, dup]
    assert (session.statistics().duplicates, session.statistics().out_of_order) == (3, 2)


def test_an_idempotent_request_is_admitted_whenever_it_comes() -> None:
    session = up()
    assert [session.admit(number, IDEMPOTENT_CALL) for number in (1, 3, 2, 2, 1)] == [Admission.DELIVER] * 5


def test_a_long_gap_costs_nothing() -> None:
    session = up()
    for number in range(1, 2000):
        assert session.admit(number * 2**40, CALL) is Admission.DELIVER
    assert session.admit(1999 * 2**40 - 1, CALL) is Admission.OUT_OF_ORDER
    assert session.admit(2**40 + 1, CALL) is Admission.DUPLICATE  # forgotten: its sender learns from a PONG


def test_when_the_link_goes_down_all_fail_but_what_can_be_repeated() -> None:
    session = up()
    call, once, tell, stream = (ask(session, kind) for kind in (CALL, IDEMPOTENT_CALL, TELL, STREAM))
    session.requests.credit("a").waiting.append(waiting := Caller("waits"))
    effects = session.disconnected(0.0, "cut")
    assert effects.dead == [call, stream] and effects.lost_tells == 1 and effects.reason == "cut"
    assert effects.waiting == [("a", waiting)] and effects.gone and tell.abandoned is False
    assert session.connected().repeat == [once]


def test_what_waits_for_a_link_that_stays_down_fails_in_time() -> None:
    session = up()
    once = ask(session, IDEMPOTENT_CALL)
    session.disconnected(5.0, "cut")
    assert session.state is LinkState.DOWN
    assert session.advance(6.9).dead == []
    assert session.advance(7.0).dead == [once]
    assert session.wake_at() is not None and session.advance(9.0) and session.wake_at() is None


def test_nobody_there_is_found_out_within_the_connect_timeout() -> None:
    session: Session[Any] = Session(SMALL)
    request = ask(session, CALL, now=3.0)
    assert session.wake_at() == 4.0
    assert session.advance(4.0).ping is None
    assert session.wake_at() == 5.0 and session.advance(5.0).dead == [request]


def test_a_new_incarnation_fails_what_the_old_one_was_asked_and_gets_the_rest_again() -> None:
    session = up()
    session.admit(7, CALL)
    call, once = ask(session, CALL), ask(session, IDEMPOTENT_CALL)
    assert session.heard(1) is None
    effects = session.heard(2)
    assert effects is not None and effects.dead == [call] and effects.repeat == [once]
    assert session.admit(1, CALL) is Admission.DELIVER, "the new incarnation counts from 1 again"
    assert session.is_over(1) and not session.is_over(2)


@pytest.mark.parametrize("silent_from", [0.0, 0.4, 0.99])
def test_silence_is_found_out_within_the_missed_heartbeats(silent_from: float) -> None:
    session = up()
    request = ask(session, STREAM)
    now = 0.0
    for _ in range(5):  # alive: every PING is answered
        now = session.wake_at() or 0.0
        assert session.advance(now).ping == request.id
        session.heard(1)
        session.pong(request.id, [request.id])
    stopped = now + silent_from
    while not (effects := session.advance(now := session.wake_at() or 0.0)).dead:
        assert effects.ping is not None
    assert effects.dead == [request] and "silent" in effects.reason
    assert 2.0 < now - stopped <= 3.0


def test_after_idling_a_silent_peer_is_found_out_within_the_missed_heartbeats() -> None:
    session = up()
    answered = ask(session, CALL)
    session.advance(1.0)
    session.requests.finish(answered.id)
    session.advance(2.0)
    assert session.wake_at() is None, "nothing depends on the peer, so it is not pinged"
    request = ask(session, CALL, now=100.0)
    assert not session.advance(101.0).dead and not session.advance(102.0).dead
    assert session.advance(103.0).dead == [request]


def test_a_loop_that_was_busy_calls_nobody_dead() -> None:
    session = up()
    ask(session, CALL, timeout_s=10_000.0)
    assert session.advance(1000.0).dead == []
    assert session.wake_at() == 1001.0


def test_serving_a_stream_watches_its_receiver() -> None:
    session = up()
    session.serve_stream(0.0)
    assert session.wake_at() == 1.0 and session.advance(1.0).ping == 0
    assert not session.advance(2.0).gone and session.advance(3.0).gone
    session.end_stream()
    session.advance(4.0)
    assert session.wake_at() is None


def test_a_pong_settles_what_was_lost() -> None:
    session = up()
    served, lost, once, tell = (ask(session, kind) for kind in (CALL, CALL, IDEMPOTENT_CALL, TELL))
    assert session.advance(1.0).ping == 4
    later = ask(session, CALL)
    effects = session.pong(4, [served.id])
    assert effects.dead == [lost] and effects.repeat == [once] and effects.lost_tells == 1
    assert (
        list(session.requests._open.values()) == [served, once, later]
        and tell.id not in session.requests._open
    )


def test_a_pong_that_nobody_asked_for_changes_nothing() -> None:
    session = up()
    ask(session, CALL), ask(session, IDEMPOTENT_CALL)
    effects = session.pong(2, [])
    assert not effects.dead and not effects.repeat and session.statistics().in_flight == 2


@pytest.mark.parametrize(
    "ranges",
    [
        [1, 2, 4, 4],
        [4, 4, 1, 2],
        [1, 2**63],
        [-5, 4],
        [1, 4] * 200_000,
        [0, 2**62, 1, 2**62] * 1000,
        [1, 2, 4, 4, 9],
    ],
)
def test_done_gives_back_the_credit_of_one_way_messages_whatever_it_claims(ranges: list[int]) -> None:
    session = up()
    for kind in (TELL, TELL, CALL, TELL):
        ask(session, kind)
    assert session.requests.done(ranges) == []
    assert [request.kind for request in session.requests._open.values()] == [CALL]
    assert session.requests.credit("a").requests == 1


@pytest.mark.parametrize("ranges", [[], [3, 3], [5, 2], [7, 9], [-4, -1], [2**64 - 1, 2**64 - 1], [1]])
def test_done_touches_nothing_else(ranges: list[int]) -> None:
    session = up()
    for kind in (TELL, TELL, CALL, TELL):
        ask(session, kind)
    session.requests.done(ranges)
    assert session.statistics().in_flight == 4


def test_closing_ends_everything() -> None:
    session = up()
    call, once, stream = (ask(session, kind) for kind in (CALL, IDEMPOTENT_CALL, STREAM))
    assert session.close("over").dead == [call, once, stream]
    session.advance(60.0)
    assert session.wake_at() is None


def test_deadlines_of_answered_requests_do_not_pile_up() -> None:
    session = up()
    ask(session, CALL, timeout_s=1.0)  # in front of all others
    for _ in range(10_000):
        session.requests.finish(ask(session, CALL).id)
    assert len(session.requests._deadlines) < 2000
    assert session.wake_at() == 1.0


def test_what_was_lost_is_cancelled_where_the_connection_comes_again() -> None:
    session = up()
    call, once, _, stream = (ask(session, kind) for kind in (CALL, IDEMPOTENT_CALL, TELL, STREAM))
    for tick in range(1, 4):
        effects = session.advance(float(tick))
    assert effects.silent and effects.dead == [call, stream]
    session.disconnected(4.0, effects.reason)
    effects = session.connected()
    assert effects.cancel == [call.id, stream.id] and effects.repeat == [once]
    session.disconnected(5.0, "cut")
    assert session.connected().cancel == []


MAKE: dict[LinkState, Callable[[], Session[Any]]] = {
    LinkState.CONNECTING: Session,
    LinkState.UP: lambda: after(LinkEvent.CONNECTED),
    LinkState.DOWN: lambda: after(LinkEvent.CONNECTED, LinkEvent.DISCONNECTED),
    LinkState.CLOSED: lambda: after(LinkEvent.CLOSED),
}


def after(*events: LinkEvent) -> Session[Any]:
    session: Session[Any] = Session(SMALL)
    for event in events:
        apply(session, event)
    return session


def apply(session: Session[Any], event: LinkEvent) -> Effects[Any]:
    match event:
        case LinkEvent.CONNECTED:
            return session.connected()
        case LinkEvent.DISCONNECTED:
            return session.disconnected(1.0, "cut")
        case LinkEvent.CLOSED:
            return session.close("over")


@pytest.mark.parametrize("event", LinkEvent)
@pytest.mark.parametrize("state", LinkState)
def test_a_link_moves_as_the_table_says_and_in_no_other_way(state: LinkState, event: LinkEvent) -> None:
    session = MAKE[state]()
    assert session.state is state
    if event in TRANSITIONS[state]:
        apply(session, event)
        assert session.state is TRANSITIONS[state][event]
    else:
        with pytest.raises(AssertionError, match=f"a link that is {state.value} can't be {event.value}"):
            apply(session, event)
        assert session.state is state


def test_every_state_is_in_the_table_and_can_be_reached() -> None:
    assert TRANSITIONS.keys() == MAKE.keys() == set(LinkState)
    reached = {to for moves in TRANSITIONS.values() for to in moves.values()} | {LinkState.CONNECTING}
    assert reached == set(LinkState)
    assert all(LinkEvent.CLOSED in moves for moves in TRANSITIONS.values()), "this side can always leave"


@pytest.mark.parametrize("state", [state for state in LinkState if state is not LinkState.CLOSED])
def test_what_is_asked_in_any_state_fails_at_a_refusal_and_leaves_the_state(state: LinkState) -> None:
    session = MAKE[state]()
    call = ask(session, CALL)
    assert session.fail("it does not let this side in").dead == [call]
    assert session.state is state
