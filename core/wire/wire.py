"""How frames leave and reach a process: the interface that ``wire_zmq`` and ``wire_memory`` implement.

A wire listens on one address and connects to others. Everything that happens on it is told to one ``Listener``,
together with the link it happened on; what answers goes out by the same link.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..protocol import codec

Frames = Sequence[codec.Bytes]

# One message holds about so much at most: the receiver begins with the first part of a long burst while the rest of it
# is still being written.
_JOIN_BYTES = 2**16
_JOIN_ENVELOPES = 256


class Link:
    """One peer as seen from here. Sending never blocks and keeps the order of the calls.

    Envelopes that are sent within one tick of the loop leave joined in one message, so that a burst of calls
    reaches its actor as a burst. Where they come one at a time, each leaves at once: that a tick's first is the first
    of several is known from the tick before.
    """

    __slots__ = (
        "_alone",
        "_drop",
        "_forget",
        "_header",
        "_in_tick",
        "_loop",
        "_queued",
        "_queued_bytes",
        "_transmit",
        "address",
        "peer",
        "trouble",
    )

    def __init__(
        self,
        address: str,
        header: bytes,
        transmit: Callable[[list[codec.Bytes]], None],
        forget: Callable[[], None] | None = None,
        drop: Callable[[], None] | None = None,
    ) -> None:
        """``address``: whom it leads to, in words for people where the peer has none. ``forget``: drops what was
        transmitted and waits for a connection. ``drop``: ends the connection, and makes another; None where the peer
        made it."""
        self.address = address
        self.peer: Any = None
        """For the listener: what it knows of this peer."""
        self.trouble = ""
        """Why the link does not come up, where the wire has an idea."""
        self._header = header
        self._transmit = transmit
        self._forget = forget
        self._drop = drop
        self._loop = asyncio.get_running_loop()
        self._alone = True
        self._in_tick = False
        self._queued: list[bytes] = []
        self._queued_bytes = 0

    def send(self, envelope: bytes, buffers: Sequence[codec.Bytes] = ()) -> None:
        if buffers:  # indexes count from the message's first buffer, so it travels alone
            self.flush()
            self._transmit([self._header, codec.join([envelope]), *buffers])
            return
        if not self._in_tick:
            self._in_tick = True
            self._loop.call_soon(self._end_tick)
            if self._alone:
                self._transmit([self._header, codec.join([envelope])])
                return
            self._alone = True
        else:
            self._alone = False
        self._queued.append(envelope)
        self._queued_bytes += len(envelope)
        if self._queued_bytes > _JOIN_BYTES or len(self._queued) >= _JOIN_ENVELOPES:
            self.flush()

    def _end_tick(self) -> None:
        self._in_tick = False
        self.flush()

    def flush(self) -> None:
        if self._queued:
            queued, self._queued, self._queued_bytes = self._queued, [], 0
            self._transmit([self._header, codec.join(queued)])

    def forget_unsent(self) -> None:
        """Drops what has not left yet: the peer is gone."""
        self._queued, self._queued_bytes = [], 0
        if self._forget is not None:
            self._forget()

    def drop(self) -> bool:
        """The peer has fallen silent: what has not left yet, it shall not find when it wakes up. Whether the connection
        was ended, and another is being made; not where the peer made it."""
        if self._drop is None:
            return False
        self._drop()
        return True


class Listener(Protocol):
    """Who is told what happens on a wire; called on the loop, never from within ``send``."""

    def received(self, link: Link, header: codec.Bytes, body: codec.Bytes, buffers: Frames) -> None: ...

    def connected(self, link: Link) -> None:
        """A link made by ``connect`` is up (again)."""
        ...

    def disconnected(self, link: Link, reason: str) -> None:
        """A link made by ``connect`` went down. The wire goes on trying to bring it up."""
        ...

    def refused(self, link: Link, reason: str) -> None:
        """The peer does not let this wire in, and will not change its mind."""
        ...

    def crashed(self) -> None:
        """This node has ended as a process does that is killed (``wire_memory``)."""
        ...


class Wire(Protocol):
    @property
    def epoch(self) -> int:
        """Tells this incarnation of a node from its earlier ones: it is larger."""
        ...

    @property
    def address(self) -> str:
        """Where peers reach this wire; complete once it has been started."""
        ...

    def start(self, header: bytes, listener: Listener) -> None:
        """Binds and begins to deliver on the running loop; ``header`` begins every message.

        Raises OSError where the address can't be had.
        """
        ...

    def connect(self, address: str) -> Link:
        """A link to the wire that listens on ``address``, whether or not somebody listens there yet."""
        ...

    def disconnect(self, link: Link) -> None:
        """Ends a link for good."""
        ...

    def close(self) -> None:
        """Sends what is queued (bounded by a short linger) and stops."""
        ...
