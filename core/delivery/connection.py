"""The connection to one peer: carries out the effects of its session, on a link and the loop.

``await ref.api.f(x)``, out and back, over a link that is up. Out, in the caller's process:

    _Proxy, in ref.py       keeps the connection's ``Outbound``, and what all calls of ``f`` share: a ``Callee``, whose
                            fields are packed once, and which has the actor's credit
    Outbound.call           packs the arguments before it returns: they are sent as they are now, also if they must wait
    Credit.take             counts the request, and its bytes, against the actor's window. Without credit the request
                            waits (``Outbound._wait_credit``), until an answer gives credit back (``send_granted``)
    OpenRequests.add        gives the request its id, the next one on this link, and keeps it with its deadline
    Link.send_item          sends it at once, or joins it with the others of this tick
    Connection.need_peer    sets the timer, for the deadline and for heartbeats

In, in the process of the actor:

    Network.received        finds the connection by the link; a stranger's first message makes one
    Connection.received     checks all envelopes of the message before any is processed: a malformed message changes
                            nothing. Then each goes to the half that it concerns
    Inbound.on_requests     delivers what the session admits: each request once, in the order of sending
    Mailbox._work           begins requests in this order. Under the peer's lease only: one whose caller has given up
                            must not begin (``Inbound.may_begin``)
    Signature.arguments     validates them against the annotations of ``f``, which is called then

Back:

    Inbound.answer          packs the result; a large one counts until the peer confirms a mark (``ReplyWindow``)
    Link.send_item          replies that follow one another share an envelope, as requests do
    Connection.received     in the caller's process, by the same steps as above
    Outbound.on_replies     finds the call by its id, takes back its credit, and sends requests that have waited for it
    Signature.result        validates the result; setting it wakes the awaiter

Without an answer a call ends too. ``Session.advance``, which the timer calls, finds expired deadlines and silent peers;
``Session.disconnected`` the requests under way on a link that went down; ``Session.pong`` those that were lost. They
are failed by ``_carry_out``. ``Call.cancel`` sends CANCEL. The callee answers an expired or cancelled request all the
same, which holds its credit until then: a slow actor gets no more work because its callers lose their patience.
"""

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import ActorDead, FlexmarlError, RemoteProtocolError, SystemClosed, Unreachable
from ..protocol import codec, messages
from ..protocol.envelopes import REQUESTS, Envelope, Kind
from ..protocol.session import Effects, LinkState, Session
from ..wire.wire import Frames, Link
from .inbound import Inbound
from .outbound import Outbound, Waiter

if TYPE_CHECKING:
    from .peers import Network

# If the exit reason of a peer's process will be known here, the calls to it wait this long for it: the socket closes
# before the parent has the exit status, and "killed by signal 9" says more than "the connection was lost".
EXIT_REASON_WAIT_S = 0.04

_UP = LinkState.UP  # a global name costs less than an enum's attribute


class Connection:
    """Owns the link, the timer and the session; its two halves, the requests in each direction."""

    def __init__(self, network: "Network", link: Link, *, up: bool) -> None:
        """``up``: the peer has connected to this side."""
        self.network = network
        self.link = link
        self.loop = asyncio.get_running_loop()
        self.encoder = codec.Encoder()
        trusted = network.trusts(link.address)
        self.session: Session[Waiter] = Session(network.settings, up=up, trusted=trusted)
        self.node = ""
        """The peer's name; empty until its first message."""
        self.outbound = Outbound(self)
        self.inbound = inbound = Inbound(self)
        self._incoming = up
        self._header = b""
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        """The time of ``_timer``."""
        self._was_active = True
        self._down: asyncio.TimerHandle | None = None
        """Runs while the link is down and its exit reason may still come."""
        self._exit_reason: FlexmarlError | None = None
        self._has_left = False
        """It has said goodbye."""
        on_requests = inbound.on_requests if link.may_call is None else inbound.on_restricted_requests
        self._on: dict[int, Callable[[Envelope], None]] = {
            **dict.fromkeys(REQUESTS, on_requests),
            Kind.REPLY: self.outbound.on_replies,
            Kind.ERROR: self.outbound.on_error,
            Kind.ITEM: self.outbound.on_item,
            Kind.DONE: self.outbound.on_done,
            Kind.CANCEL: inbound.on_cancel,
            Kind.GRANT: inbound.on_grant,
            Kind.PING: self._on_ping,
            Kind.PONG: self._on_pong,
            Kind.REFUSE: self._on_refuse,
            Kind.BYE: self._on_bye,
        }

    @property
    def address(self) -> str:
        """The peer's, or a text for people if it has none."""
        return self.link.address

    # ------------------------------------------------------------------ messages

    def send(self, envelope: Envelope) -> None:
        """Sends an envelope of its own. Requests and results share theirs, so they leave by ``Link.send_item``."""
        self.link.send(self.encoder.pack(envelope))

    def received(self, message: codec.Bytes, buffers: Frames) -> None:
        """Raises RemoteProtocolError if the message is malformed; no envelope of it has been processed then."""
        # All messages of one incarnation begin with the same bytes: comparing them replaces decoding them. After a
        # disconnection the sender is checked again, even if it is the one from before.
        header = self._header
        if not header or message[: len(header)] != header or self.session.epoch is None:
            node, epoch, size = messages.unpack_header(message)
            sender_header = bytes(message[:size])
            envelopes = messages.unpack_envelopes(memoryview(message)[size:], buffers)
            if self.session.is_over(epoch) or self.network.is_replaced(epoch):
                if self._incoming:
                    raise RemoteProtocolError(
                        f"{node} was replaced: a later incarnation of it has been started"
                    )
                return  # it was under way when its sender was restarted
            self.network.heard_incarnation(epoch)
            effects = self.session.heard(epoch)
            if header and sender_header != header:
                self.inbound.forget()
            self._header = sender_header
            self.node = node
            if effects is not None:
                self._carry_out(effects)
        else:
            envelopes = messages.unpack_envelopes(memoryview(message)[len(header) :], buffers)
            self.session.heard(self.session.epoch)
        self._was_active = True
        on = self._on
        for envelope in envelopes:
            on[envelope[0]](envelope)

    def replaced(self) -> None:
        """A later incarnation of the peer is known: this one is not served any more, should it still run."""
        self._header = b""  # its next message is checked again
        self.inbound.forget()

    def _on_pong(self, envelope: Envelope) -> None:
        if envelope[1] < 0:
            self.inbound.on_mark(-envelope[1])
        else:
            self._carry_out(self.session.pong(envelope[1], envelope[2]))

    def _on_refuse(self, envelope: Envelope) -> None:
        self.refused(envelope[2])

    def _on_bye(self, envelope: Envelope) -> None:
        self._has_left = True
        self._go_down("its system was closed")
        if self._incoming:
            self.network.peer_left(self.link)

    def _on_ping(self, envelope: Envelope) -> None:
        self.inbound.send_done()
        self.send([Kind.PONG, envelope[1], self.inbound.ids()])

    # ------------------------------------------------------------------ the link

    def connected(self) -> None:
        """The wire reports that the link is up."""
        if self._down is not None:  # down and up again before the callers were notified
            self._down.cancel()
            self._link_down("the connection was lost")
        self._has_left = False
        self._carry_out(self.session.connected())

    def disconnected(self, reason: str) -> None:
        """The wire reports that the link went down. The calls fail at once, or when the exit reason is known."""
        if self._exit_reason is not None:
            self._go_down(reason, self._exit_reason)
        elif self._down is None:
            wait_s = EXIT_REASON_WAIT_S if self.network.exit_reason_follows(self.address) else 0.0
            self._down = self.loop.call_later(wait_s, self._link_down, reason)

    def _link_down(self, reason: str) -> None:
        self._down = None
        self._go_down(reason)

    def _go_down(self, reason: str, error: FlexmarlError | None = None) -> None:
        self._exit_reason = None
        self._carry_out(self.session.disconnected(reason), error)

    def refused(self, reason: str) -> None:
        """The peer does not talk to this side: all requests to it fail."""
        error = RemoteProtocolError(f"{self.address} refuses to talk: {reason}")
        self._carry_out(self.session.fail(reason), error)

    def unreachable(self, reason: str) -> None:
        """The wire reports that the link can't come up."""
        self._carry_out(self.session.fail(reason))

    def fail(self, error: FlexmarlError, *, for_good: bool) -> None:
        """The exit reason of the peer's process is known. Not ``for_good``: it is being restarted."""
        link_is_down = self._down is not None
        if self._down is not None:
            self._down.cancel()
            self._down = None
        if for_good:
            self.outbound.dead = error
            self._carry_out(self.session.close(str(error)), error)
        elif link_is_down:
            self._go_down(str(error), error)
        elif self.session.state is _UP:
            self._exit_reason = error  # for the moment at which the wire notices

    def close(self) -> None:
        """This side leaves: notifies the peer, and fails all requests to it."""
        self.outbound.dead = SystemClosed(f"{self.network.name} is closed")
        for handle in (self._timer, self._down):
            if handle is not None:
                handle.cancel()
        self.inbound.leave()
        self.send([Kind.BYE, 0])
        reason = f"{self.network.name} was closed before they were known to be processed"
        self.outbound.close(self.session.close(reason))

    # ------------------------------------------------------------------ the time, and the effects

    def need_peer(self, deadline: float = math.inf) -> None:
        """Has the timer run for a request that is under way, or waits for credit."""
        session = self.session
        # On the way of every request, and nearly always there is nothing to do: while heartbeats run, the timer is set
        # to the next one at the latest, so only an earlier deadline matters. A link that is not up is another matter:
        # the session counts ``connect_timeout_s`` from the request that needs it, not from the start of heartbeats.
        if session.next_tick is None or session.state is not _UP:
            session.need(self.loop.time())
            self.arm()
        elif deadline < self._due:
            self.arm()

    def arm(self) -> None:
        """Sets the timer to the session's next work."""
        due = self.session.wake_at()
        # A timer that is early does no harm: ``advance`` finds nothing, and sets it again. So answers never touch it.
        if due is None or (self._timer is not None and self._due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self.loop.call_at(due, self._wake)

    def _wake(self) -> None:
        now, due = self.loop.time(), self._due
        self._timer, self._due = None, math.inf
        self._carry_out(self.session.advance(now, now - due))

    def _carry_out(self, effects: Effects[Waiter], error: FlexmarlError | None = None) -> None:
        """``error``: raised in the waiters instead of an error made from the effects' reason."""
        is_up = self.session.state is _UP
        phase = "waiting for the reply" if is_up else f"waiting for a connection to {self.address}"
        self.outbound.expire(effects.expired, phase)
        self.outbound.fail(effects, lambda actor: error or self._death(actor, effects.reason))
        self.outbound.send_granted(effects.granted)
        for request_id in effects.cancel:
            self.send([Kind.CANCEL, request_id])
        if effects.withdraw:
            self.send([Kind.CANCEL, -effects.withdraw])
        if effects.ping is not None:
            self.send([Kind.PING, effects.ping])
        if effects.gone:
            if not is_up:  # requests that have failed here must not run there later
                self.link.forget_unsent()
            self.inbound.end_streams()
        self.arm()
        # Last, as it runs this function again: everything else belongs to the link that is being dropped.
        if effects.silent and self.link.drop():
            self._go_down(effects.reason)

    def _death(self, actor: str, reason: str) -> ActorDead:
        if self.session.state is LinkState.CONNECTING:
            trouble = f": {self.link.trouble}" if self.link.trouble else ""
            return Unreachable(actor, f"{reason} ({self.address}{trouble})")
        return ActorDead(actor, f"{reason} ({self.address})", stopped=self._has_left)

    @property
    def is_forgettable(self) -> bool:
        """True if there is no connection, no request waits for one, and the reason is not known."""
        session = self.session
        return not (
            self.outbound.dead is not None
            or session.state is _UP
            or session.requests
            or session.requests.waiting_for_credit()
            or self._down is not None
        )

    def was_active(self) -> bool:
        """True if a message came since the last call of this, or a request of the peer is in service."""
        was_active, self._was_active = self._was_active, False
        return was_active or self.inbound.is_active
