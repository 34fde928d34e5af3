"""An asyncio loop whose clock jumps to the next timer: hours of timeouts pass in milliseconds.

``run(main())`` is ``asyncio.run(main())`` in virtual time. While anything is ready to run the clock stands
still; when nothing is, it jumps to the next timer. No real time passes or is read, so a program runs the
same way each time, in any process, if it is deterministic itself:

- Timers due at the same instant (equal floats) fire in the order in which they were set.
- Tasks and futures hash by their number, not by their address: ``asyncio.wait``, a TaskGroup that cancels
  its tasks and the program's own sets go through them in an order that does not change between processes.
  Tasks are named by the same number, also when the process ran other loops before.
- Waiting for the real world is refused: threads, processes, sockets, signals.

Left to the program: the real clock (``time.monotonic()``; ask ``loop.time()``), unseeded random numbers, sets
of other things (strings hash differently in each process), and the moment at which the garbage collector
finalises objects in a reference cycle (close generators with ``contextlib.aclosing``). In asyncio itself, with
any loop: ``as_completed`` orders coroutines by address (give it tasks), so does a set of futures that
``gather`` made, and the set that ``all_tasks`` returns depends on earlier loops (sort it by ``hash``).

Because time stands still while anything is ready, a program that spins (``while loop.time() < t: await
asyncio.sleep(0)``) never ends: it has to wait for something.
"""

import asyncio
import heapq
import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextvars import Context
from types import FrameType
from typing import Any, TypeVar, TypeVarTuple

from ..errors import Deadlock, NotInVirtualTime, VirtualTimeExceeded

T = TypeVar("T")
Args = TypeVarTuple("Args")

LIMIT_S = 365 * 86400.0  # of virtual time; a task that ticks each second takes about two minutes of real time
ENDING_S = 3600.0  # of virtual time, for the tasks that are left when the main coroutine ends
FEW_TIMERS = 128  # below this many, cancelled timers are not worth a search

# Every method of a loop that waits for something outside the program.
REFUSED = (
    *("run_in_executor", "set_default_executor", "getaddrinfo", "getnameinfo"),
    *("subprocess_exec", "subprocess_shell", "connect_read_pipe", "connect_write_pipe"),
    *("create_connection", "create_server", "create_unix_connection", "create_unix_server"),
    *("create_datagram_endpoint", "connect_accepted_socket", "start_tls", "sendfile"),
    *("add_reader", "remove_reader", "add_writer", "remove_writer"),
    *("sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into"),
    *("sock_sendall", "sock_sendto", "sock_sendfile", "sock_connect", "sock_accept"),
    *("add_signal_handler", "remove_signal_handler"),
)


def run(main: Coroutine[Any, Any, T], *, start_s: float = 0.0, limit_s: float = LIMIT_S) -> T:
    """Runs ``main`` in virtual time and returns its result; like ``asyncio.run``, and changes nothing global.

    ``start_s``: the first value of ``loop.time()``, in seconds; ``limit_s``: the most seconds of virtual time that
    may pass. When ``main`` ends, or one of the errors below ends it, the remaining tasks are cancelled, oldest
    first, and have one hour of virtual time to end; then async generators are closed. A KeyboardInterrupt is
    raised as it is: no signal handler is set.

    Raises the errors of ``main``, Deadlock if every task waits and no timer is set, VirtualTimeExceeded if the next
    timer is due after the limit, ValueError for invalid times, and RuntimeError if a loop already runs in this
    thread.
    """
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(
            "virtual_time.run() can't be called while a loop runs in this thread: await instead"
        )
    loop = VirtualTimeLoop(start_s=start_s, limit_s=limit_s)
    try:
        return loop.run_until_complete(main)
    finally:
        try:
            loop._limit_s = loop.time() + ENDING_S
            _cancel_what_is_left(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


def _cancel_what_is_left(loop: "VirtualTimeLoop") -> None:
    tasks = sorted(asyncio.all_tasks(loop), key=hash)
    if not tasks:
        return
    # Calls of actors that are cancelled send a message at once, for which a loop has to run.
    asyncio._set_running_loop(loop)
    try:
        for task in tasks:
            task.cancel()
    finally:
        asyncio._set_running_loop(None)
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            message = "a task that was cancelled at the end of virtual_time.run() failed"
            loop.call_exception_handler({"message": message, "exception": error, "task": task})


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time. ``run`` makes one; or use ``asyncio.Runner(loop_factory=VirtualTimeLoop)``.

    ``start_s``: the first value of ``time()``, in seconds; ``limit_s``: the most seconds that may pass.
    ``run_forever`` and ``run_until_complete`` raise Deadlock and VirtualTimeExceeded; every method that would
    wait for the real world raises NotInVirtualTime.
    """

    is_virtual = True
    """Known to ``ActorSystem.run_blocking``."""

    # Attributes of the base class, whose run_forever() calls _run_once(): so since Python 3.4.
    _ready: deque[asyncio.Handle]
    _stopping: bool
    _thread_id: int | None  # None while the loop does not run
    _check_closed: Callable[[], None]

    def __init__(self, *, start_s: float = 0.0, limit_s: float = LIMIT_S) -> None:
        super().__init__()
        if not math.isfinite(start_s) or not limit_s > 0:
            super().close()  # or its finaliser warns of a loop left open
            raise ValueError(f"start_s must be finite and limit_s above 0, got {start_s!r} and {limit_s!r}")
        self._now_s = start_s
        self._limit_s = start_s + limit_s
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []  # a heap of (when, order set, timer)
        self._timers_set = itertools.count()
        self._search_cancelled_at = FEW_TIMERS
        self._numbers = itertools.count(1)  # of tasks and futures
        self._asyncgens = _WeakOrderedSet()  # the base class's is a WeakSet: in the order of addresses

    def time(self) -> float:
        """Virtual time, in seconds."""
        return self._now_s

    def call_at(
        self, when: float, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As in asyncio. Raises ValueError if ``when`` is NaN, which has no place in the order of timers."""
        self._check_closed()
        if math.isnan(when):
            raise ValueError("a timer can't be due at NaN")
        if len(self._timers) >= self._search_cancelled_at:
            self._drop_cancelled_timers()
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._timers_set), timer))
        return timer

    def call_soon_threadsafe(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        """``call_soon``. Raises NotInVirtualTime from another thread, which runs in real time."""
        if self._thread_id not in (None, threading.get_ident()):
            raise NotInVirtualTime("a call from another thread (call_soon_threadsafe)")
        return self.call_soon(callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        """A future whose hash is its number."""
        return _Future(loop=self)

    def create_task(
        self,
        coro: Any,  # the base class's annotation has a type variable that only stubs know
        *,
        name: object = None,
        context: Context | None = None,
        **options: Any,  # eager_start, from Python 3.12
    ) -> asyncio.Task[Any]:
        """As in asyncio. A task factory, if one is set, is used, and its tasks hash as it likes."""
        if self.get_task_factory() is not None:
            return super().create_task(coro, name=name, context=context, **options)
        self._check_closed()
        number = next(self._numbers)
        name = f"Task-{number}" if name is None else str(name)
        return _Task(number, coro, loop=self, name=name, context=context, **options)

    def close(self) -> None:
        """Closes the loop. Raises RuntimeError if it runs."""
        super().close()  # raises if the loop runs
        self._timers.clear()

    def _run_once(self) -> None:
        """Runs the callbacks that are ready now. If no callback is ready, the clock jumps first."""
        timers, ready = self._timers, self._ready
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not ready and not self._stopping:
            self._jump()
        while timers and timers[0][0] <= self._now_s:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _jump(self) -> None:
        if not self._timers or self._timers[0][0] == math.inf:
            raise Deadlock(self._now_s, self._waiting())
        when = self._timers[0][0]
        if when > self._limit_s:
            raise VirtualTimeExceeded(self._limit_s, when, self._waiting())
        self._now_s = max(self._now_s, when)  # a timer may be set for the past

    def _drop_cancelled_timers(self) -> None:
        """Searching only when the heap has doubled keeps it below twice the live timers, at O(1) per timer."""
        self._timers[:] = [entry for entry in self._timers if not entry[2].cancelled()]
        heapq.heapify(self._timers)
        self._search_cancelled_at = max(FEW_TIMERS, 2 * len(self._timers))

    def _waiting(self) -> list[str]:
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        return [f"{task.get_name()}: {_place(task.get_coro())}" for task in tasks]


def _refusal(operation: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotInVirtualTime(operation)

    return refuse


for _name in REFUSED:
    setattr(VirtualTimeLoop, _name, _refusal(_name))


class _Task(asyncio.Task[Any]):
    """A task that hashes by its number."""

    __slots__ = ("_number",)

    def __init__(self, number: int, coro: Any, **options: Any) -> None:
        self._number = number  # first: the base class puts the task into a set
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future[Any]):
    """A future that hashes by a number, which it takes at the first use, because most are never hashed."""

    __slots__ = ("_number",)

    def __hash__(self) -> int:
        try:
            return self._number
        except AttributeError:
            loop = self.get_loop()
            assert isinstance(loop, VirtualTimeLoop)
            self._number: int = next(loop._numbers)
            return self._number


class _WeakOrderedSet(weakref.WeakKeyDictionary[AsyncGenerator[Any, Any], None]):
    """The part of a WeakSet that asyncio uses, in the order of insertion."""

    def add(self, item: AsyncGenerator[Any, Any]) -> None:
        self[item] = None

    def discard(self, item: AsyncGenerator[Any, Any]) -> None:
        self.pop(item, None)


_ASYNCIO = asyncio.__name__ + "."


def _place(awaitable: object) -> str:
    """The place at which a coroutine waits: its innermost frame outside asyncio, then the innermost one of all."""
    frames = list(_frames(awaitable))
    if not frames:
        return "not started or in an awaitable without a frame"
    outside = [frame for frame in frames if not frame.f_globals.get("__name__", "").startswith(_ASYNCIO)]
    ends = [*outside[-1:], frames[-1]]
    if len(outside) == len(frames):
        ends.pop()
    return ", in ".join(f"{f.f_code.co_filename}:{f.f_lineno} ({f.f_code.co_qualname})" for f in ends)


def _frames(awaitable: object) -> Iterator[FrameType]:
    """The frames of a suspended coroutine, outermost first, along what each awaits (see ``inspect``)."""
    while awaitable is not None:
        for kind, awaits in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            frame = getattr(awaitable, f"{kind}_frame", None)
            if frame is not None:
                yield frame
                awaitable = getattr(awaitable, awaits)
                break
        else:
            return
