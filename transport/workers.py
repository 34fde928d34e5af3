"""Threads for copying. One promise: when ``run`` has returned or raised, no thread touches its data."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from .errors import TransportClosed

T = TypeVar("T")

# Copying this much takes about as long as going to a thread and back.
INLINE_BYTES: Final = 1 << 20


class CopyWorkers:
    """Runs copies: small ones at once, large ones in a thread of their own pool.

    The pool is not the event loop's: copies must neither wait for others' blocking calls nor starve them.
    ``work`` gets an event and should end soon, by raising TransportClosed, once it is set.
    """

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="flexmarl-copy")
        self._running: dict[asyncio.Future[Any], threading.Event] = {}
        self._closed = False
        self._never = threading.Event()

    @property
    def running(self) -> int:
        return len(self._running)

    async def run(self, size_bytes: int, work: Callable[[threading.Event], T]) -> T:
        """The result of ``work``. When cancelled, waits until the work has ended, which it is told to do.

        Raises TransportClosed after ``close`` and whatever ``work`` raises.
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
                await _ended(done)
            raise
        finally:
            del self._running[done]

    async def close(self) -> None:
        """Stops the copies under way, whose callers get TransportClosed, and ends the threads."""
        self._closed = True
        for stop in self._running.values():
            stop.set()
        try:
            if self._running:
                await asyncio.wait(list(self._running))
        finally:
            self._pool.shutdown()


async def _ended(done: asyncio.Future[T]) -> None:
    # The caller raises CancelledError anyway: a second cancellation must not make it leave a copying thread.
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            continue
