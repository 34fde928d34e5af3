"""Requests of this side to the actors of one peer, and the answers to them: calls, one-way messages, streams."""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from ..call_context import current_delivery
from ..errors import (
    ActorDead,
    CallNotAllowed,
    CallTimeout,
    FlexmarlError,
    LocalProtocolError,
    NoCredit,
    RemoteError,
    RemoteProtocolError,
)
from ..protocol import codec
from ..protocol.envelopes import Envelope, Fault, Kind
from ..protocol.open_requests import Request
from ..protocol.session import LinkState, Session
from ..signature import Signature
from ..wire.wire import Link
from .requests import Home
from .streams import StreamReader


class ReplyWaiter(Protocol):
    """The waiter for a reply: a future or a stream reader."""

    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...


class Caller(ABC):
    """Calls actors of one peer. The connection, which derives from this, keeps the link and the time."""

    def __init__(self, home: Home, link: Link, *, up: bool) -> None:
        self._home = home
        self._link = link
        self._loop = asyncio.get_running_loop()
        trusted = home.trusts(link.address)
        self.session: Session[ReplyWaiter] = Session(home.settings, up=up, trusted=trusted)
        self.dead: FlexmarlError | None = None
        """Set when the peer can't be called any more."""
        self._requests = self.session.requests
        self._trace_ids = home.trace_ids
        self._number = next(home.link_numbers)
        self._encoder = codec.Encoder()
        self._whole = codec.Encoder(inline_bytes=codec.MAX_BODY_BYTES)
        """For messages that may be sent again: their buffers are inside."""
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        """The time of ``_timer``."""
        self._tells_done: asyncio.Event | None = None

    @abstractmethod
    def _arm(self) -> None:
        """Sets the timer to the session's next work."""

    # ------------------------------------------------------------------ requests

    async def call(
        self,
        actor: str,
        endpoint: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout_s: float,
        signature: Signature | None,
    ) -> Any:
        """The endpoint's result; see ``ActorRef.within`` for the errors."""
        if self.dead is not None or not self._requests.credit(actor).take():
            timeout_s = await self._wait_credit(actor, endpoint, timeout_s)
        kind = Kind.IDEMPOTENT_CALL if signature is not None and signature.idempotent else Kind.CALL
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
        if self.dead is not None or not self._requests.credit(actor).take():
            await self._wait_credit(actor, endpoint, timeout_s)
        self._request(Kind.TELL, actor, endpoint, timeout_s, args, kwargs, None)

    async def wait_tells_done(self) -> None:
        """Returns when every one-way message has been processed, or is known to be lost."""
        self._tells_done = asyncio.Event()
        while self.dead is None and self._requests.has_tells():
            self._tells_done.clear()
            await self._tells_done.wait()

    def tell_nowait(self, actor: str, endpoint: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises NoCredit if ``tell`` would wait."""
        if self.dead is not None:
            raise self.dead
        credit = self._requests.credit(actor)
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
        if self.dead is not None or not self._requests.credit(actor).take():
            await self._wait_credit(actor, endpoint, timeout_s)
        window = self._home.settings.stream_window
        reader = StreamReader(actor)
        request = self._request(Kind.STREAM, actor, endpoint, timeout_s, args, kwargs, reader)
        taken = 0
        try:
            while True:
                if taken and not reader.holds_items():  # the sender may lack room for another, however large
                    self._send([Kind.GRANT, request.id, taken])
                    taken = 0
                try:
                    item = await reader.wait_item(timeout_s)
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
        waiter: ReplyWaiter | None,
    ) -> Request[ReplyWaiter]:
        session, requests = self.session, self._requests
        now = self._loop.time()
        delivery = current_delivery.get()
        trace_id = next(self._trace_ids) if delivery is None else delivery.trace_id
        request_id = requests.next_id()
        fields: tuple[Any, ...] = (
            kind, request_id, actor, endpoint, float(timeout_s), args, kwargs, trace_id,
        )  # fmt: skip
        if kind is Kind.IDEMPOTENT_CALL:
            fields += (requests.acknowledged_below(request_id), self._number)
        elif kind is Kind.STREAM:
            fields += (session.settings.stream_window,)
        try:
            packed = (self._whole if kind is Kind.IDEMPOTENT_CALL else self._encoder).pack(fields)
        except BaseException as error:
            self._give_credit(requests.credit(actor).forgo())
            if isinstance(error, LocalProtocolError):
                raise LocalProtocolError(f"arguments of {actor}.{endpoint}: {error}") from error.__cause__
            raise
        size_bytes = len(packed)
        buffers = self._encoder.take_buffers()
        if buffers and kind is Kind.TELL:
            buffers = codec.unchanging(buffers)
        for buffer in buffers:
            size_bytes += buffer.nbytes
        request = requests.add(now, request_id, kind, actor, endpoint, timeout_s, waiter, size_bytes)
        credit = requests.credit(actor)
        if credit.waiting:
            self._give_credit(credit.grant())
        if kind is Kind.IDEMPOTENT_CALL:
            request.frames = packed
        self._link.send(packed, buffers)
        if session.next_tick is None or session.state is not LinkState.UP:
            session.need(now)
            self._arm()
        elif self._timer is None or now + timeout_s < self._due:
            self._arm()
        return request

    async def _wait_credit(self, actor: str, endpoint: str, timeout_s: float) -> float:
        """Waits for credit behind earlier waiters; returns the rest of ``timeout_s``."""
        if self.dead is not None:
            raise self.dead
        credit = self._requests.credit(actor)
        waiter: asyncio.Future[None] = self._loop.create_future()
        credit.waiting.append(waiter)
        deadline = self._loop.time() + timeout_s
        self.session.need(self._loop.time())
        self._arm()
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
            if self.dead is not None:  # it died after the credit was granted
                raise self.dead
            return max(deadline - self._loop.time(), 0.0)
        except BaseException as error:
            if waiter in credit.waiting:
                credit.waiting.remove(waiter)
            elif waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._give_credit(credit.forgo())  # granted in the same moment in which the waiter gave up
            if isinstance(error, TimeoutError):
                phase = f"waiting for credit, {credit.requests} requests are under way to it"
                raise CallTimeout(actor, endpoint, timeout_s, phase) from None
            raise

    def _give_credit(self, waiters: Sequence[ReplyWaiter]) -> None:
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _abandon(self, request: Request[ReplyWaiter]) -> None:
        if self._requests.abandon(request):
            self._send([Kind.CANCEL, request.id])

    def _send(self, envelope: Envelope) -> None:
        self._link.send(self._encoder.pack(envelope))

    # ------------------------------------------------------------------ answers

    def _on_reply(self, envelope: Envelope) -> None:
        request, granted = self._requests.finish(envelope[1])
        if granted:
            self._give_credit(granted)
        if request is not None and not request.waiter.done():  # type: ignore[union-attr]  # only one-way messages have none
            request.waiter.set_result(envelope[2])  # type: ignore[union-attr]

    def _on_error(self, envelope: Envelope) -> None:
        request, granted = self._requests.finish(envelope[1])
        self._give_credit(granted)
        if request is not None:
            reject(request.waiter, _error_of(request, *envelope[2:]))

    def _on_item(self, envelope: Envelope) -> None:
        request = self._requests.get(envelope[1])
        if request is not None and isinstance(request.waiter, StreamReader):
            request.waiter.push(envelope[2], envelope[3])

    def _on_done(self, envelope: Envelope) -> None:
        self._give_credit(self._requests.done(envelope[2]))
        if self._tells_done is not None:
            self._tells_done.set()


def _error_of(
    request: Request[ReplyWaiter],
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
        case Fault.NOT_ALLOWED:
            return CallNotAllowed(request.actor, request.endpoint)
        case Fault.CANCELLED | Fault.OUT_OF_ORDER:
            return RemoteError(request.actor, request.endpoint, kind.removeprefix("!"), message, "")
    return RemoteError(request.actor, request.endpoint, kind, message, remote_traceback, declared, fields)


def reject(waiter: ReplyWaiter | None, error: FlexmarlError) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_exception(error)
