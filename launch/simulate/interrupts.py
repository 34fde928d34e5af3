"""Ctrl-C in a simulation, whose loop sets no signal handler."""

import asyncio
import signal
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


async def interruptible(main: Coroutine[Any, Any, T]) -> T:
    """Runs ``main``. The first SIGINT cancels this task, and is raised as KeyboardInterrupt when ``main`` has ended;
    the second is raised at once.

    As ``asyncio.run`` does, and for its reason: Python's own handler raises wherever the program is. In a finalizer the
    exception is lost, and elsewhere the run can't end what it has started. In other threads than the main one, and
    beside a handler of the program, nothing is changed.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return await main
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    count = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        task.cancel()

    signal.signal(signal.SIGINT, interrupt)
    try:
        return await main
    except asyncio.CancelledError:
        if count:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
