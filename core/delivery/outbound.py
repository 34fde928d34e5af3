"""Requests of this side to the actors of one peer, and the answers to them: calls, one-way messages, streams."""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ..call import Call
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
    SystemClosed,
)
from ..protocol import codec
from ..protocol.credit import CreditWaiter
from ..protocol.envelopes import Envelope, Fault, Kind
from ..protocol.open_requests import Callee, Request
from ..protocol.session import LinkState, Session
from ..signature import Signature
from ..wire.wire import Link
from .streams import StreamReader
from .unsent import Packed, Unsent

if TYPE_CHECKING:
    from .peers import Network

# A global name costs less than an enum's attribute.
_CALL, _TELL, _STREAM = Kind.CALL, Kind.TELL, Kind.STREAM
_UP = LinkState.UP

Waiter: TypeAlias = Call | StreamReader


class Outbound(ABC):
    """Calls actors of one peer. The connection, which derives from this, keeps the link and the time."""

    def __init__(self, network: "Network", link: Link, *, up: bool) -> None:
        self._network = network
        self._link = link
        self._loop = asyncio.get_running_loop()
        trusted = network.trusts(link.address)
        self.session: Session[Waiter] = Session(network.settings, up=up, trusted=trusted)
        self.dead: FlexmarlError | None = None
        """Set when the peer can't be called any more."""
        self._requests = self.session.requests
        self._trace_ids = network.trace_ids
        self._encoder = codec.Encoder()
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        """The time of ``_timer``."""
        self._tells_done: asyncio.Event | None = None
        self._sent = self._new_call(None)
        """The result of every ``tell`` that did not wait."""
        self._sent.set_result(None)

    @abstractmethod
    def _arm(self) -> None:
        """Sets the timer to the session's next work."""

    # ------------------------------------------------------------------ requests

    def callee(self, actor: str, endpoint: str, timeout_s: float) -> Callee:
        """For ``call``. Raises LocalProtocolError if the names are too long."""
        return self._requests.callee(_CALL._value_, actor, endpoint, timeout_s)

    def call(
        self, callee: Callee, args: Sequence[Any], kwargs: Mapping[str, Any], signature: Signature | None
    ) -> Call:
        """The endpoint's result; see ``ActorRef.within`` for the errors."""
        call = self._new_call(signature)
        try:
            packed = self._pack(callee, args, kwargs)
        except LocalProtocolError as error:
            call.set_exception(error)
            return call
        if self.dead is None and callee.credit.take(packed[2]):
            call.request_id = self._send_request(callee, packed, callee.timeout_s, call)
        else:
            self._wait_credit(Unsent(call, callee, packed))
        return call

    def tell(
        self, actor: str, endpoint: str, args: Sequence[Any], kwargs: Mapping[str, Any], timeout_s: float
    ) -> Call:
        """Done when the message has left, or is queued for a peer that is being connected."""
        try:
            callee = self._requests.callee(_TELL._value_, actor, endpoint, timeout_s)
            packed = self._pack(callee, args, kwargs)
        except LocalProtocolError as error:
            call = self._new_call(None)
            call.set_exception(error)
            return call
        if self.dead is None and callee.credit.take(packed[2]):
            self._send_tell(callee, packed)
            return self._sent
        call = self._new_call(None)
        self._wait_credit(Unsent(call, callee, packed))
        return call

    def has_tells(self) -> bool:
        """True if a one-way message waits for credit, or is not known to be processed."""
        return self._requests.has_tells() or any(
            isinstance(unsent, Unsent) and unsent.callee.kind is _TELL for unsent in self._requests.waiting()
        )

    async def wait_tells_done(self) -> None:
        """Returns when every one-way message has been processed, or is known to be lost."""
        self._tells_done = asyncio.Event()
        while self.dead is None and self.has_tells():
            self._tells_done.clear()
            await self._tells_done.wait()

    def tell_nowait(self, actor: str, endpoint: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises NoCredit if ``tell`` would wait."""
        if self.dead is not None:
            raise self.dead
        callee = self._requests.callee(_TELL._value_, actor, endpoint, 0.0)
        packed, credit = self._pack(callee, args, kwargs), callee.credit
        if not credit.take(packed[2]):
            raise NoCredit(actor, endpoint, credit.requests, credit.size_bytes)
        self._send_tell(callee, packed)

    async def stream(
        self,
        actor: str,
        endpoint: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout_s: float,
        signature: Signature | None,
    ) -> AsyncIterator[Any]:
        callee = self._requests.callee(_STREAM._value_, actor, endpoint, timeout_s)
        packed = self._pack(callee, args, kwargs)
        reader, sent = StreamReader(actor), self._new_call(None)
        if self.dead is None and callee.credit.take(packed[2]):
            request_id = self._send_request(callee, packed, timeout_s, reader)
        else:
            self._wait_credit(Unsent(sent, callee, packed, reader))
            await sent
            request_id = sent.request_id
        window = self._network.settings.stream_window
        taken = 0
        try:
            while True:
                if taken and not reader.holds_items():  # the sender may lack room for another, however large
                    self._send([Kind.GRANT, request_id, taken])
                    taken = 0
                try:
                    item = await reader.wait_item(timeout_s)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise CallTimeout(actor, endpoint, timeout_s, "waiting for the next item") from None
                except RemoteError as error:
                    declared = self._declared(error, signature)
                    if declared is error:
                        raise
                    raise declared from error
                taken += 1
                if taken >= max(1, window // 2):
                    self._send([Kind.GRANT, request_id, taken])
                    taken = 0
                yield item if signature is None else signature.result(item, self._network)
        finally:
            self._abandon(request_id)

    def _declared(self, error: RemoteError, signature: Signature | None) -> Exception:
        """The error of the class that the caller's signature declares for ``error``; ``error`` itself if none is."""
        return error if signature is None else signature.errors.from_wire(error, self._network)

    def _new_call(self, signature: Signature | None) -> Call:
        call = Call(loop=self._loop)
        call.owner, call.signature, call.unsent, call.request_id = self, signature, None, 0
        return call

    def _pack(self, callee: Callee, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Packed:
        """A request as it is when it is made: it may have to wait for credit."""
        delivery = current_delivery.get()
        trace_id = next(self._trace_ids) if delivery is None else delivery.trace_id
        encoder = self._encoder
        try:
            item = encoder.pack_items((args, kwargs, trace_id))
        except LocalProtocolError as error:
            message = f"arguments of {callee.actor}.{callee.endpoint}: {error}"
            raise LocalProtocolError(message) from error.__cause__
        if not encoder.buffers:
            return item, (), len(item)
        buffers = encoder.take_buffers()
        size_bytes = len(item) + sum(buffer.nbytes for buffer in buffers)
        return item, codec.unchanging(buffers) if callee.kind is _TELL else buffers, size_bytes

    def _send_tell(self, callee: Callee, packed: Packed) -> None:
        """Sends a one-way message that has taken credit."""
        item, buffers, size_bytes = packed
        self._link.send_item(callee, self._requests.tell(callee.credit, size_bytes), item, buffers)
        session = self.session
        if session.next_tick is None or session.state is not _UP:
            session.need(self._loop.time())
            self._arm()

    def _send_request(
        self, callee: Callee, packed: Packed, rest_s: float, waiter: Call | StreamReader
    ) -> int:
        """Sends a request that has taken credit; returns its id. ``rest_s``: until its deadline."""
        session, requests = self.session, self._requests
        item, buffers, size_bytes = packed
        deadline = self._loop.time() + rest_s if callee.is_call else math.inf
        request_id = requests.add(deadline, callee, waiter, size_bytes).id
        if callee.is_call:
            self._link.send_item(callee, request_id, item, buffers)
        else:
            further = self._encoder.pack_items((session.settings.stream_window,))
            self._link.send(callee.pack(request_id, (item,), further), buffers)
        if session.next_tick is None or session.state is not _UP:
            session.need(self._loop.time())
            self._arm()
        elif deadline < self._due:
            self._arm()
        return request_id

    # ------------------------------------------------------------------ credit

    def _wait_credit(self, unsent: Unsent) -> None:
        """Sends the request when it gets credit, behind those that wait already."""
        if self.dead is not None:
            unsent.call.set_exception(self.dead)
            return
        now = self._loop.time()
        unsent.call.unsent = unsent
        unsent.deadline = now + unsent.callee.timeout_s
        if unsent.deadline < math.inf:
            unsent.timer = self._loop.call_at(unsent.deadline, self._credit_is_late, unsent)
        unsent.callee.credit.waiting.append(unsent)
        self.session.need(now)
        self._arm()

    def _credit_is_late(self, unsent: Unsent) -> None:
        if not unsent.done():
            callee, credit = unsent.callee, unsent.callee.credit
            credit.waiting.remove(unsent)
            phase = f"waiting for credit, {credit.requests} requests are under way to it"
            unsent.set_exception(CallTimeout(callee.actor, callee.endpoint, callee.timeout_s, phase))

    def _give_credit(self, granted: list[CreditWaiter]) -> None:
        """Sends the requests that hold credit now."""
        for unsent in granted:
            assert isinstance(unsent, Unsent), "only these wait for credit"
            unsent.settle()
            call, callee, rest_s = unsent.call, unsent.callee, max(unsent.deadline - self._loop.time(), 0.0)
            if callee.kind is _TELL:
                self._send_tell(callee, unsent.packed)
                call.set_result(None)
                continue
            call.request_id = self._send_request(callee, unsent.packed, rest_s, unsent.reader or call)
            if callee.kind is _STREAM:
                call.set_result(None)

    # ------------------------------------------------------------------ callers that give up

    def give_up(self, call: Call) -> None:
        unsent: Unsent | None = call.unsent
        if unsent is None:
            self._abandon(call.request_id)
        else:
            unsent.settle()
            unsent.callee.credit.waiting.remove(unsent)

    def _abandon(self, request_id: int) -> None:
        request = self._requests.get(request_id)
        if request is not None and self._requests.abandon(request):
            self._send([Kind.CANCEL, request_id])

    def _send(self, envelope: Envelope) -> None:
        self._link.send(self._encoder.pack(envelope))

    # ------------------------------------------------------------------ answers

    def _on_replies(self, envelope: Envelope) -> None:
        values = envelope[2]
        requests, granted = self._requests.answered(envelope[1], len(values))
        if granted:
            self._give_credit(granted)
        for request, value in zip(requests, values, strict=True):
            waiter = None if request is None else request.waiter
            if isinstance(waiter, Call):
                if not waiter.done():
                    signature = waiter.signature
                    try:
                        waiter.set_result(
                            value if signature is None else signature.result(value, self._network)
                        )
                    except RemoteProtocolError as error:
                        waiter.set_exception(error)
            elif isinstance(waiter, StreamReader):
                waiter.set_result(value)

    def _on_error(self, envelope: Envelope) -> None:
        (request,), granted = self._requests.answered(envelope[1], 1)
        self._give_credit(granted)
        if request is None:
            return
        error = _error_of(request, *envelope[2:])
        if (
            isinstance(error, ActorDead)
            and self._network.closing
            and self._link.address == self._network.address
        ):
            error = self._closed_during(request)
        if isinstance(error, RemoteError) and isinstance(request.waiter, Call):
            declared = self._declared(error, request.waiter.signature)
            if declared is not error:
                declared.__cause__ = error
            reject(request.waiter, declared)
        else:
            reject(request.waiter, error)

    def _closed_during(self, request: Request[Waiter]) -> SystemClosed:
        return SystemClosed(f"{self._network.name} closed during {request.actor}.{request.endpoint}")

    def _on_item(self, envelope: Envelope) -> None:
        request = self._requests.get(envelope[1])
        if request is not None and isinstance(request.waiter, StreamReader):
            request.waiter.push(envelope[2], envelope[3])

    def _on_done(self, envelope: Envelope) -> None:
        self._give_credit(self._requests.done(envelope[2]))
        if self._tells_done is not None:
            self._tells_done.set()


def _error_of(
    request: Request[Waiter],
    kind: str,
    message: str,
    remote_traceback: str,
    declared: str,
    fields: dict[Any, Any],
) -> FlexmarlError:
    match kind:
        case Fault.DEAD:
            return ActorDead(request.actor, message, reported=True)
        case Fault.PROTOCOL:
            return RemoteProtocolError(message)
        case Fault.NOT_ALLOWED:
            return CallNotAllowed(request.actor, request.endpoint)
        case Fault.EXPIRED:  # this loop was blocked, and has not looked at its own timer yet
            return CallTimeout(request.actor, request.endpoint, request.callee.timeout_s)
        case Fault.CANCELLED | Fault.OUT_OF_ORDER:
            return RemoteError(request.actor, request.endpoint, kind.removeprefix("!"), message, "")
    return RemoteError(request.actor, request.endpoint, kind, message, remote_traceback, declared, fields)


def reject(waiter: Waiter | CreditWaiter | None, error: Exception) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_exception(error)
