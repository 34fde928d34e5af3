"""The conversation with one peer: carries out what its session decides, on a link and the loop.

What this side asks is here: ``call``, ``tell``, ``stream``. What the peer asks is in ``requests.py``.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from ..call_context import current_delivery
from ..errors import (
    ActorDead,
    CallTimeout,
    FlexmarlError,
    LocalProtocolError,
    NoCredit,
    RemoteError,
    RemoteProtocolError,
    SystemClosed,
    Unreachable,
)
from ..protocol import codec
from ..protocol.envelopes import REQUESTS, Envelope, Fault, Kind
from ..protocol.session import Decisions, LinkState, Request, Session, SessionStatistics
from ..signature import Signature
from ..telemetry import get_logger
from ..wire.wire import Frames, Link
from .requests import Home, Serving
from .streams import StreamReader

log = get_logger(__name__)

# Where the exit status of a peer's process will be known, the calls to it wait so long to name it.
OBITUARY_WAIT_S = 0.04


class Token(Protocol):
    """Who waits for an answer: a future, or the reader of a stream."""

    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...


@dataclass(frozen=True, slots=True)
class PeerStatistics:
    node: str
    address: str
    state: str
    serving: int
    session: SessionStatistics


class Peer:
    def __init__(self, home: Home, link: Link, *, up: bool) -> None:
        """``up``: the peer reached us."""
        self._home = home
        self._link = link
        self._incoming = up
        self._loop = asyncio.get_running_loop()
        self.session: Session[Token] = Session(home.settings, up=up)
        self.dead: FlexmarlError | None = None
        """Set where nothing can be asked of this peer any more."""
        self._trace_ids = home.trace_ids
        self._number = next(home.link_numbers)
        self._header: codec.Bytes = b""
        self._encoder = codec.Encoder()
        self._whole = codec.Encoder(inline_bytes=codec.MAX_BODY_BYTES)
        self.serving = Serving(home, link, self.session, self._encoder, self._whole, self._arm)
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._was_heard = True
        self._down: asyncio.TimerHandle | None = None
        self._obituary: FlexmarlError | None = None
        self._left = False
        """It has said goodbye."""
        self._told: asyncio.Event | None = None
        self._on: dict[int, Callable[[Envelope], None]] = {
            **dict.fromkeys(REQUESTS, self.serving.on_request),
            Kind.REPLY: self._on_reply,
            Kind.ERROR: self._on_error,
            Kind.ITEM: self._on_item,
            Kind.CANCEL: self.serving.on_cancel,
            Kind.GRANT: self.serving.on_grant,
            Kind.DONE: self._on_done,
            Kind.PING: self._on_ping,
            Kind.PONG: self._on_pong,
            Kind.REFUSE: self._on_refuse,
            Kind.BYE: self._on_bye,
        }

    @property
    def link(self) -> Link:
        return self._link

    @property
    def address(self) -> str:
        return self._link.address

    @property
    def node(self) -> str:
        """The peer's name; empty until it has said it."""
        return self.serving.node

    # ------------------------------------------------------------------ asking

    async def call(
        self,
        actor: str,
        endpoint: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout_s: float,
        signature: Signature | None,
    ) -> Any:
        """The endpoint's result; see ``ActorRef.within`` for what it raises."""
        if self.dead is not None or not self.session.credit(actor).take():
            timeout_s = await self._turn(actor, endpoint, timeout_s)
        kind = Kind.ONCE if signature is not None and signature.idempotent else Kind.CALL
        future: asyncio.Future[Any] = self._loop.create_future()
        request = self._request(kind, actor, endpoint, timeout_s, args, kwargs, future)
        try:
            value = await future
        except asyncio.CancelledError:
            self._abandon(request)
            raise
        except RemoteError as error:
            self._raise_declared(error, signature)
        return value if signature is None else signature.result(value, self._home)

    async def tell(
        self, actor: str, endpoint: str, args: Sequence[Any], kwargs: Mapping[str, Any], timeout_s: float
    ) -> None:
        """Returns when the message has left, or is queued for a peer that is being connected."""
        if self.dead is not None or not self.session.credit(actor).take():
            await self._turn(actor, endpoint, timeout_s)
        self._request(Kind.TELL, actor, endpoint, timeout_s, args, kwargs, None)

    async def until_told(self) -> None:
        """Returns when every one-way message has been worked off, or is known to be lost."""
        self._told = asyncio.Event()
        while self.dead is None and self.session.open_tells():
            self._told.clear()
            await self._told.wait()

    def tell_nowait(self, actor: str, endpoint: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises NoCredit where ``tell`` would wait."""
        if self.dead is not None:
            raise self.dead
        credit = self.session.credit(actor)
        if not credit.take():
            raise NoCredit(actor, endpoint, credit.requests, credit.size_bytes)
        self._request(Kind.TELL, actor, endpoint, 0.0, args, kwargs, None)

    async def stream(
        self,
        actor: str,
        endpoint: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout_s: float,
        signature: Signature | None,
    ) -> AsyncIterator[Any]:
        if self.dead is not None or not self.session.credit(actor).take():
            await self._turn(actor, endpoint, timeout_s)
        window = self._home.settings.stream_window
        reader = StreamReader(actor)
        request = self._request(Kind.STREAM, actor, endpoint, timeout_s, args, kwargs, reader)
        taken = 0
        try:
            while True:
                if (
                    taken and not reader.holds_items()
                ):  # the sender may have no room for another one, however large
                    self._send([Kind.GRANT, request.id, taken])
                    taken = 0
                try:
                    item = await reader.next(timeout_s)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise CallTimeout(actor, endpoint, timeout_s, "waiting for the next item") from None
                except RemoteError as error:
                    self._raise_declared(error, signature)
                taken += 1
                if taken >= max(1, window // 2):
                    self._send([Kind.GRANT, request.id, taken])
                    taken = 0
                yield item if signature is None else signature.result(item, self._home)
        finally:
            self._abandon(request)

    def _raise_declared(self, error: RemoteError, signature: Signature | None) -> NoReturn:
        """Raises ``error`` as the class that the caller's signature declares for it."""
        declared = error if signature is None else signature.errors.from_wire(error, self._home)
        if declared is error:
            raise error
        raise declared from error

    def _request(
        self,
        kind: Kind,
        actor: str,
        endpoint: str,
        timeout_s: float,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        token: Token | None,
    ) -> Request[Token]:
        session = self.session
        now = self._loop.time()
        delivery = current_delivery.get()
        trace_id = next(self._trace_ids) if delivery is None else delivery.trace_id
        request_id = session.next_id()
        fields: tuple[Any, ...] = (
            kind, request_id, actor, endpoint, float(timeout_s), args, kwargs, trace_id,
        )  # fmt: skip
        if kind is Kind.ONCE:
            fields += (session.floor(request_id), self._number)
        elif kind is Kind.STREAM:
            fields += (session.settings.stream_window,)
        try:
            packed = (self._whole if kind is Kind.ONCE else self._encoder).pack(fields)
        except BaseException as error:
            self._give_credit(session.credit(actor).forgo())
            if isinstance(error, LocalProtocolError):
                raise LocalProtocolError(f"arguments of {actor}.{endpoint}: {error}") from error.__cause__
            raise
        size_bytes = len(packed)
        buffers = self._encoder.take_buffers()
        if buffers and kind is Kind.TELL:
            buffers = codec.unchanging(buffers)
        for buffer in buffers:
            size_bytes += buffer.nbytes
        request = session.open(now, request_id, kind, actor, endpoint, timeout_s, token, size_bytes)
        credit = session.credit(actor)
        if credit.waiting:
            self._give_credit(credit.grant())
        if kind is Kind.ONCE:
            request.frames = packed
        self._link.send(packed, buffers)
        if self._timer is None or now + timeout_s < self._due or session.state is not LinkState.UP:
            self._arm()
        return request

    async def _turn(self, actor: str, endpoint: str, timeout_s: float) -> float:
        """Waits for credit, behind those who came before; what is left of ``timeout_s``."""
        if self.dead is not None:
            raise self.dead
        credit = self.session.credit(actor)
        turn: asyncio.Future[None] = self._loop.create_future()
        credit.waiting.append(turn)
        deadline = self._loop.time() + timeout_s
        self.session.need(self._loop.time())
        self._arm()
        try:
            async with asyncio.timeout(timeout_s):
                await turn
            if self.dead is not None:  # since the turn was granted
                raise self.dead
            return max(deadline - self._loop.time(), 0.0)
        except BaseException as error:
            if turn in credit.waiting:
                credit.waiting.remove(turn)
            elif turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give_credit(credit.forgo())  # granted in the very moment in which it was given up
            if isinstance(error, TimeoutError):
                phase = f"waiting for credit, {credit.requests} requests are under way to it"
                raise CallTimeout(actor, endpoint, timeout_s, phase) from None
            raise

    def _give_credit(self, turns: Sequence[Token]) -> None:
        for turn in turns:
            if not turn.done():
                turn.set_result(None)

    def _abandon(self, request: Request[Token]) -> None:
        if self.session.abandon(request):
            self._send([Kind.CANCEL, request.id])

    def _send(self, envelope: Envelope) -> None:
        self._link.send(self._encoder.pack(envelope))

    # ------------------------------------------------------------------ being answered

    def received(self, header: codec.Bytes, body: codec.Bytes, buffers: Frames) -> None:
        """Raises RemoteProtocolError where the message is none of ours; nothing of it has been carried out then."""
        if header != self._header or self.session.epoch is None:
            node, epoch = codec.unpack_header(header)
            envelopes = codec.unpack_envelopes(body, buffers)
            if node == self.node and self.session.is_over(epoch):
                return  # it was under way when its sender was started anew
            decisions = self.session.heard(epoch)
            if self._header and header != self._header:
                self.serving.forget()
            self._header, self.serving.node = header, node
            if decisions is not None:
                self._carry_out(decisions)
        else:
            envelopes = codec.unpack_envelopes(body, buffers)
            self.session.heard(self.session.epoch)
        self._was_heard = True
        on = self._on
        for envelope in envelopes:
            on[envelope[0]](envelope)

    def _on_reply(self, envelope: Envelope) -> None:
        request, granted = self.session.settle(envelope[1])
        if granted:
            self._give_credit(granted)
        if request is not None and not request.token.done():  # type: ignore[union-attr]  # only one-way messages have none
            request.token.set_result(envelope[2])  # type: ignore[union-attr]

    def _on_error(self, envelope: Envelope) -> None:
        request_id = envelope[1]
        request, granted = self.session.settle(request_id)
        self._give_credit(granted)
        if request is None or request.token is None or request.token.done():
            return
        request.token.set_exception(_error_of(request, *envelope[2:]))

    def _on_item(self, envelope: Envelope) -> None:
        request = self.session.streaming(envelope[1])
        if request is not None and isinstance(request.token, StreamReader):
            request.token.push(envelope[2], envelope[3])

    def _on_done(self, envelope: Envelope) -> None:
        self._give_credit(self.session.done(envelope[2]))
        if self._told is not None:
            self._told.set()

    def _on_pong(self, envelope: Envelope) -> None:
        self._carry_out(self.session.pong(envelope[1], envelope[2]))

    def _on_refuse(self, envelope: Envelope) -> None:
        self.refused(envelope[2])

    def _on_bye(self, envelope: Envelope) -> None:
        self._left = True
        self._go_down("its system was closed")
        if self._incoming:
            self._home.peer_left(self._link)

    def _on_ping(self, envelope: Envelope) -> None:
        self.serving.send_worked_off()
        self._send([Kind.PONG, envelope[1], self.serving.ids()])

    # ------------------------------------------------------------------ the link and the time

    def connected(self) -> None:
        if self._down is not None:  # down and up again before anybody was told
            self._down.cancel()
            self._link_down("the connection was lost")
        self._left = False
        self._carry_out(self.session.connected())

    def disconnected(self, reason: str) -> None:
        if self._obituary is not None:
            self._go_down(reason, self._obituary)
        elif self._down is None:
            wait_s = OBITUARY_WAIT_S if self._home.obituary_follows(self.address) else 0.0
            self._down = self._loop.call_later(wait_s, self._link_down, reason)

    def _link_down(self, reason: str) -> None:
        self._down = None
        self._go_down(reason)

    def _go_down(self, reason: str, error: FlexmarlError | None = None) -> None:
        self._obituary = None
        self._carry_out(self.session.disconnected(self._loop.time(), reason), error)

    def refused(self, reason: str) -> None:
        """The peer does not talk to this side: everything that was asked of it fails."""
        self._carry_out(
            self.session.fail(reason), RemoteProtocolError(f"{self.address} refuses to talk: {reason}")
        )

    def unreachable(self, reason: str) -> None:
        """The wire says that no connection will come about."""
        self._carry_out(self.session.fail(reason))

    def fail(self, error: FlexmarlError, *, for_good: bool) -> None:
        """Why the peer's process ended is known. Not ``for_good``: it is being restarted."""
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
            self._obituary = error  # for when the wire notices

    def close(self) -> None:
        """This side leaves: says so, and ends what was asked of the peer."""
        self.dead = SystemClosed(f"{self._home.name} is closed")
        for handle in (self._timer, self._down):
            if handle is not None:
                handle.cancel()
        self._send([Kind.BYE, 0])
        name = self._home.name
        decisions = self.session.close(f"{name} was closed before they were known to be worked off")
        self._say_lost(decisions)
        for request in decisions.dead:
            _reject(request.token, SystemClosed(f"{name} closed during {request.actor}.{request.endpoint}"))
        for actor, turn in decisions.waiting:
            _reject(turn, SystemClosed(f"{name} closed while a call to {actor} waited for credit"))

    def _arm(self) -> None:
        due = self.session.wake_at()
        if due is None or (self._timer is not None and self._due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_at(due, self._wake)

    def _wake(self) -> None:
        self._timer, self._due = None, math.inf
        self._carry_out(self.session.advance(self._loop.time()))

    def _carry_out(self, decisions: Decisions[Token], error: FlexmarlError | None = None) -> None:
        """``error``: what those who wait are told, where it is not what the decision says."""
        is_up = self.session.state is LinkState.UP
        for request in decisions.expired:
            phase = "waiting for the reply" if is_up else f"waiting for a connection to {self.address}"
            _reject(request.token, CallTimeout(request.actor, request.endpoint, request.timeout_s, phase))
            self._send([Kind.CANCEL, request.id])
        for request in decisions.dead:
            _reject(request.token, error or self._death(request.actor, decisions.reason))
        for actor, turn in decisions.waiting:
            _reject(turn, error or self._death(actor, decisions.reason))
        self._say_lost(decisions)
        self._give_credit(decisions.granted)
        for request in decisions.repeat:
            if request.frames is not None:
                self._link.send(request.frames)
        for request_id in decisions.cancel:
            self._send([Kind.CANCEL, request_id])
        if decisions.ping is not None:
            self._send([Kind.PING, decisions.ping])
        if decisions.gone:
            if not is_up:  # nobody may act on what has failed here, however late
                self._link.forget_unsent()
            self.serving.end_streams()
        self._arm()
        if decisions.silent and self._link.drop():
            self._go_down(decisions.reason)

    def _say_lost(self, decisions: Decisions[Token]) -> None:
        if decisions.lost_tells:
            words, count = "one-way messages lost", decisions.lost_tells
            log.warning(words, count=count, peer=self.address, why=decisions.reason)
        if self._told is not None:
            self._told.set()

    def _death(self, actor: str, reason: str) -> ActorDead:
        if self.session.state is LinkState.CONNECTING:
            trouble = f": {self._link.trouble}" if self._link.trouble else ""
            return Unreachable(actor, f"{reason} ({self.address}{trouble})")
        return ActorDead(actor, f"{reason} ({self.address})", stopped=self._left)

    def was_heard(self) -> bool:
        """Whether anything came since the last time that this was asked, or is being served."""
        was_heard, self._was_heard = self._was_heard, False
        return was_heard or len(self.serving) > 0

    def statistics(self) -> PeerStatistics:
        session = self.session
        return PeerStatistics(
            self.node, self.address, session.state.value, len(self.serving), session.snapshot()
        )


def _error_of(
    request: Request[Token],
    kind: str,
    message: str,
    remote_traceback: str,
    declared: str,
    fields: dict[Any, Any],
) -> FlexmarlError:
    match kind:
        case Fault.DEAD:
            return ActorDead(request.actor, message)
        case Fault.PROTOCOL:
            return RemoteProtocolError(message)
        case Fault.CANCELLED | Fault.OVERTAKEN:
            return RemoteError(request.actor, request.endpoint, kind.removeprefix("!"), message, "")
    return RemoteError(request.actor, request.endpoint, kind, message, remote_traceback, declared, fields)


def _reject(token: Token | None, error: FlexmarlError) -> None:
    if token is not None and not token.done():
        token.set_exception(error)
