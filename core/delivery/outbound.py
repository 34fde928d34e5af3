"""Requests of this side to the actors of one peer, and the answers to them: calls, one-way messages, streams.

See the top of ``connection.py`` for the way of a call, out and back.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

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
from ..signature import Signature
from ..telemetry import get_logger
from .streams import StreamReader

if TYPE_CHECKING:
    from ..protocol.session import Effects
    from .connection import Connection

log = get_logger(__name__)

# A global name costs less than an enum's attribute, and hashing a number less than hashing an enum's member.
_TELL, _STREAM = Kind.TELL, Kind.STREAM
_CALL_NUMBER, _TELL_NUMBER, _STREAM_NUMBER = int(Kind.CALL), int(Kind.TELL), int(Kind.STREAM)

Packed: TypeAlias = tuple[bytes, Sequence[memoryview], int]
"""A request: the fields that are its own, its buffers, and the size of both in bytes."""


class Call(asyncio.Future[Any], Coroutine[Any, Any, Any]):
    """The result of a call, which was sent when it was made.

    A future, so that ``gather``, ``wait_for`` and ``shield`` make no task for it, and a coroutine too, because
    ``create_task`` and ``TaskGroup.create_task`` take nothing else. ``asyncio.wait`` refuses coroutines: give it tasks.
    As with any future, cancelling an awaiter cancels the call, and the event loop logs the error of a call that is
    never awaited.
    """

    __slots__ = ("outbound", "request_id", "signature", "unsent")

    outbound: "Outbound"
    signature: Signature | None
    """The endpoint's, for the result; None if it is unknown."""
    request_id: int
    """The request's, once it has been sent."""
    unsent: "Unsent | None"
    """The request while it waits for credit."""

    def cancel(self, msg: Any = None) -> bool:
        """Cancels the call at the callee too."""
        cancelled = super().cancel(msg)
        if cancelled:
            self.outbound.cancel_call(self)
        return cancelled

    # ------------------------------------------------------------------ as a coroutine, which waits for the future

    def send(self, value: Any, /) -> Any:
        """See ``Coroutine``."""
        return self.__await__().send(value)

    def throw(self, *error: Any) -> Any:
        """See ``Coroutine``; cancels the call."""
        self.cancel()
        return self.__await__().throw(*error)

    def close(self) -> None:
        """See ``Coroutine``; cancels the call."""
        self.cancel()


def failed_call(error: FlexmarlError) -> Call:
    """A call that could not be sent: awaiting it raises ``error``."""
    call = Call(loop=asyncio.get_running_loop())
    call.set_exception(error)
    return call


Waiter: TypeAlias = Call | StreamReader


class Unsent:
    """A request that waits for credit, packed already. ``reader``: of a stream's items."""

    __slots__ = ("call", "callee", "deadline", "packed", "reader", "timer")

    def __init__(
        self, call: Call, callee: Callee, packed: Packed, reader: StreamReader | None = None
    ) -> None:
        """``call``: done when its reply arrives; in case of a message without a reply, or a stream, when it is sent."""
        self.call = call
        self.callee = callee
        self.packed = packed
        self.reader = reader
        self.deadline = math.inf
        self.timer: asyncio.TimerHandle | None = None

    @property
    def size_bytes(self) -> int:
        """See ``CreditWaiter``."""
        return self.packed[2]

    def done(self) -> bool:
        """See ``CreditWaiter``."""
        return self.call.done()

    def set_exception(self, error: Exception, /) -> None:
        """See ``CreditWaiter``."""
        self.stop_waiting()
        self.call.set_exception(error)

    def stop_waiting(self) -> None:
        """Cancels its timer. Its owner removes it from the queue for credit."""
        self.call.unsent = None
        if self.timer is not None:
            self.timer.cancel()


class Outbound:
    """The outbound half of a connection.

    It is one class because a request is sent, waits for credit, is cancelled and is answered with the same open
    requests and credit.
    """

    def __init__(self, connection: "Connection") -> None:
        self.dead: FlexmarlError | None = None
        """Set when the peer can't be called any more."""
        self._connection = connection
        self._network = connection.network
        self._link = connection.link
        self._need_peer = connection.need_peer
        self._loop = connection.loop
        self._encoder = connection.encoder
        self._requests = connection.session.requests
        self._trace_ids = connection.network.trace_ids
        self._tells_done: asyncio.Event | None = None
        # The result of every ``tell`` that did not wait: a future for each would make messages a quarter slower.
        self._sent = self._new_call(None)
        self._sent.set_result(None)

    # ------------------------------------------------------------------ requests

    def callee(self, actor: str, endpoint: str, timeout_s: float) -> Callee:
        """For ``call``. Raises LocalProtocolError if the names are too long."""
        return self._requests.callee(_CALL_NUMBER, actor, endpoint, timeout_s)

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
            callee = self._requests.callee(_TELL_NUMBER, actor, endpoint, timeout_s)
            packed = self._pack(callee, args, kwargs)
        except LocalProtocolError as error:
            return failed_call(error)
        if self.dead is None and callee.credit.take(packed[2]):
            self._send_tell(callee, packed)
            return self._sent
        call = self._new_call(None)
        self._wait_credit(Unsent(call, callee, packed))
        return call

    def tell_nowait(self, actor: str, endpoint: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises NoCredit if ``tell`` would wait, LocalProtocolError, or the reason for which the peer is dead."""
        if self.dead is not None:
            raise self.dead
        callee = self._requests.callee(_TELL_NUMBER, actor, endpoint, 0.0)
        packed, credit = self._pack(callee, args, kwargs), callee.credit
        if not credit.take(packed[2]):
            raise NoCredit(actor, endpoint, credit.requests, credit.size_bytes)
        self._send_tell(callee, packed)

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

    async def stream(
        self,
        actor: str,
        endpoint: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout_s: float,
        signature: Signature | None,
    ) -> AsyncIterator[Any]:
        """The items of a streaming endpoint, each within ``timeout_s``; see ``ActorRef.within`` for the errors."""
        callee = self._requests.callee(_STREAM_NUMBER, actor, endpoint, timeout_s)
        packed = self._pack(callee, args, kwargs)
        reader, sent = StreamReader(actor), self._new_call(None)
        if self.dead is None and callee.credit.take(packed[2]):
            request_id = self._send_request(callee, packed, timeout_s, reader)
        else:
            self._wait_credit(Unsent(sent, callee, packed, reader))
            await sent
            request_id = sent.request_id
        window = self._network.settings.stream_window
        ungranted = 0
        try:
            while True:
                # Below, half a window is granted at a time. But large items fill the window's bytes before its number:
                # a reader that would wait now grants all it has taken, or both sides would wait for each other.
                if ungranted and not reader.holds_items():
                    self._connection.send([Kind.GRANT, request_id, ungranted])
                    ungranted = 0
                try:
                    item = await reader.wait_item(timeout_s)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise CallTimeout(actor, endpoint, timeout_s, "waiting for the next item") from None
                except RemoteError as error:
                    declared = self._rebuild_error(error, signature)
                    if declared is error:
                        raise
                    raise declared from error
                ungranted += 1
                if ungranted >= max(1, window // 2):
                    self._connection.send([Kind.GRANT, request_id, ungranted])
                    ungranted = 0
                yield item if signature is None else signature.result(item, self._network)
        finally:
            self._abandon(request_id)

    def _rebuild_error(self, error: RemoteError, signature: Signature | None) -> Exception:
        """The error of the class that the caller's signature declares for ``error``; ``error`` itself if none is."""
        return error if signature is None else signature.errors.from_wire(error, self._network)

    def _new_call(self, signature: Signature | None) -> Call:
        # No constructor: ``asyncio.Future`` is made in C, and an ``__init__`` in Python takes three times as long.
        call = Call(loop=self._loop)
        call.outbound, call.signature, call.unsent, call.request_id = self, signature, None, 0
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
        # The caller of a call or a stream leaves its arrays alone until the answer. After ``tell`` it may write to them
        # at once, while libzmq still reads them.
        return item, codec.unchanging(buffers) if callee.kind is _TELL else buffers, size_bytes

    def _send_tell(self, callee: Callee, packed: Packed) -> None:
        """Sends a one-way message that has taken credit."""
        item, buffers, size_bytes = packed
        self._link.send_item(callee, self._requests.tell(callee.credit, size_bytes), item, buffers)
        self._need_peer()

    def _send_request(
        self, callee: Callee, packed: Packed, rest_s: float, waiter: Call | StreamReader
    ) -> int:
        """Sends a request that has taken credit; returns its id. ``rest_s``: until its deadline."""
        item, buffers, size_bytes = packed
        deadline = self._loop.time() + rest_s if callee.is_call else math.inf
        request_id = self._requests.add(deadline, callee, waiter, size_bytes).id
        if callee.is_call:
            self._link.send_item(callee, request_id, item, buffers)
        else:
            further = self._encoder.pack_items((self._network.settings.stream_window,))
            self._link.send(callee.pack(request_id, (item,), further), buffers)
        self._need_peer(deadline)
        return request_id

    # ------------------------------------------------------------------ credit

    def _wait_credit(self, unsent: Unsent) -> None:
        """Sends the request when it gets credit, behind those that wait already."""
        if self.dead is not None:
            unsent.call.set_exception(self.dead)
            return
        unsent.call.unsent = unsent
        unsent.deadline = self._loop.time() + unsent.callee.timeout_s
        if unsent.deadline < math.inf:
            # A timer of its own: the session knows requests by their ids, and this one has an id only when it is sent.
            unsent.timer = self._loop.call_at(unsent.deadline, self._credit_is_late, unsent)
        unsent.callee.credit.waiting.append(unsent)
        self._need_peer()

    def _credit_is_late(self, unsent: Unsent) -> None:
        if not unsent.done():
            callee, credit = unsent.callee, unsent.callee.credit
            credit.waiting.remove(unsent)
            phase = f"waiting for credit, {credit.requests} requests are under way to it"
            unsent.set_exception(CallTimeout(callee.actor, callee.endpoint, callee.timeout_s, phase))

    def send_granted(self, granted: Iterable[CreditWaiter]) -> None:
        """Sends the requests that hold credit now."""
        for unsent in granted:
            assert isinstance(unsent, Unsent), "only these wait for credit"
            unsent.stop_waiting()
            call, callee, rest_s = unsent.call, unsent.callee, max(unsent.deadline - self._loop.time(), 0.0)
            if callee.kind is _TELL:
                self._send_tell(callee, unsent.packed)
                call.set_result(None)
                continue
            call.request_id = self._send_request(callee, unsent.packed, rest_s, unsent.reader or call)
            if callee.kind is _STREAM:
                call.set_result(None)

    # ------------------------------------------------------------------ answers

    def on_replies(self, envelope: Envelope) -> None:
        """The results of a run of calls, or the end of a stream."""
        values = envelope[2]
        requests, granted = self._requests.answered(envelope[1], len(values))
        if granted:
            self.send_granted(granted)
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

    def on_error(self, envelope: Envelope) -> None:
        """An endpoint raised, or the peer's runtime refuses a request."""
        (request,), granted = self._requests.answered(envelope[1], 1)
        self.send_granted(granted)
        if request is None:
            return
        error = _error_of(request, *envelope[2:])
        if (
            isinstance(error, ActorDead)
            and self._network.closing
            and self._link.address == self._network.address
        ):
            # The mailboxes of this system end first, and answer as those of a dead actor do.
            error = self._closed_during(request)
        if isinstance(error, RemoteError) and isinstance(request.waiter, Call):
            declared = self._rebuild_error(error, request.waiter.signature)
            if declared is not error:
                declared.__cause__ = error
            _reject(request.waiter, declared)
        else:
            _reject(request.waiter, error)

    def on_item(self, envelope: Envelope) -> None:
        """An item of a stream."""
        request = self._requests.get(envelope[1])
        if request is not None and isinstance(request.waiter, StreamReader):
            request.waiter.push(envelope[2], envelope[3])

    def on_done(self, envelope: Envelope) -> None:
        """One-way messages that have been processed."""
        self.send_granted(self._requests.done(envelope[2]))
        if self._tells_done is not None:
            self._tells_done.set()

    # ------------------------------------------------------------------ requests that get no answer

    def cancel_call(self, call: Call) -> None:
        """The caller has given up: notifies the callee, unless the request still waits for credit."""
        unsent = call.unsent
        if unsent is None:
            self._abandon(call.request_id)
        else:
            unsent.stop_waiting()
            unsent.callee.credit.waiting.remove(unsent)

    def _abandon(self, request_id: int) -> None:
        request = self._requests.get(request_id)
        if request is not None and self._requests.abandon(request):
            self._connection.send([Kind.CANCEL, request_id])

    def expire(self, requests: Iterable[Request[Waiter]], phase: str) -> None:
        """Their deadlines have passed: raises CallTimeout in their waiters, and cancels them at the callee."""
        for request in requests:
            callee = request.callee
            _reject(request.waiter, CallTimeout(callee.actor, callee.endpoint, callee.timeout_s, phase))
            self._connection.send([Kind.CANCEL, request.id])

    def fail(self, effects: "Effects[Waiter]", error_for: Callable[[str], FlexmarlError]) -> None:
        """Fails the requests that the peer will not answer. ``error_for``: makes the error, from the actor's name."""
        for request in effects.dead:
            _reject(request.waiter, error_for(request.actor))
        for actor, waiter in effects.waiting:
            _reject(waiter, error_for(actor))
        self._log_lost(effects)

    def close(self, effects: "Effects[Waiter]") -> None:
        """As ``fail``, when this side leaves: the errors name what was interrupted."""
        for request in effects.dead:
            _reject(request.waiter, self._closed_during(request))
        for actor, waiter in effects.waiting:
            text = f"{self._network.name} closed while a call to {actor} waited for credit"
            _reject(waiter, SystemClosed(text))
        self._log_lost(effects)

    def _closed_during(self, request: Request[Waiter]) -> SystemClosed:
        return SystemClosed(f"{self._network.name} closed during {request.actor}.{request.endpoint}")

    def _log_lost(self, effects: "Effects[Waiter]") -> None:
        if effects.lost_tells:
            log.warning(
                "one-way messages lost",
                count=effects.lost_tells, peer=self._link.address, why=effects.reason,
            )  # fmt: skip
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


def _reject(waiter: Waiter | CreditWaiter | None, error: Exception) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_exception(error)
