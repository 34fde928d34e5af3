"""The requests for one actor: handlers begin in order of arrival and run concurrently.

One task runs the waiting requests one after the other; most handlers never suspend, and a task for each would cost more
than the rest of a call together. If a handler suspends, its task stays with it, and a new task takes over the queue. A
handler can't notice: it has a task of its own from its first step to its last.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base.texts import text_of, traceback_of
from ..call_context import current_delivery
from ..errors import RemoteProtocolError
from ..protocol.declared_errors import NO_ERRORS
from ..protocol.envelopes import Envelope, Fault, Kind
from ..protocol.messages import Undecodable
from ..signature import Signature, signature_of
from ..telemetry import BoundedLog, get_logger
from .streams import StreamWriter

if TYPE_CHECKING:
    from .inbound import Inbound

log = get_logger(__name__)

# After this many handlers other callbacks of the loop get their turn: the queue may hold a window of requests of every
# peer, and meanwhile no heartbeat of this process would leave.
_BUDGET = 256
_STREAM = int(Kind.STREAM)  # comparing with an enum's member costs three times as much
_TAKEN = list[Any]()


class Delivery:
    """One request of a peer to an actor of this side."""

    __slots__ = (
        "args",
        "cancelled",
        "envelope",
        "id",
        "inbound",
        "kind",
        "kwargs",
        "mailbox",
        "task",
        "trace_id",
        "writer"
    )  # fmt: skip

    def __init__(
        self,
        inbound: "Inbound",
        mailbox: "Mailbox",
        envelope: Envelope,
        request_id: int,
        args: list[Any] | Undecodable,
        kwargs: dict[Any, Any],
        trace_id: int,
    ) -> None:
        """``envelope``: of a run of requests (``envelopes.py``), without the requests. ``trace_id``: the id of the
        first request of the chain; kept from call to call."""
        self.inbound = inbound
        self.mailbox = mailbox
        self.envelope = envelope
        self.kind: int = envelope[0]
        self.id = request_id
        self.args, self.kwargs = args, kwargs
        self.trace_id = trace_id
        self.task: asyncio.Task[None] | None = None
        self.writer: StreamWriter | None = None
        self.cancelled: Fault | None = None

    @property
    def actor(self) -> str:
        """The name of the actor that serves it."""
        return self.mailbox.name

    @property
    def node(self) -> str:
        """The name of that actor's system."""
        return self.mailbox.node

    @property
    def endpoint(self) -> str:
        """The name of the endpoint that is called."""
        name: str = self.envelope[3]
        return name

    @property
    def timeout_s(self) -> float:
        """The caller's timeout; for a stream, of each item."""
        seconds: float = self.envelope[4]
        return seconds

    @property
    def window(self) -> int:
        """The number of items of a stream that may leave before any is granted."""
        number: int = self.envelope[5]
        return number

    @property
    def message_id(self) -> str:
        """``SENDER:NUMBER``, for log lines."""
        return f"{self.inbound.node}:{self.id}"


@dataclass(frozen=True, slots=True)
class MailboxStatistics:
    """``waiting``: requests that have not begun; ``running``: suspended; the rest are counts since the start."""

    waiting: int
    running: int
    served: int
    failed: int
    cancelled: int


class _BadRequest(Exception):
    """A request that fits no endpoint."""


def _is_unchanged(before: Context) -> bool:
    try:
        return copy_context() == before
    except Exception:  # noqa: BLE001  # a value that can't be compared: an array, say, that replaced another
        return False


class _Endpoint:
    """``suspends``: its last call did, so the next one gets a task to itself from the start."""

    __slots__ = ("method", "signature", "streams", "suspends")

    def __init__(self, method: Callable[..., Any], signature: Signature) -> None:
        self.method = method
        self.signature = signature
        self.streams = signature.streams
        self.suspends = signature.streams


class Mailbox:
    """The requests for one actor, and the tasks that run their handlers.

    It is one class because the queue, the running handlers and the tasks are one state: see the picture below.
    """

    def __init__(self, name: str, node: str, context: Any, now: Callable[[], float]) -> None:
        """``node``: the name of the actor's system. ``context``: passed to the validation of arguments; it makes
        references ready to use. ``now``: the clock of the requesters' leases."""
        self.name = name
        self.node = node
        self._context = context
        self._now = now
        self._loop = asyncio.get_running_loop()
        # Not the context of the callback that delivers: it holds variables of other requests.
        self._clean = copy_context()
        self._actor: object | None = None
        self._endpoints: dict[str, _Endpoint] = {}
        self._queue: deque[Delivery] = deque()
        self._running: dict[Delivery, asyncio.TimerHandle | None] = {}
        """Requests whose handlers are suspended, with the timer of their deadline."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._current: Delivery | None = None
        self._ready = 0  # tasks that are scheduled and have not begun
        self._suspending = False  # an endpoint has suspended at least once
        self._served = self._failed = self._cancelled = 0
        self._refusals = BoundedLog(log)

    def open(self, actor: object) -> None:
        """Begins to serve; requests that have arrived before are kept."""
        self._actor = actor
        # They hold bound methods of the actor before, which a restart has replaced.
        self._endpoints.clear()
        for delivery in self._queue:
            self._make_ready(delivery)

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Queues requests, which begin in this order from the next tick on."""
        self._queue += deliveries
        if self._suspending:
            for delivery in deliveries:
                self._make_ready(delivery)
        elif self._ready == 0 and deliveries:  # one task runs them all, unless one suspends
            self._make_ready(deliveries[0])

    def cancel(self, delivery: Delivery, why: Fault = Fault.CANCELLED) -> None:
        """The caller has given up."""
        if delivery.cancelled is None:
            delivery.cancelled = why
            if delivery.task is not None and delivery in self._running:
                delivery.task.cancel()

    def take_waiting(self, inbound: "Inbound") -> list[Delivery]:
        """Removes the requests of one peer that have not begun, and returns them in order."""
        waiting = [*self._queue]
        self._queue.clear()
        self._queue += (delivery for delivery in waiting if delivery.inbound is not inbound)
        return [delivery for delivery in waiting if delivery.inbound is inbound]

    def fail(self, error: BaseException) -> list[asyncio.Task[None]]:
        """The actor has ended: fails all its requests. Returns the tasks that are being cancelled."""
        self._actor = None
        waiting = [*self._queue]
        self._queue.clear()
        running = [*self._running] if self._current is None else [*self._running, self._current]
        for delivery in (*waiting, *running):
            delivery.cancelled = Fault.DEAD
            delivery.inbound.answer_fault(delivery, Fault.DEAD, text_of(error))
        tasks, self._tasks = list(self._tasks), set()
        for task in tasks:
            task.cancel()
        self._ready = 0  # a task that is cancelled before its first step never runs
        return tasks

    def runs_in(self, task: asyncio.Task[Any] | None) -> bool:
        """True if ``task`` runs a handler of this actor."""
        running = (*self._running, self._current)
        return task is not None and any(d is not None and d.task is task for d in running)

    def statistics(self) -> MailboxStatistics:
        """The present numbers of requests, and the counts since the start."""
        return MailboxStatistics(
            len(self._queue), len(self._running), self._served, self._failed, self._cancelled
        )

    # ------------------------------------------------------------------ the tasks that run handlers
    #
    # A message has brought requests 1, 2 and 3, and the handler of 2 suspends:
    #
    #     deliver        queue: 1 2 3   _start_task schedules task A, and right behind it _after_step
    #     A, in _work    queue: 3       1 begins, ends and is answered. 2 begins and suspends: this step of A is over
    #     _after_step    queue: 3       finds 2 in _current, so it has suspended: moves it to _running, with a timer for
    #                                   its deadline. As 3 waits, schedules task B, and right behind it _after_step
    #     B, in _work    queue: empty   3 begins, ends and is answered
    #     _after_step                   _current is None: nothing has suspended
    #     A, ticks later                2 ends. It is not _current any more, so its answer is the last work of A
    #
    # Why a callback: code can't notice that it has suspended itself. Why the request keeps task A, and the queue gets a
    # new one: ``asyncio.timeout`` and ``TaskGroup`` cancel the task in which they were entered.
    #
    # With one new task a tick, a burst of handlers that all suspend would begin one a tick. So an endpoint whose last
    # call has suspended (``suspends``) gets a task for each of its requests from the start (``_make_ready``).

    def _make_ready(self, delivery: Delivery) -> None:
        target = self._endpoints.get(delivery.endpoint)
        if self._actor is not None and (self._ready == 0 or (target is not None and target.suspends)):
            self._start_task()

    def _start_task(self) -> None:
        self._ready += 1
        self._tasks.add(self._loop.create_task(self._work(), name=self.name, context=self._clean.copy()))
        # Runs right after the task's first step: by then its handler has ended, or is suspended.
        self._loop.call_soon(self._after_step)

    def _after_step(self) -> None:
        delivery, self._current = self._current, None
        if delivery is not None:
            if delivery.task is not None:
                delivery.task.set_name(f"{self.name}.{delivery.endpoint}")
            is_call = delivery.kind == Kind.CALL
            # Past the deadline of a call its caller has given up.
            self._running[delivery] = (
                self._loop.call_later(delivery.timeout_s, self.cancel, delivery, Fault.EXPIRED)
                if is_call
                else None
            )
            target = self._endpoints.get(delivery.endpoint)
            if target is not None:
                target.suspends = self._suspending = True
        if self._queue and self._ready == 0:
            self._start_task()

    async def _work(self) -> None:
        self._ready -= 1
        task = asyncio.current_task()
        assert task is not None
        # Looked up once for all requests of this step.
        queue, now, set_current = self._queue, self._now, current_delivery.set
        try:
            for _ in range(_BUDGET):
                if not queue:
                    return
                delivery = queue.popleft()
                if delivery.cancelled is not None:
                    self._count_cancelled(delivery)
                    continue
                inbound = delivery.inbound
                # Here and not on arrival: the loop may have been blocked, or the process stopped, in between.
                if (time_s := now()) >= inbound.lease.check_at and not inbound.may_begin(delivery, time_s):
                    continue
                delivery.task = task
                self._current = delivery
                set_current(delivery)
                before = copy_context()  # a constant time: contexts share their variables until one is set
                try:
                    inbound.answer(delivery, await self._begin(delivery))
                    self._served += 1
                except _BadRequest as error:
                    self._answer_bad_request(delivery, text_of(error))
                except asyncio.CancelledError as error:
                    self._answer_cancelled(delivery, error)
                except (KeyboardInterrupt, SystemExit):
                    raise  # asyncio ends the loop with them
                except BaseException as error:  # the caller gets it: this is the boundary between two actors
                    # Python closes the coroutine of a task that is dropped: then there is no caller left, and this is
                    # not the task that runs. A handler that raises the same error runs in its task.
                    if isinstance(error, GeneratorExit) and asyncio.current_task(self._loop) is not task:
                        raise
                    self._answer_error(delivery, error)
                delivery.task = None  # breaks the cycle task, context, delivery
                if self._current is not delivery:  # it was suspended
                    timer = self._running.pop(delivery, None)
                    if timer is not None:
                        timer.cancel()
                    return
                self._current = None
                if self._suspending and (target := self._endpoints.get(delivery.endpoint)) is not None:
                    target.suspends = target.streams
                if not _is_unchanged(before):  # the next handler must not see this one's variables
                    return
        finally:
            self._tasks.discard(task)

    def _begin(self, delivery: Delivery) -> Awaitable[Any]:
        """Calls the endpoint. Raises _BadRequest if there is no such endpoint, or the arguments don't fit it."""
        try:
            target = self._endpoints.get(delivery.envelope[3]) or self._look_up(delivery.envelope[3])
            if target.streams != (delivery.kind == _STREAM):
                problem = "is a stream: iterate over it" if target.streams else "is not a stream: await it"
                raise RemoteProtocolError(f"{target.signature.name} {problem}")
            args, kwargs = target.signature.arguments(delivery.args, delivery.kwargs, self._context)
            # The handler has them now. Its tasks may keep this delivery alive, which must not keep the arguments too.
            delivery.args, delivery.kwargs = _TAKEN, {}
        except RemoteProtocolError as error:
            raise _BadRequest(text_of(error)) from None
        if target.streams:
            return self._stream(delivery, target.method(*args, **kwargs))
        called: Awaitable[Any] = target.method(*args, **kwargs)
        return called

    async def _stream(self, delivery: Delivery, items: AsyncGenerator[Any, None]) -> int:
        """Sends the items; returns their number."""
        inbound = delivery.inbound
        delivery.writer = writer = StreamWriter(delivery.window, inbound.window_bytes)
        with inbound.serving_stream():
            async with aclosing(items):
                async for item in items:
                    await writer.wait_room()
                    writer.sent(inbound.send_item(delivery, writer.count, item))
        return writer.count

    def _look_up(self, endpoint: str) -> _Endpoint:
        actor = self._actor
        assert actor is not None, "a mailbox serves between open and fail only"
        owner: Any = type(actor)
        signature = signature_of(owner, endpoint)
        if signature is None or not signature.is_endpoint:
            raise RemoteProtocolError(f"{owner.__name__} has no endpoint {endpoint!r}")
        target = self._endpoints[endpoint] = _Endpoint(getattr(actor, endpoint), signature)
        return target

    def _answer_bad_request(self, delivery: Delivery, problem: str) -> None:
        self._failed += 1
        if delivery.kind == Kind.TELL:
            self._refusals.error(
                "one-way message refused", actor=self.name, endpoint=delivery.endpoint, error=problem
            )
        delivery.inbound.answer_fault(delivery, Fault.PROTOCOL, problem)

    def _answer_error(self, delivery: Delivery, error: BaseException) -> None:
        self._failed += 1
        if delivery.kind == Kind.TELL:
            text = traceback_of(error)
            log.error("one-way message failed", actor=self.name, endpoint=delivery.endpoint, error=text)
        elif not isinstance(error, Exception | asyncio.CancelledError):
            # A defect, as a panic of a Rust library.
            text = traceback_of(error)
            log.error("endpoint panicked", actor=self.name, endpoint=delivery.endpoint, error=text)
        target = self._endpoints.get(delivery.endpoint)
        errors = NO_ERRORS if target is None else target.signature.errors
        delivery.inbound.answer_error(delivery, error, errors)

    def _answer_cancelled(self, delivery: Delivery, error: asyncio.CancelledError) -> None:
        if delivery.cancelled is not None:
            self._count_cancelled(delivery)
        elif delivery.task is not None and delivery.task.cancelling():
            raise error
        else:  # the handler awaited a task that was cancelled
            self._answer_error(delivery, error)

    def _count_cancelled(self, delivery: Delivery) -> None:
        self._cancelled += 1
        if delivery.cancelled is not Fault.DEAD:  # else it was answered before
            delivery.inbound.answer_fault(delivery, delivery.cancelled or Fault.CANCELLED, "cancelled")
