"""Outgoing links: their states, and the messages that wait for a connection. For all wires, without any."""

from collections.abc import Callable
from typing import Any

import pytest

from flexmarl.core.protocol import codec
from flexmarl.core.wire.links import (
    OUTGOING_TRANSITIONS,
    LinkTable,
    OutgoingEvent,
    OutgoingLink,
    OutgoingState,
)
from flexmarl.core.wire.wire import Frames, Link


class Recorder:
    """A listener that keeps the events of all links."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.on_connected: Callable[[], None] = lambda: None

    def received(self, link: Link, message: codec.Bytes, buffers: Frames) -> None:
        self.events.append((message, list(buffers)))

    def connected(self, link: Link) -> None:
        self.events.append("connected")
        self.on_connected()

    def disconnected(self, link: Link, reason: str) -> None:
        self.events.append(reason)

    def refused(self, link: Link, reason: str) -> None:
        self.events.append(reason)

    def crashed(self) -> None: ...


class Outgoing(OutgoingLink):
    """Its connection is a list of messages."""

    def __init__(self, listener: Recorder, address: str = "somewhere") -> None:
        super().__init__(listener, address, b"header")
        self.sent: list[list[codec.Bytes]] = []
        self.attempts = 1

    def _open(self) -> None:
        self.attempts += 1

    def _disconnect(self) -> None:
        self.sent.append([b"disconnected"])

    def close(self) -> None:
        self.link.flush()
        self._move(OutgoingEvent.CLOSED)

    def apply(self, event: OutgoingEvent) -> None:
        match event:
            case OutgoingEvent.CONNECTED:
                self._transmit = self.sent.append
                self._came_up()
            case OutgoingEvent.RESTARTED:
                self._lose("lost")
            case OutgoingEvent.REFUSED:
                self._move(OutgoingEvent.REFUSED)
            case OutgoingEvent.CLOSED:
                self.close()


TO: dict[OutgoingState, list[OutgoingEvent]] = {
    OutgoingState.CONNECTING: [],
    OutgoingState.UP: [OutgoingEvent.CONNECTED],
    OutgoingState.REFUSED: [OutgoingEvent.REFUSED],
    OutgoingState.CLOSED: [OutgoingEvent.CLOSED],
}


def outgoing(state: OutgoingState) -> Outgoing:
    made = Outgoing(Recorder())
    for event in TO[state]:
        made.apply(event)
    assert made.state is state
    return made


@pytest.mark.parametrize("event", OutgoingEvent)
@pytest.mark.parametrize("state", OutgoingState)
async def test_a_link_moves_as_the_table_says_and_in_no_other_way(
    state: OutgoingState, event: OutgoingEvent
) -> None:
    link = outgoing(state)
    allowed = OUTGOING_TRANSITIONS[state]
    if event in allowed:
        link.apply(event)
        assert link.state is allowed[event]
    else:
        with pytest.raises(AssertionError, match=f"that is {state.value} can't be {event.value}"):
            link.apply(event)
        assert link.state is state


def test_every_state_is_in_the_table_and_can_be_reached() -> None:
    assert OUTGOING_TRANSITIONS.keys() == TO.keys() == set(OutgoingState)
    reached = {to for moves in OUTGOING_TRANSITIONS.values() for to in moves.values()}
    assert reached == set(OutgoingState)


async def test_messages_wait_for_the_connection_and_leave_behind_what_its_listener_repeats() -> None:
    listener = Recorder()
    link = Outgoing(listener)
    listener.on_connected = lambda: link._send([b"repeated"])
    link._send([b"first"])
    link.apply(OutgoingEvent.CONNECTED)
    link._send([b"last"])
    assert link.sent == [[b"first"], [b"repeated"], [b"last"]]
    assert listener.events == ["connected"]


async def test_a_message_that_overtakes_its_connection_is_answered_behind_what_is_repeated() -> None:
    listener = Recorder()
    link = Outgoing(listener)
    link._transmit = link.sent.append
    listener.on_connected = lambda: link._send([b"cancelled"])
    link.arrived([b"mark"])
    link._send([b"answer to the mark"])
    assert listener.events == ["connected", (b"mark", [])]
    assert link.sent == [[b"cancelled"], [b"answer to the mark"]]
    link.arrived([b"another"])
    assert listener.events[2:] == [(b"another", [])], "it comes up once"


async def test_messages_that_wait_are_dropped_with_the_connection_and_another_attempt_begins() -> None:
    link = outgoing(OutgoingState.CONNECTING)
    link._send([b"lost"])
    link.apply(OutgoingEvent.RESTARTED)
    link.apply(OutgoingEvent.CONNECTED)
    assert link.sent == [[b"disconnected"]] and link.attempts == 2


async def test_after_a_refusal_the_next_message_begins_another_attempt_and_leaves_by_it() -> None:
    link = outgoing(OutgoingState.REFUSED)
    assert link.attempts == 1
    link._send([b"once more"])
    assert link.state is OutgoingState.CONNECTING and link.attempts == 2
    link.apply(OutgoingEvent.CONNECTED)
    assert link.sent == [[b"once more"]]


async def test_a_closed_link_drops_messages() -> None:
    link = outgoing(OutgoingState.CLOSED)
    link._send([b"late"])
    assert link.sent == [] and link.attempts == 1


async def test_a_table_of_links_disconnects_the_link_it_is_given_and_no_other() -> None:
    listener = Recorder()
    table: LinkTable[Outgoing, int] = LinkTable()
    mine, theirs = Outgoing(listener, "a"), [Link("a", b"", lambda frames: None) for _ in range(2)]
    table.outgoing["a"] = mine
    table.incoming = {1: theirs[0], 2: theirs[1]}
    table.disconnect(theirs[0])
    assert table.incoming == {2: theirs[1]} and table.outgoing == {"a": mine}
    table.disconnect(mine.link)
    assert not table.outgoing and mine.state is OutgoingState.CLOSED
    table.disconnect(mine.link)
    table.close()
    assert table.incoming == {2: theirs[1]}
