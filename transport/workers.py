"""Threads for copying. After ``run`` has returned or raised, no thread touches its data."""

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from ..core.base.threads import wait_ended
from .errors import TransportClosed

T = TypeVar("T")

# Copying this much takes about as long as a switch to a thread and back.
INLINE_BYTES: Final = 1 << 20
# Threads of one copy. A few are as fast as the memory.
_MOST_SHARING: Final = 4


class CopyWorkers:
    """Runs copies: small ones in the event loop, large ones in a pool of threads.

    The pool is not the event loop's own: copies must not wait for other blocking calls, nor delay them. ``work`` is
    called with an event and must raise TransportClosed soon after it is set.
    """

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="flexmarl-copy")
        self._helpers = min(_MOST_SHARING, len(os.sched_getaffinity(0))) - 1
        self._helping = ThreadPoolExecutor(max(1, self._helpers), thread_name_prefix="flexmarl-copy-help")
        self._running: dict[asyncio.Future[Any], threading.Event] = {}
        self._closed = False
        self._never = threading.Event()

    @property
    def running(self) -> int:
        """Copies in threads now."""
        return len(self._running)

    async def run(self, size_bytes: int, work: Callable[[threading.Event], T]) -> T:
        """Returns the result of ``work``. A cancellation sets the event of ``work`` and waits until it has ended.

        Raises TransportClosed after ``close``, and the errors of ``work``.
        """
        if self._closed:
            raise TransportClosed
        if size_bytes <= INLINE_BYTES:
            return work(self._never)
        stop = threading.Event()
        job = self._pool.submit(work, stop)
        done = asyncio.wrap_future(job)
        self._running[done] = stop
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            stop.set()
            if not job.cancel():
                await wait_ended(done)
            raise
        finally:
            del self._running[done]

    def share(self, count: int, do: Callable[[int], None]) -> None:
        """Calls ``do`` with 0 .. count - 1, from this thread and from helping ones; for use in ``work``.

        Raises the first error of ``do``; then some numbers were left out. No call is running when this returns.
        """
        numbers = itertools.count()
        failed = threading.Event()

        def help_along() -> None:
            with _set_on_error(failed):
                while not failed.is_set() and (number := next(numbers)) < count:
                    do(number)

        helping = [self._helping.submit(help_along) for _ in range(min(self._helpers, count - 1))]
        try:
            help_along()
        finally:
            wait([job for job in helping if not job.cancel()])
        for job in helping:
            if not job.cancelled():
                job.result()

    async def close(self) -> None:
        """Stops the running copies, whose callers get TransportClosed, and ends the threads."""
        self._closed = True
        for stop in self._running.values():
            stop.set()
        try:
            if self._running:
                await asyncio.wait(list(self._running))
        finally:
            self._pool.shutdown()
            self._helping.shutdown()


@contextmanager
def _set_on_error(failed: threading.Event) -> Iterator[None]:
    ended = False
    try:
        yield
        ended = True
    finally:
        if not ended:
            failed.set()
