"""Blocking work in threads, beside an event loop.

A thread can't be cancelled. ``in_thread`` therefore waits for it: the caller that is cancelled next closes the file,
the database or the memory that the thread still works with, and a C library answers that with SIGSEGV.
``asyncio.to_thread`` leaves such a thread behind; it is right only for work that shares nothing with anyone.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


async def in_thread(
    work: Callable[..., Result], *args: Any, stop: threading.Event | None = None, abandon: bool = False
) -> Result:
    """The result of ``work(*args)``, in a thread of the running loop's own executor; raises the errors of ``work``.

    A cancellation sets ``stop``, by which ``work`` may end sooner, and is raised when ``work`` has ended; at once if
    ``work`` has not begun. With ``abandon`` it is raised at once in every case, and ``work`` runs on: for work that may
    take any time, as a user's function does, and touches nothing that its caller closes.
    """
    job: Future[Result] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        if not job.set_running_or_notify_cancel():
            return
        try:
            result = context.run(work, *args)
        except StopIteration as error:  # a future takes none, and would never end (PEP 479)
            job.set_exception(RuntimeError(f"{work!r} raised StopIteration({error})"))
        except BaseException as error:  # noqa: BLE001  # raised by in_thread
            job.set_exception(error)
        else:
            job.set_result(result)

    asyncio.get_running_loop().run_in_executor(None, run)
    done = asyncio.wrap_future(job)
    done.add_done_callback(_take_error)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        if stop is not None:
            stop.set()
        if abandon:
            done.cancel()  # and ``job``, if it has not begun
        elif not job.cancel():
            await wait_ended(done)
        raise


def _take_error(done: "asyncio.Future[Any]") -> None:
    """Has asyncio log no error that a cancellation hides."""
    if not done.cancelled():
        done.exception()


async def wait_ended(done: "asyncio.Future[Any]") -> None:
    """Returns when ``done`` has ended, also if this task is cancelled meanwhile."""
    # The caller raises CancelledError afterwards: a second cancellation must not leave a thread behind.
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            continue
