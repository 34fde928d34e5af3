"""Requests of one peer to the actors of this side: each becomes a ``Delivery`` for an actor's mailbox, which passes its
answer to ``answer``, ``answer_error`` or ``answer_fault``.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from ..base.texts import escaped, traceback_of
from ..errors import LocalProtocolError, origin_of
from ..protocol import codec
from ..protocol.declared_errors import DeclaredErrors
from ..protocol.envelopes import Envelope, Fault, Kind
from ..protocol.lease import Lease
from ..protocol.messages import REPLIES
from ..protocol.session import Admission
from ..telemetry import BoundedLog, get_logger
from .mailbox import Delivery

if TYPE_CHECKING:
    from .connection import Connection

log = get_logger(__name__)

_TELL = int(Kind.TELL)  # comparing with an enum's member costs three times as much
# Answers up to this size are not counted by ``ReplyWindow``.
SMALL_BYTES = 4096
# A mark that a peer has not confirmed is sent again after this time, then after twice as long, up to a heartbeat.
_MARK_AGAIN_S = 0.05
# None, packed: the most frequent result.
_NONE, _NO_BUFFERS = b"\xc0", list[memoryview]()
# The id and the fields of a request in a run.
_Item: TypeAlias = tuple[int, Any, dict[Any, Any], int]
# The caller gets at most this many characters of an error's message, and the last ones of its traceback.
_TEXT_LIMIT = 2**16


class ReplyWindow:
    """Bounds the large answers that the peer has not confirmed to have received, by marks that it returns. Sans-I/O.

    Answers of at most ``SMALL_BYTES`` are not counted: the window of requests bounds them. After each quarter of the
    window a mark is sent. Messages are in order, so a mark that came back confirms all before it, and a peer that reads
    is never waited for. A peer that does not read (it is frozen, say) gets a window of answers, no more.
    """

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._marks: deque[tuple[int, int, float]] = deque()
        """Marks under way: their number, the bytes that were sent between the one before and each, and its time."""
        self._last_mark = 0
        self._since_mark = 0
        self._unconfirmed = 0

    def sent(self, size_bytes: int) -> bool:
        """An answer was sent; True if it is time for a mark."""
        self._unconfirmed += size_bytes
        self._since_mark += size_bytes
        return 4 * self._since_mark >= self._window_bytes

    def mark(self, now: float) -> int:
        """A number, from 1, to be sent to the peer, which returns it."""
        # A mark that is sent again takes the place of the one before: a silent peer costs no memory.
        size_bytes, self._since_mark = self._since_mark, 0
        if not size_bytes and self._marks:  # it stands for the one before too, which may have been lost
            size_bytes = self._marks.pop()[1]
        self._last_mark += 1
        self._marks.append((self._last_mark, size_bytes, now))
        return self._last_mark

    def confirmed(self, mark: int) -> float | None:
        """The peer has received all that was sent before ``mark``. Marks before it may have been lost. Returns the time
        of the last mark that is confirmed by this one; None if it confirms no mark."""
        sent_at = None
        while self._marks and self._marks[0][0] <= mark:
            _, size_bytes, sent_at = self._marks.popleft()
            self._unconfirmed -= size_bytes
        return sent_at

    @property
    def is_full(self) -> bool:
        """True if a whole window of answers is not confirmed."""
        return self._unconfirmed >= self._window_bytes


class Inbound:
    """The inbound half of a connection: the requests of the peer that are in service.

    It is one class because a request's admission, answer and cancellation all use the same open requests and marks.
    """

    def __init__(self, connection: "Connection") -> None:
        network = connection.network
        self.window_bytes = network.settings.window_bytes
        self._now = network.now
        self._connection = connection
        self._network = network
        self._link = connection.link
        self._session = connection.session
        self._encoder = connection.encoder
        self._error_encoder = codec.Encoder(inline_bytes=codec.MAX_BODY_BYTES)
        """Puts the buffers of an error's fields into its envelope."""
        self._loop = connection.loop
        self._open: dict[int, Delivery] = {}
        self._refusals = BoundedLog(log)
        self._done: list[int] = []
        """One-way messages that were processed, as ranges of ids; not reported yet."""
        self._replies = ReplyWindow(network.settings.window_bytes)
        self.lease = Lease(network.settings)
        self._held: deque[Delivery] | None = None
        """Requests that begin when the peer has confirmed a mark: it has read enough of its answers, and has not given
        up. None if they need not wait."""
        self._mark_timer: asyncio.TimerHandle | None = None
        self._has_left = False
        """The peer confirms no mark any more."""

    @property
    def node(self) -> str:
        """The peer's name."""
        return self._connection.node

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_active(self) -> bool:
        """True if a request is in service, and not only held."""
        return len(self._open) > len(self._held or ())

    def ids(self) -> list[int]:
        """The ids of the requests in service, for PONG: the peer fails the others that it waits for."""
        return list(self._open)

    def forget(self) -> None:
        """The process that sent these requests has ended; its successor uses the same ids for other requests."""
        served, self._open = self._open, {}
        self.lease = Lease(self._network.settings)
        self._drop_held()
        for delivery in served.values():
            if delivery.kind != Kind.TELL:
                delivery.mailbox.cancel(delivery)

    def leave(self) -> None:
        """This side or the peer leaves: the requests that wait for a mark never begin."""
        self._has_left = True
        self._drop_held()

    def end_streams(self) -> None:
        """The peer does not receive items any more."""
        for delivery in list(self._open.values()):
            if delivery.kind == Kind.STREAM:
                delivery.mailbox.cancel(delivery)

    def on_requests(self, envelope: Envelope) -> None:
        """A run of requests to one endpoint."""
        kind, first, actor, items = envelope[0], envelope[1], envelope[2], envelope.pop()
        count = len(items) // 3
        admitted: Iterable[_Item] = zip(
            itertools.count(first), items[::3], items[1::3], items[2::3], strict=False
        )
        # A run that follows the one before is admitted by one comparison, as nearly all are.
        if not self._session.admit_run(first, count):
            admitted = [item for item in admitted if self._admits(item[0], kind)]
        mailbox = self._network.mailboxes.get(actor)
        if mailbox is None:
            for request_id, *_ in admitted:
                self._refuse_unknown(request_id, envelope)
            return
        deliveries = [
            Delivery(self, mailbox, envelope, request_id, args, kwargs, trace_id)
            for request_id, args, kwargs, trace_id in admitted
        ]
        for delivery in deliveries:
            self._open[delivery.id] = delivery
        if self._held is None:
            mailbox.deliver(deliveries)
        else:
            self._held += deliveries
            if self._mark_timer is None:
                self._mark_again(_MARK_AGAIN_S)

    def _admits(self, request_id: int, kind: int) -> bool:
        """False if the request must not begin: it was answered as it needs."""
        admission = self._session.admit(request_id)
        if admission is Admission.OUT_OF_ORDER and kind != _TELL:
            self._send_fault(request_id, Fault.OUT_OF_ORDER, "it arrived after later ones")
        return admission is Admission.DELIVER

    def _refuse_unknown(self, request_id: int, envelope: Envelope) -> None:
        kind, actor, endpoint = envelope[0], envelope[2], envelope[3]
        if kind == Kind.TELL:
            self._report_done(request_id)
            self._refusals.warning(
                "one-way message for an unknown actor", actor=actor, endpoint=endpoint, peer=self.node
            )
        else:
            self._send_fault(request_id, Fault.DEAD, f"{self._network.name} has no actor of that name")

    def on_restricted_requests(self, envelope: Envelope) -> None:
        """As ``on_requests``, of a peer that may not make all calls."""
        kind, first, actor, endpoint = envelope[:4]
        may_call = self._link.may_call
        if may_call is None or may_call(actor, endpoint):
            self.on_requests(envelope)
            return
        for request_id in range(first, first + len(envelope[-1]) // 3):
            if self._session.admit(request_id) is not Admission.DELIVER:
                continue
            self._refusals.warning(
                "call refused: the client may not make it",
                actor=actor, endpoint=endpoint, peer=self.node, address=self._link.address,
                next=f"if it should, add the rule '{actor}:{endpoint}': ActorSystem.allow(public_key, calls=[...])",
            )  # fmt: skip
            if kind == Kind.TELL:
                self._report_done(request_id)
            else:
                self._send_fault(request_id, Fault.NOT_ALLOWED, "")

    def on_cancel(self, envelope: Envelope) -> None:
        """The peer has given up a request; or, with an id below 0, all requests up to it."""
        if envelope[1] < 0:
            self._withdraw(-envelope[1])
            return
        delivery = self._open.get(envelope[1])
        # A one-way message that has begun is processed to its end.
        if delivery is not None and (delivery.kind != _TELL or delivery.task is None):
            delivery.mailbox.cancel(delivery)

    def _withdraw(self, last: int) -> None:
        """The peer has connected again, and wants no request up to ``last``."""
        for delivery in list(self._open.values()):
            if delivery.id > last or delivery.cancelled is not None:
                continue
            if delivery.task is None:
                del self._open[delivery.id]  # it is not answered
                delivery.mailbox.cancel(delivery)
            elif delivery.kind != _TELL:  # a one-way message is processed to its end
                delivery.mailbox.cancel(delivery)

    def on_grant(self, envelope: Envelope) -> None:
        """A stream may send further items."""
        delivery = self._open.get(envelope[1])
        if delivery is not None and delivery.writer is not None:
            delivery.writer.grant(envelope[2])

    def answer(self, delivery: Delivery, value: Any) -> None:
        """Raises LocalProtocolError if ``value`` can't be sent; the request is still open then."""
        open_requests, request_id = self._open, delivery.id
        # By identity: a new incarnation of the peer counts its ids from 1 again, so the id may be another request's.
        if open_requests.get(request_id) is not delivery:
            return  # it was answered before
        if delivery.kind == _TELL:
            del open_requests[request_id]
            self._report_done(request_id)
            return
        packed, buffers = _NONE, _NO_BUFFERS
        if value is not None:
            encoder = self._encoder
            try:
                packed = encoder.pack_items((value,))
            except LocalProtocolError as error:
                raise LocalProtocolError(f"its result: {error}") from error.__cause__
            if encoder.buffers:
                # The handler may keep the array that it has returned, and write to it while the socket still sends.
                buffers = codec.unchanging(encoder.take_buffers())
        # Only here: while the result can still prove impossible to send, ``answer_error`` needs the request.
        del open_requests[request_id]
        self._link.send_item(REPLIES, request_id, packed, buffers)
        if buffers or len(packed) > SMALL_BYTES:
            self._count_reply(len(packed) + sum(buffer.nbytes for buffer in buffers))

    def answer_error(self, delivery: Delivery, error: BaseException, errors: DeclaredErrors) -> None:
        """The endpoint raised ``error``; ``errors``: those that it declares. One that it got as the answer to a call of
        its own is passed on under its first name: chains of calls don't make chains of names."""
        if self._end(delivery):
            if delivery.kind == Kind.TELL:
                self._report_done(delivery.id)
                return
            _, kind, text = origin_of(error, "")
            head = (Kind.ERROR, delivery.id, kind, text[:_TEXT_LIMIT], traceback_of(error)[-_TEXT_LIMIT:])
            try:
                packed = self._error_encoder.pack([*head, *errors.to_wire(error)])
            except Exception:  # noqa: BLE001  # fields that can't be sent; the error arrives as RemoteError
                packed = self._error_encoder.pack([*head, "", {}])
            self._link.send(packed)
            if len(packed) > SMALL_BYTES:
                self._count_reply(len(packed))

    def answer_fault(self, delivery: Delivery, fault: Fault, message: str) -> None:
        """Answers for the runtime."""
        if self._end(delivery):
            if delivery.kind == Kind.TELL:
                self._report_done(delivery.id)
                return
            self._send_fault(delivery.id, fault, escaped(message[:_TEXT_LIMIT]))

    def send_item(self, delivery: Delivery, number: int, item: Any) -> int:
        """Sends an item of a stream; returns its size in bytes."""
        packed = self._encoder.pack((Kind.ITEM, delivery.id, number, item))
        buffers = codec.unchanging(self._encoder.take_buffers())
        self._link.send(packed, buffers)
        return len(packed) + sum(buffer.nbytes for buffer in buffers)

    @contextmanager
    def serving_stream(self) -> Iterator[None]:
        """Has heartbeats run while a stream is sent: nothing else would show that its reader has vanished."""
        self._session.serve_stream(self._loop.time())
        self._connection.arm()
        try:
            yield
        finally:
            self._session.end_stream()

    def _end(self, delivery: Delivery) -> bool:
        if self._open.get(delivery.id) is not delivery:
            return False  # it was answered before
        del self._open[delivery.id]
        return True

    # ------------------------------------------------------------------ requests that wait for a mark

    def may_begin(self, delivery: Delivery, now: float) -> bool:
        """Checks the lease for a request that is about to begin, at ``lease.check_at`` or later. False: it is over, and
        the request begins later, or never."""
        if self.lease.is_over(now):
            self._hold().appendleft(delivery)
            return False
        self.lease.renewing()
        self._send_mark()
        return True

    def _count_reply(self, size_bytes: int) -> None:
        """Sends marks among the answers. If a window of answers is not confirmed, the peer's next requests wait."""
        if self._replies.sent(size_bytes):
            self._send_mark()
        if self._replies.is_full:
            self._hold()

    def _hold(self) -> deque[Delivery]:
        """Requests that have not begun wait from now on, until the peer confirms a mark. Returns them."""
        # From all mailboxes at once: a later request must not overtake one that waits here.
        if self._held is None:
            mailboxes = dict.fromkeys(delivery.mailbox for delivery in self._open.values())
            self._held = deque(waiting for mailbox in mailboxes for waiting in mailbox.take_waiting(self))
            if not self._has_left:
                self._mark_again(_MARK_AGAIN_S)
        return self._held

    def _mark_again(self, wait_s: float) -> None:
        """Sends a mark, and another one after ``wait_s`` if requests still wait: it may be lost."""
        self._send_mark()
        self._mark_timer = self._loop.call_later(wait_s, self._check_mark, wait_s)

    def _check_mark(self, waited_s: float) -> None:
        self._mark_timer = None
        if self._held:  # else the next request sends a mark
            self._mark_again(min(2 * waited_s, self._network.settings.heartbeat_s))

    def _send_mark(self) -> None:
        self._connection.send([Kind.PING, -self._replies.mark(self._now())])

    def on_mark(self, mark: int) -> None:
        """The peer has returned a mark."""
        sent_at = self._replies.confirmed(mark)
        if sent_at is not None:
            self.lease.confirmed(sent_at)
        if self._held is None or self._replies.is_full or self.lease.is_over(self._now()):
            return
        held = self._drop_held()
        for delivery in held:
            if self._network.mailboxes.get(delivery.actor) is delivery.mailbox:
                delivery.mailbox.deliver([delivery])
            else:
                self.answer_fault(
                    delivery, Fault.DEAD, f"{self._network.name} has no actor of that name any more"
                )

    def _drop_held(self) -> deque[Delivery]:
        """Waits for the peer no longer; returns the requests that were held."""
        if self._mark_timer is not None:
            self._mark_timer.cancel()
            self._mark_timer = None
        held, self._held = self._held, None
        return deque() if held is None else held

    def _report_done(self, request_id: int) -> None:
        ranges = self._done
        if ranges and ranges[-1] == request_id - 1:
            ranges[-1] = request_id
            return
        # Not one by one: the messages that one tick of the mailbox has processed share a report.
        if not ranges:
            self._loop.call_soon(self.send_done)
        ranges += (request_id, request_id)

    def send_done(self) -> None:
        """Reports the one-way messages that were processed since the last report."""
        if self._done:
            ranges, self._done = self._done, []
            self._connection.send([Kind.DONE, 0, ranges])

    def _send_fault(self, request_id: int, fault: Fault, message: str) -> None:
        self._connection.send([Kind.ERROR, request_id, fault, message, "", "", {}])
