"""The links of one wire: those that it makes, each with a state, and those that its peers make.

Common to all wires. ``OutgoingLink`` keeps messages until the connection is up and reports to the ``Listener``; a wire
adds how a connection is made.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar

from ..protocol import codec
from .wire import Link, Listener

# A session has states of its link too (``protocol/session.py``), and neither table follows from the other. Here the
# connection counts: if a message can be given to it now. There the requests count: after a loss a link is CONNECTING
# here and DOWN there, since they have failed; a refusal changes the state here, and not there, because a later message
# may bring the link up.


class OutgoingState(Enum):
    CONNECTING = "connecting"
    UP = "up"
    REFUSED = "refused"
    """No attempt to connect is under way; the next message begins one."""
    CLOSED = "closed"


class OutgoingEvent(Enum):
    CONNECTED = "connected"
    RESTARTED = "restarted"
    """A new attempt to connect begins; an old connection is given up."""
    REFUSED = "refused"
    """The peer, or this machine, will not let any attempt succeed."""
    CLOSED = "closed"


OUTGOING_TRANSITIONS: dict[OutgoingState, dict[OutgoingEvent, OutgoingState]] = {
    OutgoingState.CONNECTING: {
        OutgoingEvent.CONNECTED: OutgoingState.UP,
        OutgoingEvent.RESTARTED: OutgoingState.CONNECTING,
        OutgoingEvent.REFUSED: OutgoingState.REFUSED,
        OutgoingEvent.CLOSED: OutgoingState.CLOSED,
    },
    OutgoingState.UP: {
        OutgoingEvent.RESTARTED: OutgoingState.CONNECTING,
        OutgoingEvent.CLOSED: OutgoingState.CLOSED,
    },
    OutgoingState.REFUSED: {
        OutgoingEvent.RESTARTED: OutgoingState.CONNECTING,
        OutgoingEvent.CLOSED: OutgoingState.CLOSED,
    },
    OutgoingState.CLOSED: {},
}  # fmt: skip

# Looked up for each message: a global name costs less than an enum's attribute.
_CONNECTING, _UP, _CLOSED = OutgoingState.CONNECTING, OutgoingState.UP, OutgoingState.CLOSED


class OutgoingLink(ABC):
    """The connecting end of a link: connects, and connects again when the connection is lost."""

    _transmit: Callable[[list[codec.Bytes]], object]
    """Sends on the connection; a subclass sets it before ``_came_up``."""

    def __init__(self, listener: Listener, address: str, header: bytes) -> None:
        self._listener = listener
        self._state = OutgoingState.CONNECTING
        # Without a limit of its own: requests take credit before they come here.
        self._unsent: list[list[codec.Bytes]] = []
        self.link = Link(address, header, self._send, self._unsent.clear, self._restart)

    @property
    def state(self) -> OutgoingState:
        """The state of the connection; for messages it decides between sending and keeping them."""
        return self._state

    def _move(self, event: OutgoingEvent) -> None:
        allowed = OUTGOING_TRANSITIONS[self._state]
        assert event in allowed, f"an outgoing link that is {self._state.value} can't be {event.value}"
        self._state = allowed[event]

    def _send(self, frames: list[codec.Bytes]) -> None:
        if self._state is _UP:
            self._transmit(frames)
        elif self._state is not _CLOSED:
            self._unsent.append(frames)
            if self._state is OutgoingState.REFUSED:
                self._open_again()

    def arrived(self, frames: list[codec.Bytes]) -> None:
        """Hands on a message of the peer.

        The message may overtake the report that the connection is up, and be answered at once; what the listener sends
        when the connection comes up has to be before that answer.
        """
        if self._state is _CONNECTING:
            self._came_up()
        self._listener.received(self.link, frames[0], frames[1:])

    def _came_up(self) -> None:
        self._listener.connected(self.link)  # its withdrawal queues behind the messages that wait here
        self._move(OutgoingEvent.CONNECTED)
        unsent, self._unsent[:] = self._unsent[:], ()
        for frames in unsent:
            self._transmit(frames)

    def _lose(self, reason: str) -> None:
        self._restart()
        self._listener.disconnected(self.link, reason)

    def _restart(self) -> None:
        self._disconnect()
        self.link.forget_unsent()
        self._open_again()

    def _open_again(self) -> None:
        self._move(OutgoingEvent.RESTARTED)
        self._open()

    @abstractmethod
    def _open(self) -> None:
        """Begins an attempt to connect. Raises nothing: a failure is an event."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Gives up the connection, or the attempt; messages under way are lost."""

    @abstractmethod
    def close(self) -> None:
        """Sends the queued messages if the link is up, and ends it for good."""


End = TypeVar("End", bound=OutgoingLink)
Route = TypeVar("Route")


class LinkTable(Generic[End, Route]):
    """All links of a wire. ``Route``: the wire's own key for a peer that has connected to it."""

    def __init__(self) -> None:
        self.outgoing: dict[str, End] = {}
        self.incoming: dict[Route, Link] = {}

    def disconnect(self, link: Link) -> None:
        """See ``Wire.disconnect``."""
        end = self.outgoing.get(link.address)
        if end is not None and end.link is link:
            del self.outgoing[link.address]
            end.close()
        else:  # a link does not know its route, which only answers need; peers are dropped seldom
            self.incoming = {route: other for route, other in self.incoming.items() if other is not link}

    def close(self) -> None:
        """Sends the queued messages on all links and closes those that this side made. Can be repeated."""
        for link in self.incoming.values():
            link.flush()
        for end in self.outgoing.values():
            end.close()
        self.outgoing.clear()
