"""A loop in virtual time: how a run ends, and programs that can't continue."""

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from flexmarl.core.errors import Deadlock, VirtualTimeExceeded
from flexmarl.core.testing.virtual_time import VirtualTimeLoop, run

from .clock import now_s

# --------------------------------------------------------------------------- how a run ends


def test_what_main_raises_comes_out() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(main())


def test_an_interrupt_comes_out_as_it_is_after_the_tasks_are_cancelled() -> None:
    async def interrupted() -> None:
        await asyncio.sleep(1)
        raise KeyboardInterrupt

    async def main() -> None:
        task = asyncio.create_task(interrupted())
        try:
            await task
        except BaseException as error:
            seen.append(type(error))
            raise

    seen: list[type[BaseException]] = []
    with pytest.raises(KeyboardInterrupt):
        run(main())
    assert seen == [asyncio.CancelledError]


def test_what_is_left_is_cancelled_with_the_loop_at_hand() -> None:
    class Call(asyncio.Future[None]):
        def cancel(self, msg: object = None) -> bool:
            seen.append(asyncio.get_running_loop().time())
            return super().cancel(msg)

    async def wait() -> None:
        await Call()

    async def main() -> None:
        kept.append(asyncio.create_task(wait()))
        await asyncio.sleep(5)

    seen: list[float] = []
    kept: list[asyncio.Task[None]] = []
    run(main())
    assert seen == [5.0] and kept[0].cancelled()


def test_what_is_left_is_cancelled_oldest_first_and_may_take_an_hour() -> None:
    ended: list[tuple[float, str]] = []

    async def worker(i: int) -> None:
        try:
            if i % 7 == 0:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(3599)
            ended.append((now_s(), f"worker {i}"))
            raise

    async def numbers(i: int) -> AsyncIterator[int]:
        try:
            yield i
        finally:
            ended.append((now_s(), f"generator {i}"))

    async def main() -> None:
        kept.extend([asyncio.create_task(worker(i)) for i in range(100)])
        kept.extend([numbers(i) for i in range(30)])
        for generator in kept[100:]:
            await anext(generator)
        await asyncio.sleep(9e6)

    kept: list[Any] = []
    run(main())
    workers = [(9e6 + 3599, f"worker {i}") for i in range(0, 100, 7)]
    assert ended == workers + [(9e6 + 3599, f"generator {i}") for i in range(30)]


def test_what_fails_while_it_is_cancelled_is_reported() -> None:
    reports: list[dict[str, Any]] = []

    async def worker() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("broken")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
        kept.append(asyncio.create_task(worker(), name="worker"))
        await asyncio.sleep(0)

    kept: list[object] = []
    run(main())
    assert [(str(report["exception"]), report["task"].get_name()) for report in reports] == [
        ("broken", "worker")
    ]


def test_a_task_that_will_not_end_is_an_error() -> None:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)  # asyncio's word on a pending task that is destroyed
        kept.append(asyncio.create_task(stubborn(), name="stubborn"))
        await asyncio.sleep(100)

    kept: list[object] = []
    with pytest.raises(VirtualTimeExceeded, match="stubborn: .*test_virtual_time_ends.py") as caught:
        run(main())
    assert caught.value.limit_s == 100 + 3600
    kept.clear()
    gc.collect()


def test_nothing_global_is_changed() -> None:
    def state() -> tuple[object, ...]:
        policy = asyncio.get_event_loop_policy()
        signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
        return (
            policy,
            signals,
            sys.get_asyncgen_hooks(),
        )

    def held() -> set[object]:
        return {*threading.enumerate(), *Path("/proc/self/fd").iterdir()}

    async def main() -> object:
        return signal.getsignal(signal.SIGINT)

    before, held_before = state(), held()
    assert run(main()) is signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError):
        run(divide())
    assert state() == before and held() <= held_before  # fewer: a thread of an earlier test may end meanwhile
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()


async def divide() -> float:
    return 1 / 0


async def test_a_run_inside_a_running_loop_is_refused() -> None:
    main = divide()
    with pytest.raises(RuntimeError, match="await instead"):
        run(main)
    main.close()


def test_a_runner_takes_the_loop_and_keeps_its_clock() -> None:
    async def main() -> float:
        await asyncio.sleep(60)
        return now_s()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(main()) == 60.0
        assert runner.run(main()) == 120.0


# --------------------------------------------------------------------------- programs that can't continue


def test_a_deadlock_names_the_tasks_and_where_they_wait() -> None:
    async def consumer(queue: asyncio.Queue[int]) -> None:
        await queue.get()

    async def main() -> None:
        await asyncio.sleep(3)
        async with asyncio.TaskGroup() as group:
            group.create_task(consumer(asyncio.Queue()), name="consumer")
            group.create_task(asyncio.Event().wait(), name="listener")

    with pytest.raises(Deadlock, match="deadlock at 3 s") as caught:
        run(main())
    assert caught.value.time_s == 3.0
    outer, inner, listener = caught.value.waiting
    line = consumer.__code__.co_firstlineno + 1
    assert outer.startswith("Task-1: ")
    assert "TaskGroup.__aexit__" in outer
    assert inner.startswith(f"consumer: {__file__}:{line} (")
    assert inner.endswith("(Queue.get)")
    assert listener.startswith("listener: ")
    assert "locks.py:" in listener
    assert all(text in str(caught.value) for text in caught.value.waiting)


def test_a_deadlock_of_many_tasks_lists_the_first() -> None:
    async def main() -> None:
        await asyncio.gather(*(asyncio.Event().wait() for _ in range(1000)))

    with pytest.raises(Deadlock, match="waiting tasks: 1001\n") as caught:
        run(main())
    assert len(caught.value.waiting) == 1001
    assert str(caught.value).endswith("\n  and 981 more")


def test_a_deadlock_still_lets_tasks_clean_up() -> None:
    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(10)
            ended_s.append(now_s())

    ended_s: list[float] = []
    with pytest.raises(Deadlock):
        run(main())
    assert ended_s == [10.0]


def test_a_sleep_without_end_is_a_deadlock_whatever_the_limit() -> None:
    with pytest.raises(Deadlock):
        run(asyncio.sleep(float("inf")), limit_s=float("inf"))


def test_time_past_the_limit_is_an_error_and_cleaning_up_still_goes() -> None:
    async def main() -> None:
        try:
            while True:
                await asyncio.sleep(60)
                ticks.append(now_s())
        finally:
            await asyncio.sleep(60)
            ticks.append(-now_s())

    ticks: list[float] = []
    with pytest.raises(VirtualTimeExceeded, match="due at 280 s .* limit of 220 s") as caught:
        run(main(), start_s=100.0, limit_s=120.0)
    assert (caught.value.limit_s, caught.value.next_s, len(caught.value.waiting)) == (220.0, 280.0, 1)
    assert ticks == [160.0, 220.0, -280.0]


@pytest.mark.parametrize(
    ("start_s", "limit_s"), [(float("nan"), 1.0), (float("inf"), 1.0), (0.0, 0.0), (0.0, float("nan"))]
)
def test_times_that_are_no_numbers_are_refused(start_s: float, limit_s: float) -> None:
    with pytest.raises(ValueError, match="start_s must be finite and limit_s above 0"):
        VirtualTimeLoop(start_s=start_s, limit_s=limit_s)


def test_a_timer_at_nan_is_refused() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(float("nan"), print)

    with pytest.raises(ValueError, match="NaN"):
        run(main())
