"""The interface between a process and its peers, which ``zeromq`` and ``memory`` implement.

A wire listens on one address and connects to others. It reports all its events to one ``Listener``, together with the
link of the event; answers leave by the same link.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..protocol import codec, messages
from ..protocol.messages import REPLIES, RunHead

Frames = Sequence[codec.Bytes]

# The most that one message holds: the receiver begins with the first part of a long burst while the rest is still being
# written. Measured with 1000 calls at once between two processes of one busy host, in microseconds for each, as medians
# of three rounds: 58 if each envelope leaves alone, 11 with these limits, 21 if the whole tick leaves as one message.
# Other limits (a first message of 16 or 256, at most 64) differ by less than the rounds do.
_JOIN_BYTES = 2**16
_JOIN_ENVELOPES = 256
# And the first one of a tick; each that follows may hold twice as many as the one before.
_FIRST_JOIN_ENVELOPES = 64


class Link:
    """The connection to one peer, for sending. ``send`` and ``send_item`` never block, and keep the order of the calls.

    Envelopes that are sent within one tick of the loop leave joined in one message, so that a burst of calls reaches
    its actor as a burst. If they come one at a time, each leaves at once: the tick before predicts if a tick's first
    envelope is the first of several.
    """

    __slots__ = (
        "_alone",
        "_drop",
        "_forget",
        "_header",
        "_in_tick",
        "_limit",
        "_loop",
        "_queued",
        "_queued_bytes",
        "_room",
        "_run",
        "_run_first",
        "_run_head",
        "_run_next",
        "_transmit",
        "address",
        "connection",
        "may_call",
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
        """``address``: of the peer, or a text for people if it has none. ``forget``: drops transmitted messages that
        wait for a connection. ``drop``: ends the connection, and makes another; None if the peer made it."""
        self.address = address
        self.connection: Any = None
        """The listener's own object for this peer."""
        self.may_call: Callable[[str, str], bool] | None = None
        """Decides about the peer's calls, by actor and endpoint; None: it may make all."""
        self.trouble = ""
        """The reason for which the link does not come up; "" if the wire knows none."""
        self._header = header
        self._transmit = transmit
        self._forget = forget
        self._drop = drop
        self._loop = asyncio.get_running_loop()
        self._alone = True
        self._in_tick = False
        self._queued: list[bytes] = []
        """Envelopes; the items of the run that is still open come after them."""
        self._run: list[bytes] = []
        self._run_head = REPLIES
        self._run_first = self._run_next = 0
        self._queued_bytes = 0
        self._limit = self._room = _FIRST_JOIN_ENVELOPES
        """The most envelopes, or items, of the message that is being queued, and those for which there is room."""

    def send(self, envelope: bytes, buffers: Sequence[codec.Bytes] = ()) -> None:
        """Sends one envelope, and the buffers that it refers to."""
        if buffers or self._leaves_at_once():
            self._send_alone(envelope, buffers)
        else:
            self._end_run()
            self._queued.append(envelope)
            self._count(len(envelope))

    def send_item(self, head: RunHead, number: int, item: bytes, buffers: Sequence[codec.Bytes] = ()) -> None:
        """Sends a request or a reply. One that continues the run of the one before shares its envelope."""
        run = self._run
        if run and number == self._run_next and head is self._run_head and not buffers:
            self._alone = False
            self._run_next = number + 1
            run.append(item)
            self._queued_bytes += len(item)
            self._room -= 1
            if self._room <= 0 or self._queued_bytes > _JOIN_BYTES:
                self._flush_full()
        elif buffers or self._leaves_at_once():
            self._send_alone(head.pack(number, (item,)), buffers)
        else:
            self._end_run()
            self._run_head, self._run_first, self._run_next = head, number, number + 1
            self._run.append(item)
            self._count(len(item))

    def _send_alone(self, envelope: bytes, buffers: Sequence[codec.Bytes]) -> None:
        """Indexes count from the first buffer of a message, so an envelope with buffers shares it with no other."""
        if self._run or self._queued:
            self.flush()
        self._transmit([messages.join((envelope,), self._header), *buffers])

    def _leaves_at_once(self) -> bool:
        """True for the first envelope of a tick, if it is expected to be the only one."""
        # Why not wait for the end of the tick each time: a lone call would be behind all callbacks that are ready. Why
        # not send the first one of each tick at once: a burst would be two messages, and its first request would come
        # to its actor alone. The tick before is a fair guess: bursts of calls and of their replies take turns.
        if self._in_tick:
            self._alone = False
            return False
        self._in_tick = True
        self._loop.call_soon(self._end_tick)
        alone, self._alone = self._alone, True
        return alone

    def _count(self, size_bytes: int) -> None:
        self._queued_bytes += size_bytes
        self._room -= 1
        if self._room <= 0 or self._queued_bytes > _JOIN_BYTES:
            self._flush_full()

    def _flush_full(self) -> None:
        self.flush()
        self._limit = self._room = min(2 * self._limit, _JOIN_ENVELOPES)

    def _end_run(self) -> None:
        if self._run:
            run, self._run = self._run, []
            self._queued.append(self._run_head.pack(self._run_first, run))

    def _end_tick(self) -> None:
        self._in_tick = False
        self.flush()
        self._limit = self._room = _FIRST_JOIN_ENVELOPES

    def flush(self) -> None:
        """Transmits the queued envelopes now, before the end of the tick."""
        self._end_run()
        if self._queued:
            queued, self._queued, self._queued_bytes = self._queued, [], 0
            self._room = self._limit
            self._transmit([messages.join(queued, self._header)])

    def forget_unsent(self) -> None:
        """Drops messages that have not left yet: the peer has gone."""
        self._queued, self._run, self._queued_bytes, self._room = [], [], 0, self._limit
        if self._forget is not None:
            self._forget()

    def drop(self) -> bool:
        """Ends the connection to a silent peer and discards unsent messages, so that a resumed peer gets no stale ones.
        True if another connection is being made; False if the peer made this one, which stays."""
        if self._drop is None:
            return False
        self._drop()
        return True


class Listener(Protocol):
    """Receives the events of a wire; called on the loop, never from within ``send``."""

    def received(self, link: Link, message: codec.Bytes, buffers: Frames) -> None:
        """A message on a link; on one made by ``connect`` only between ``connected`` and ``disconnected``.

        ``message``: the header and the envelopes.
        """
        ...

    def connected(self, link: Link) -> None:
        """A link made by ``connect`` is up (again). Alternates with ``disconnected``."""
        ...

    def disconnected(self, link: Link, reason: str) -> None:
        """A link made by ``connect`` went down. The wire continues to bring it up."""
        ...

    def refused(self, link: Link, reason: str) -> None:
        """The peer does not admit this wire; the wire tries again only when there is a message to send."""
        ...

    def crashed(self) -> None:
        """This node has ended as a killed process does (``memory``)."""
        ...


class Wire(Protocol):
    @property
    def epoch(self) -> int:
        """The number of this incarnation of the node; see ``incarnations.py``."""
        ...

    def first_epoch(self, actor: str) -> int:
        """The epoch before the first incarnation of an actor that is started from here."""
        ...

    @property
    def address(self) -> str:
        """The address of this wire for peers; complete once it has been started."""
        ...

    def start(self, header: bytes, listener: Listener) -> None:
        """Binds and begins to deliver on the running loop; ``header`` begins every message.

        Raises OSError if it can't listen on the address.
        """
        ...

    def connect(self, address: str) -> Link:
        """A link to the wire that listens on ``address``, now or later."""
        ...

    def now(self) -> float:
        """The time in seconds, of a clock that also runs while this process is stopped or its loop is busy."""
        ...

    def wall(self) -> float:
        """Seconds since 1970 by the clock of this host; in virtual time, since its begin."""
        ...

    def disconnect(self, link: Link) -> None:
        """Ends a link for good."""
        ...

    def close(self) -> None:
        """Sends queued messages (bounded by a short linger) and stops."""
        ...
