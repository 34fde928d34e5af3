"""The requests of a peer under its lease, with a clock that handlers move: as one that blocks the loop does."""

import asyncio
import gc
import math
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.delivery.inbound import ReplyWindow
from flexmarl.core.delivery.mailbox import Mailbox
from flexmarl.core.delivery.peers import Network
from flexmarl.core.protocol import codec, messages
from flexmarl.core.protocol.envelopes import Envelope, Kind
from flexmarl.core.protocol.session import Settings
from flexmarl.core.wire.wire import Link, Listener

SETTINGS = Settings(heartbeat_s=5.0, missed_heartbeats=3)  # the lease lasts 10 s
HEADER = messages.pack_header("peer", 5 << 24 | 1)


class Wire:
    """Leads nowhere. Keeps the marks and the other envelopes that are sent."""

    epoch = 7
    address = "memory://here"

    def __init__(self) -> None:
        self.time_s = 100.0
        self.marks: list[int] = []
        self.sent: list[Envelope] = []

    def start(self, header: bytes, listener: Listener) -> None:
        self.header = header

    def first_epoch(self, actor: str) -> int:
        return 0

    def connect(self, address: str) -> Link:
        return Link(address, self.header, self._transmit)

    def now(self) -> float:
        return self.time_s

    def wall(self) -> float:
        return self.time_s

    def disconnect(self, link: Link) -> None: ...

    def close(self) -> None: ...

    def _transmit(self, frames: Sequence[codec.Bytes]) -> None:
        size = messages.unpack_header(frames[0])[2]
        for envelope in messages.unpack_envelopes(memoryview(frames[0])[size:], frames[1:]):
            if envelope[0] == Kind.PING and envelope[1] < 0:
                self.marks.append(-envelope[1])
            else:
                self.sent.append(envelope)


class Clocked(Actor):
    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.begun: list[str] = []

    @endpoint
    async def begin(self, name: str, blocks_s: float = 0.0) -> None:
        self.begun.append(name)
        self.wire.time_s += blocks_s

    @endpoint
    async def hang(self, name: str) -> None:
        self.begun.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            self.begun.append(f"{name} is cancelled")


class House:
    """A network with an actor, and a peer that has connected to it and confirms marks if it is asked to."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.actor = Clocked(self.wire)
        mailboxes: dict[str, Mailbox] = {}
        self.network = Network("here", self.wire, SETTINGS, mailboxes)
        self.network.start()
        mailboxes["actor"] = mailbox = Mailbox("actor", "here", None, self.wire.now)
        mailbox.open(self.actor)
        self.link = self.wire.connect("a peer")

    async def receive(self, *envelopes: Envelope) -> None:
        """One message; returns when everything has been done that it causes at once."""
        packed = [codec.Encoder().pack(envelope) for envelope in envelopes]
        self.network.received(self.link, messages.join(packed, HEADER), [])
        for _ in range(10):
            await asyncio.sleep(0)

    async def confirm(self, *before: Envelope) -> None:
        """The peer returns the last mark, behind ``before``."""
        await self.receive(*before, [Kind.PONG, -self.wire.marks[-1], []])


def call(request_id: int, *args: Any, method: str = "begin", kind: Kind = Kind.CALL) -> Envelope:
    return [kind, request_id, "actor", method, 60.0, [list(args), {}, 1]]


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    await house.receive(call(1, "first"))
    assert house.actor.begun == [], "nothing is known about the peer"
    await house.confirm()
    assert house.actor.begun == ["first"]
    yield house
    house.network.close()


async def test_requests_behind_a_handler_that_blocks_wait_until_their_peer_confirms_a_mark(
    house: House,
) -> None:
    await house.receive(call(2, "blocks", 10.0), call(3, "late"), call(4, "later", kind=Kind.TELL))
    assert house.actor.begun == ["first", "blocks"]
    await house.receive(call(5, "last"))
    await house.confirm()
    assert house.actor.begun == ["first", "blocks", "late", "later", "last"], "in order"


async def test_they_never_begin_if_their_peer_has_withdrawn_them_meanwhile(house: House) -> None:
    await house.receive(call(2, "blocks", 10.0), call(3, "late"), call(4, "later", kind=Kind.TELL))
    await house.confirm([Kind.CANCEL, -4], call(5, "wanted"))
    assert house.actor.begun == ["first", "blocks", "wanted"]
    assert len(house.link.connection.inbound) == 0


async def test_a_withdrawn_call_that_is_running_is_cancelled(house: House) -> None:
    await house.receive(call(2, "hangs", method="hang"), call(3, "too", method="hang"))
    await house.receive([Kind.CANCEL, -2])
    assert house.actor.begun == ["first", "hangs", "too", "hangs is cancelled"]


async def test_a_mark_in_the_second_half_of_the_lease_renews_it_and_nothing_waits(house: House) -> None:
    marks = len(house.wire.marks)
    house.wire.time_s += 6.0
    await house.receive(call(2, "second"), call(3, "third"))
    assert house.actor.begun == ["first", "second", "third"] and len(house.wire.marks) == marks + 1
    await house.confirm()
    house.wire.time_s += 9.0
    await house.receive(call(4, "fourth"))
    assert house.actor.begun[-1] == "fourth"


async def test_a_new_incarnation_of_the_peer_confirms_a_mark_of_its_own(house: House) -> None:
    house.link.connection.inbound.forget()
    await house.receive(call(2, "second"))
    assert house.actor.begun == ["first"]
    await house.confirm()
    assert house.actor.begun == ["first", "second"]


async def test_what_a_peer_that_has_left_has_sent_begins_under_its_lease_or_is_dropped(house: House) -> None:
    await house.receive(
        call(2, "blocks", 10.0), call(3, "late"), call(4, "later", kind=Kind.TELL), [Kind.BYE, 0]
    )
    assert house.actor.begun == ["first", "blocks"]
    assert not house.wire.marks[1:], "the peer would not answer"


async def test_nothing_keeps_a_peer_that_has_left(house: House) -> None:
    inbound = weakref.ref(house.link.connection.inbound)
    await house.receive(call(2, "blocks", math.inf), call(3, "late"), [Kind.BYE, 0])
    gc.collect()
    assert inbound() is None


def test_a_window_of_answers_that_no_mark_confirms_is_full() -> None:
    window = ReplyWindow(1000)
    assert not window.sent(200) and window.sent(100), "a quarter of the window"
    assert window.mark(1.0) == 1
    assert window.sent(700) and window.is_full
    assert window.mark(2.0) == 2
    assert (window.confirmed(1), window.is_full) == (1.0, False)
    assert window.confirmed(1) is None, "it came back twice"
    assert window.confirmed(2) == 2.0


def test_a_mark_that_is_sent_again_stands_for_the_lost_one_and_takes_no_memory() -> None:
    window = ReplyWindow(1000)
    window.sent(1000)
    for turn in range(1, 1001):
        assert window.mark(float(turn)) == turn
    assert len(window._marks) == 1 and window.is_full
    assert window.confirmed(999) is None and window.is_full
    assert window.confirmed(1000) == 1000.0 and not window.is_full
