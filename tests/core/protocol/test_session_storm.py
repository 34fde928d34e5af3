"""Two sessions on a link with every fault that links have, against a model."""

import math
import random
import sys
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from flexmarl.core.protocol.credit import CreditWaiter
from flexmarl.core.protocol.envelopes import Kind
from flexmarl.core.protocol.open_requests import Callee, Request
from flexmarl.core.protocol.reply_cache import ReplyCache
from flexmarl.core.protocol.session import (
    Admission,
    Effects,
    LinkState,
    Session,
)

from .sessions import SMALL, Caller

ACTORS = ("a", "b")
ANSWERED = (Kind.CALL, Kind.IDEMPOTENT_CALL, Kind.STREAM)


@dataclass
class Wanted:
    """A request that waits for credit."""

    callee: Callee
    size_bytes: int
    caller: Caller = field(default_factory=lambda: Caller("turn"))

    def done(self) -> bool:
        return self.caller.done()

    def set_exception(self, error: Exception, /) -> None:
        raise AssertionError("a session fails no waiter itself")


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
        self.requests: dict[int, Request[Any]] = {}

    # asking

    def ask(self, kind: Kind, actor: str, timeout_s: float, size_bytes: int) -> None:
        callee = self.session.requests.callee(kind, actor, "endpoint", timeout_s)
        wanted = Wanted(callee, size_bytes)
        if callee.credit.take(size_bytes):
            self.send_request(wanted)
        else:
            callee.credit.waiting.append(wanted)
            happened["waited"] += 1
            self.session.need(self.world.now)

    def send_request(self, wanted: Wanted) -> None:
        session, world = self.session, self.world
        caller = Caller(f"{self.name}.{self.epoch}.{session.requests.last_id + 1}")
        callee = wanted.callee
        world.callers.append((caller, callee.kind))
        if callee.kind is Kind.TELL:
            request_id = session.requests.tell(callee.credit, wanted.size_bytes)
            session.need(world.now)
            world.send(self, (Kind.TELL, request_id, 0, f"{self.name}.{self.epoch}.{request_id}"))
            return
        deadline = world.now + callee.timeout_s if callee.is_call else math.inf
        request = session.requests.add(deadline, callee, caller, wanted.size_bytes)
        acknowledged_below = session.requests.acknowledged_below(request.id)
        assert acknowledged_below <= request.id, "acknowledges a request that may be repeated"
        session.need(world.now)
        identity = f"{self.name}.{self.epoch}.{request.id}"
        envelope = (callee.kind, request.id, acknowledged_below, identity)
        request.frames = envelope  # type: ignore[assignment]  # the session does not look at it
        self.requests[request.id] = request
        world.send(self, envelope)

    def give_up(self, request: Request[Any]) -> None:
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
            assert isinstance(wanted, Wanted)
            wanted.caller.end("dead")
        self.send_granted(effects.granted)
        for request_id in effects.cancel:
            self.world.send(self, (Kind.CANCEL, request_id))
        if effects.withdraw:
            self.world.send(self, (Kind.CANCEL, -effects.withdraw))
        for request in effects.repeat:
            assert request.kind is Kind.IDEMPOTENT_CALL and not _caller(request).done()
            self.world.send(self, request.frames)  # type: ignore[arg-type]
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
        elif kind is Kind.CANCEL and fields[0] < 0:
            for request_id, (served, *_) in list(self.serving.items()):
                if request_id <= -fields[0] and served not in (Kind.IDEMPOTENT_CALL, Kind.TELL):
                    self.answer(request_id, error=True)

    def reply(self, envelope: Envelope) -> None:
        """By the connection that the request came by: to the incarnation that asked, and to no later one."""
        if self.world.other(self).epoch == self.theirs:
            self.world.send(self, envelope)

    def send_granted(self, granted: list[CreditWaiter]) -> None:
        for wanted in granted:
            assert isinstance(wanted, Wanted)
            self.send_request(wanted)

    def on_answer(self, request_id: int, value: str) -> None:
        asked = self.requests.get(request_id)  # None: of an earlier incarnation of this node
        if asked is not None and asked.kind is Kind.IDEMPOTENT_CALL and value.startswith("value"):
            known = self.world.answers.setdefault(f"{self.name}.{self.epoch}.{request_id}", value)
            assert value == known, "an idempotent call with two answers"
        late = self.session.statistics().late_replies
        waited_for = request_id in self.requests and not self.requests[request_id].abandoned
        was_open = request_id in self.session.requests._open
        (request,), granted = self.session.requests.answered(request_id, 1)
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
                    assert isinstance(waiting[0], Wanted)
                    waiting[0].caller.gave_up = True  # and its task has not run yet
        self.check()

    def check(self) -> None:
        for node in self.world.nodes.values():
            session = node.session
            opened = list(session.requests._open.values())
            for actor, credit in session.requests._credit.items():
                mine = [request.size_bytes for request in opened if request.actor == actor]
                mine += [size for holder, size in session.requests._tells.values() if holder is credit]
                assert credit.requests == len(mine) <= SMALL.window_requests
                assert credit.size_bytes == sum(mine)
                assert not credit.waiting or mine, "waits for credit that no request holds"
            if session.requests:
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
            assert not session.requests and not session.requests._repeatable and session.wake_at() is None
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
            suppress_health_check=list(HealthCheck),
        ),
    )
    sys.stdout.write(f"{steps} steps: {dict(happened)}\n")
    assert steps >= 100_000
    rare = ("expired", "late_replies", "lost", "repeated", "duplicates", "out_of_order", "waited", "restarts")
    assert all(happened[what] >= 20 for what in rare), happened
