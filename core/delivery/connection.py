"""The connection to one peer: carries out the effects of its session, on a link and the loop.

The requests of this side are in ``outbound.py``, those of the peer in ``inbound.py``.
"""

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import (
    ActorDead,
    CallTimeout,
    FlexmarlError,
    RemoteProtocolError,
    SystemClosed,
    Unreachable,
)
from ..protocol import codec, messages
from ..protocol.envelopes import REQUESTS, Envelope, Kind
from ..protocol.session import Effects, LinkState
from ..telemetry import get_logger
from ..wire.wire import Frames, Link
from .inbound import Inbound
from .outbound import Outbound, Waiter, reject

if TYPE_CHECKING:
    from .peers import Network

log = get_logger(__name__)

# If the exit reason of a peer's process will be known here, the calls to it wait this long for it.
EXIT_REASON_WAIT_S = 0.04


class Connection(Outbound):
    def __init__(self, network: "Network", link: Link, *, up: bool) -> None:
        """``up``: the peer has connected to this side."""
        super().__init__(network, link, up=up)
        self._incoming = up
        self._header = b""
        self.inbound = Inbound(network, link, self.session, self._encoder, self._arm)
        self._was_active = True
        self._down: asyncio.TimerHandle | None = None
        """Runs while the link is down and its exit reason may still come."""
        self._exit_reason: FlexmarlError | None = None
        self._left = False
        """It has said goodbye."""
        self._on: dict[int, Callable[[Envelope], None]] = {
            **dict.fromkeys(REQUESTS, self.inbound.on_requests),
            Kind.REPLY: self._on_replies,
            Kind.ERROR: self._on_error,
            Kind.ITEM: self._on_item,
            Kind.CANCEL: self.inbound.on_cancel,
            Kind.GRANT: self.inbound.on_grant,
            Kind.DONE: self._on_done,
            Kind.PING: self._on_ping,
            Kind.PONG: self._on_pong,
            Kind.REFUSE: self._on_refuse,
            Kind.BYE: self._on_bye,
        }
        if link.may_call is not None:
            self._on.update(dict.fromkeys(REQUESTS, self.inbound.on_restricted_requests))

    @property
    def link(self) -> Link:
        return self._link

    @property
    def address(self) -> str:
        return self._link.address

    @property
    def node(self) -> str:
        """The peer's name; empty until its first message."""
        return self.inbound.node

    # ------------------------------------------------------------------ messages

    def received(self, message: codec.Bytes, buffers: Frames) -> None:
        """Raises RemoteProtocolError if the message is malformed; no envelope of it has been processed then."""
        known = self._header
        if not known or message[: len(known)] != known or self.session.epoch is None:
            node, epoch, size = messages.unpack_header(message)
            header = bytes(message[:size])
            envelopes = messages.unpack_envelopes(memoryview(message)[size:], buffers)
            if self.session.is_over(epoch) or self._network.is_replaced(epoch):
                if self._incoming:
                    raise RemoteProtocolError(
                        f"{node} was replaced: a later incarnation of it has been started"
                    )
                return  # it was under way when its sender was restarted
            self._network.heard_incarnation(epoch)
            effects = self.session.heard(epoch)
            if known and header != known:
                self.inbound.forget()
            self._header = header
            self.inbound.node = node
            if effects is not None:
                self._carry_out(effects)
        else:
            envelopes = messages.unpack_envelopes(memoryview(message)[len(known) :], buffers)
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
        self._left = True
        self._go_down("its system was closed")
        if self._incoming:
            self._network.peer_left(self._link)

    def _on_ping(self, envelope: Envelope) -> None:
        self.inbound.send_done()
        self._send([Kind.PONG, envelope[1], self.inbound.ids()])

    # ------------------------------------------------------------------ the link

    def connected(self) -> None:
        if self._down is not None:  # down and up again before the callers were notified
            self._down.cancel()
            self._link_down("the connection was lost")
        self._left = False
        self._carry_out(self.session.connected())

    def disconnected(self, reason: str) -> None:
        if self._exit_reason is not None:
            self._go_down(reason, self._exit_reason)
        elif self._down is None:
            wait_s = EXIT_REASON_WAIT_S if self._network.exit_reason_follows(self.address) else 0.0
            self._down = self._loop.call_later(wait_s, self._link_down, reason)

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
            self.dead = error
            self._carry_out(self.session.close(str(error)), error)
        elif link_is_down:
            self._go_down(str(error), error)
        elif self.session.state is LinkState.UP:
            self._exit_reason = error  # for the moment at which the wire notices

    def close(self) -> None:
        """This side leaves: notifies the peer, and fails all requests to it."""
        self.dead = SystemClosed(f"{self._network.name} is closed")
        for handle in (self._timer, self._down):
            if handle is not None:
                handle.cancel()
        self.inbound.leave()
        self._send([Kind.BYE, 0])
        name = self._network.name
        effects = self.session.close(f"{name} was closed before they were known to be processed")
        self._log_lost(effects)
        for request in effects.dead:
            reject(request.waiter, self._closed_during(request))
        for actor, waiter in effects.waiting:
            reject(waiter, SystemClosed(f"{name} closed while a call to {actor} waited for credit"))

    # ------------------------------------------------------------------ the time, and the effects

    def _arm(self) -> None:
        due = self.session.wake_at()
        if due is None or (self._timer is not None and self._due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_at(due, self._wake)

    def _wake(self) -> None:
        now, due = self._loop.time(), self._due
        self._timer, self._due = None, math.inf
        self._carry_out(self.session.advance(now, now - due))

    def _carry_out(self, effects: Effects[Waiter], error: FlexmarlError | None = None) -> None:
        """``error``: raised in the waiters instead of an error made from the effects' reason."""
        is_up = self.session.state is LinkState.UP
        for request in effects.expired:
            phase = "waiting for the reply" if is_up else f"waiting for a connection to {self.address}"
            callee = request.callee
            reject(request.waiter, CallTimeout(callee.actor, callee.endpoint, callee.timeout_s, phase))
            self._send([Kind.CANCEL, request.id])
        for request in effects.dead:
            reject(request.waiter, error or self._death(request.actor, effects.reason))
        for actor, waiter in effects.waiting:
            reject(waiter, error or self._death(actor, effects.reason))
        self._log_lost(effects)
        self._give_credit(effects.granted)
        for request_id in effects.cancel:
            self._send([Kind.CANCEL, request_id])
        if effects.withdraw:
            self._send([Kind.CANCEL, -effects.withdraw])
        if effects.ping is not None:
            self._send([Kind.PING, effects.ping])
        if effects.gone:
            if not is_up:  # requests that have failed here must not run there later
                self._link.forget_unsent()
            self.inbound.end_streams()
        self._arm()
        if effects.silent and self._link.drop():
            self._go_down(effects.reason)

    def _log_lost(self, effects: Effects[Waiter]) -> None:
        if effects.lost_tells:
            log.warning(
                "one-way messages lost", count=effects.lost_tells, peer=self.address, why=effects.reason
            )
        if self._tells_done is not None:
            self._tells_done.set()

    def _death(self, actor: str, reason: str) -> ActorDead:
        if self.session.state is LinkState.CONNECTING:
            trouble = f": {self._link.trouble}" if self._link.trouble else ""
            return Unreachable(actor, f"{reason} ({self.address}{trouble})")
        return ActorDead(actor, f"{reason} ({self.address})", stopped=self._left)

    @property
    def is_forgettable(self) -> bool:
        """True if there is no connection, no request waits for one, and the reason is not known."""
        session = self.session
        return not (
            self.dead is not None
            or session.state is LinkState.UP
            or session.requests
            or session.requests.waiting_for_credit()
            or self._down is not None
        )

    def was_active(self) -> bool:
        """True if a message came since the last call of this, or a request of the peer is in service."""
        was_active, self._was_active = self._was_active, False
        return was_active or self.inbound.is_active
