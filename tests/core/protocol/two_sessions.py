"""Two sessions on a link with every fault that links have: the world of the storm. It checks what arrives."""

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from flexmarl.core.protocol.credit import CreditWaiter
from flexmarl.core.protocol.envelopes import Kind
from flexmarl.core.protocol.open_requests import Callee, Request
from flexmarl.core.protocol.session import (
    Admission,
    Effects,
    Session,
)

from .sessions import SMALL, Caller

ACTORS = ("a", "b")
ANSWERED = (Kind.CALL, Kind.STREAM)

happened: Counter[str] = Counter()
"""Counts of the troubles that the sessions met, over all examples: a storm without them proves nothing."""


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
    """One side: a session, with the work of ``Connection`` around it. The test decides when it answers a request."""

    def __init__(self, name: str, epoch: int, world: "World") -> None:
        self.name = name
        self.epoch = epoch
        self.world = world
        self.session: Session[Any] = Session(SMALL)
        self.serving: dict[int, Kind] = {}
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
            world.send(self, (Kind.TELL, request_id, f"{self.name}.{self.epoch}.{request_id}"))
            return
        deadline = world.now + callee.timeout_s if callee.is_call else math.inf
        request = session.requests.add(deadline, callee, caller, wanted.size_bytes)
        session.need(world.now)
        identity = f"{self.name}.{self.epoch}.{request.id}"
        self.requests[request.id] = request
        world.send(self, (callee.kind, request.id, identity))

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
            for request_id, served in list(self.serving.items()):
                if request_id <= -fields[0] and served is not Kind.TELL:
                    self.answer(request_id, error=True)

    def reply(self, envelope: Envelope) -> None:
        """By the connection that the request came by: to the incarnation that asked, and to no later one."""
        if self.world.other(self).epoch == self.theirs:
            self.world.send(self, envelope)

    def send_granted(self, granted: list[CreditWaiter]) -> None:
        for wanted in granted:
            assert isinstance(wanted, Wanted)
            self.send_request(wanted)

    def on_answer(self, request_id: int, _: str) -> None:
        late = self.session.statistics().late_replies
        waited_for = request_id in self.requests and not self.requests[request_id].abandoned
        was_open = request_id in self.session.requests._open
        (request,), granted = self.session.requests.answered(request_id, 1)
        if request is not None:
            assert request.id == request_id and waited_for
            _caller(request).end("answered")
        assert self.session.statistics().late_replies == late + (not (was_open and waited_for))
        self.send_granted(granted)

    def on_request(self, kind: Kind, request_id: int, identity: str) -> None:
        admission = self.session.admit(request_id)
        if admission is Admission.OUT_OF_ORDER and kind is not Kind.TELL:
            self.reply((Kind.ERROR, request_id, "overtaken"))
        if admission is not Admission.DELIVER:
            return
        self.world.delivered(identity)
        self.serving[request_id] = kind

    def answer(self, request_id: int, *, error: bool = False) -> None:
        if self.serving.pop(request_id) is Kind.TELL:
            self.reply((Kind.DONE, [request_id, request_id]))
        elif error:
            self.reply((Kind.ERROR, request_id, "cancelled"))
        else:
            self.reply((Kind.REPLY, request_id, "value"))


class World:
    """Two nodes, the time, and what is under way between them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.up = True
        self.callers: list[tuple[Caller, Kind]] = []
        self.seen: set[str] = set()
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

    def delivered(self, identity: str) -> None:
        sender, epoch, number = identity.split(".")
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
                node.carry_out(node.session.disconnected("cut"))

    def mend(self) -> None:
        if not self.up:
            self.up = True
            for node in self.nodes.values():
                node.carry_out(node.session.connected())

    def restart(self, name: str) -> None:
        """A crash: what its callers waited for ends with it, and what is under way to it. Its own messages may still
        arrive."""
        self.link[self.other(self.nodes[name]).name].clear()
        old = self.nodes[name]
        happened["restarts"] += 1
        for request in old.session.requests._open.values():
            _caller(request).gave_up = True
        new = self.nodes[name] = Node(name, old.epoch + 1, self)
        new.theirs = old.theirs
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
