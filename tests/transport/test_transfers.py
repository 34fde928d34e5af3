import asyncio
import threading
from collections.abc import Iterator

import pytest

from flexmarl.transport.errors import TransportClosed
from flexmarl.transport.transfers import INLINE_BYTES, CopyWorkers

from ..patience import PATIENCE_S


async def test_small_work_runs_here_and_large_work_in_a_thread() -> None:
    workers = CopyWorkers()
    here = threading.get_ident()
    assert await workers.run(INLINE_BYTES, lambda stop: threading.get_ident()) == here
    assert await workers.run(INLINE_BYTES + 1, lambda stop: threading.get_ident()) != here
    await workers.close()


async def test_cancelling_waits_for_the_thread_however_often_it_is_asked() -> None:
    workers = CopyWorkers()
    begun, ended, release = threading.Event(), threading.Event(), threading.Event()

    def work(stop: threading.Event) -> None:
        begun.set()
        stop.wait()
        release.wait()
        ended.set()

    task = asyncio.create_task(workers.run(1 << 30, work))
    await asyncio.to_thread(begun.wait)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set() and workers.running == 0
    await workers.close()


async def test_work_that_has_not_begun_is_cancelled_at_once() -> None:
    workers = CopyWorkers(threads=1)
    release, ran = threading.Event(), threading.Event()
    busy = asyncio.create_task(workers.run(1 << 30, lambda stop: release.wait()))
    queued = asyncio.create_task(workers.run(1 << 30, lambda stop: ran.set()))
    await asyncio.sleep(0)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    release.set()
    await busy
    await workers.close()
    assert not ran.is_set()


async def test_closed_workers_refuse() -> None:
    workers = CopyWorkers()
    await workers.close()
    with pytest.raises(TransportClosed):
        await workers.run(1, lambda stop: None)


async def test_shared_work_is_done_once_each_by_several_threads() -> None:
    workers = CopyWorkers()
    done, threads = [], set()
    both = threading.Barrier(2, timeout=PATIENCE_S)

    def do(numbers: Iterator[int]) -> None:
        for number in numbers:
            if number < 2 and workers._helpers:
                both.wait()  # two calls run at the same time
            threads.add(threading.get_ident())
            done.append(number)

    await workers.run(1 << 30, lambda stop: workers.share(100, do))
    assert sorted(done) == list(range(100))
    assert len(threads) >= min(2, workers._helpers + 1)
    await workers.close()


async def test_the_first_error_of_shared_work_is_raised_after_the_last_call_has_ended() -> None:
    workers = CopyWorkers()
    running: list[int] = []
    ended: list[int] = []

    def do(numbers: Iterator[int]) -> None:
        for number in numbers:
            running.append(number)
            if number == 3:
                raise ValueError("three")
            ended.append(number)

    with pytest.raises(ValueError, match="three"):
        await workers.run(1 << 30, lambda stop: workers.share(10_000, do))
    assert sorted(running) == sorted([*ended, 3]) and len(ended) < 9_999
    await workers.close()
