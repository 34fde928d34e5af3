"""Work in threads: a cancellation waits for it, unless it may be abandoned."""

import asyncio
import threading

import pytest

from flexmarl.core.base.threads import in_thread

from ...patience import PATIENCE_S


class Door:
    """Work that begins, waits until it may end, and has ended."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.ended = threading.Event(), threading.Event(), threading.Event()

    def work(self, value: int) -> int:
        self.begun.set()
        assert self.may_end.wait(60)
        self.ended.set()
        return value


async def began(door: Door) -> None:
    while not door.begun.is_set():
        await asyncio.sleep(0.001)


async def test_results_and_errors_are_those_of_the_work() -> None:
    assert await in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 7, 0)


async def test_work_that_raises_stop_iteration_ends_too() -> None:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            await in_thread(next, iter(()))


@pytest.mark.parametrize("cancellations", [1, 3])
async def test_a_cancelled_caller_goes_on_when_the_work_has_ended(cancellations: int) -> None:
    door = Door()
    task = asyncio.create_task(in_thread(door.work, 1))
    await began(door)
    for _ in range(cancellations):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not task.done()
    door.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert door.ended.is_set()


async def test_a_cancellation_sets_the_stop_of_the_work() -> None:
    door = Door()
    task = asyncio.create_task(in_thread(door.work, 1, stop=door.may_end))
    await began(door)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert door.ended.is_set()


async def test_abandoned_work_delays_nobody() -> None:
    door = Door()
    task = asyncio.create_task(in_thread(door.work, 1, abandon=True))
    await began(door)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not door.ended.is_set()
    door.may_end.set()


async def test_work_that_has_not_begun_never_does() -> None:
    from concurrent.futures import ThreadPoolExecutor

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    first, second = Door(), Door()
    running = asyncio.create_task(in_thread(first.work, 1))
    await began(first)
    waiting = asyncio.create_task(in_thread(second.work, 2))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    first.may_end.set()
    assert await running == 1
    assert await in_thread(divmod, 7, 2) == (3, 1)
    assert not second.begun.is_set()
