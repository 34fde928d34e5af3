"""Threads for copying. After ``run`` has returned or raised, no thread touches its data."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from .errors import TransportClosed

T = TypeVar("T")

# Copying this much takes about as long as a switch to a thread and back.
INLINE_BYTES: Final = 1 << 20


class CopyWorkers:
    """Runs copies: small ones in the event loop, large ones in a pool of threads.

    The pool is not the event loop's own: copies must not wait for other blocking calls, nor delay them. ``work`` is
    called with an event and must raise TransportClosed soon after it is set.
    """

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="flexmarl-copy")
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
                await _wait_ended(done)
            raise
        finally:
            del self._running[done]

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


async def _wait_ended(done: asyncio.Future[T]) -> None:
    # The caller raises CancelledError afterwards: a second cancellation must not leave a copying thread behind.
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            continue
