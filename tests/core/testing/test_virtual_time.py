"""A loop in virtual time: what passes at once, in which order, what is refused, and that nothing is by chance."""

import asyncio
import contextvars
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.errors import Deadlock, NotInVirtualTime, VirtualTimeExceeded
from flexmarl.core.testing.virtual_time import REFUSED, VirtualTimeLoop, run

HERE = Path(__file__).parents[1]
SOURCES = HERE.parent.parent / "scripts" / "src"


def now_s() -> float:
    return asyncio.get_running_loop().time()


# --------------------------------------------------------------------------- the clock


def test_a_million_hours_pass_at_once() -> None:
    async def main() -> float:
        await asyncio.sleep(3600 * 1000)
        return now_s()

    began_s = time.perf_counter()
    assert run(main()) == 3_600_000.0
    assert time.perf_counter() - began_s < 0.5


def test_no_real_clock_is_read_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def real(*_: Any) -> Any:
        raise AssertionError("the real world was asked")

    async def main() -> float:
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(5))
            group.create_task(asyncio.wait_for(asyncio.sleep(1), 3))
        return now_s()

    with monkeypatch.context() as patched:
        for name in ("time", "monotonic", "perf_counter", "sleep"):
            patched.setattr(time, name, real)
        patched.setattr("selectors.DefaultSelector", real)
        assert run(main()) == 5.0


def test_the_clock_starts_where_it_is_told_and_stands_still_while_something_runs() -> None:
    async def main() -> tuple[float, float]:
        first_s = now_s()
        for _ in range(100):
            await asyncio.sleep(0)
        return first_s, now_s()

    assert run(main(), start_s=1000.0) == (1000.0, 1000.0)
    assert run(main()) == (0.0, 0.0)


def test_a_timer_for_the_past_fires_now() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        fired = loop.create_future()
        loop.call_at(3.0, fired.set_result, None)
        await fired
        return now_s()

    assert run(main(), start_s=10.0) == 10.0


# --------------------------------------------------------------------------- the order of timers


@given(
    timers=st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0, 1.0, 7.0]) | st.floats(0, 1e6), st.booleans()), max_size=300
    )
)
def test_timers_fire_by_time_then_in_the_order_in_which_they_were_set(
    timers: list[tuple[float, bool]],
) -> None:
    async def main() -> list[tuple[float, int]]:
        loop = asyncio.get_running_loop()
        fired: list[tuple[float, int]] = []

        def note(i: int) -> None:
            fired.append((now_s(), i))

        handles = [loop.call_later(delay_s, note, i) for i, (delay_s, _) in enumerate(timers)]
        for handle, (_, is_cancelled) in zip(handles, timers, strict=True):
            if is_cancelled:
                handle.cancel()
        await asyncio.sleep(2e6)
        return fired

    expected = sorted((delay_s, i) for i, (delay_s, is_cancelled) in enumerate(timers) if not is_cancelled)
    assert run(main()) == expected


def test_thousands_of_timers_of_which_half_are_cancelled_keep_the_order() -> None:
    chance = random.Random(7)

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def note(i: int) -> None:
            fired.append((now_s(), i))

        for i in range(5000):
            live[i] = loop.call_later(chance.randrange(1, 50), note, i)
            if chance.random() < 0.5:
                live.pop(chance.choice(list(live))).cancel()
        await asyncio.sleep(100)

    live: dict[int, asyncio.TimerHandle] = {}
    fired: list[tuple[float, int]] = []
    run(main())
    assert fired == sorted((timer.when(), i) for i, timer in live.items())


def test_a_timer_may_set_and_cancel_others() -> None:
    events: list[tuple[float, str]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def note(event: str) -> None:
            events.append((loop.time(), event))

        loop.set_exception_handler(lambda _, context: note(str(context)))

        def outer() -> None:
            note("outer")
            at_the_same_instant.cancel()
            loop.call_later(1, note, "cancelled").cancel()
            loop.call_later(0, note, "inner")

        loop.call_later(2, outer)
        at_the_same_instant = loop.call_later(2, note, "cancelled by outer")
        loop.call_later(2, note, "set before inner")
        await asyncio.sleep(5)

    run(main())
    assert events == [(2.0, "outer"), (2.0, "set before inner"), (2.0, "inner")]


def test_a_cancelled_timer_moves_no_clock_and_takes_no_room() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        live = [loop.call_later(5, lambda: None) for _ in range(50)]
        for _ in range(10_000):
            loop.call_later(10, lambda: None).cancel()
        await asyncio.sleep(0)
        size = len(loop._timers)
        for timer in live:
            timer.cancel()
        sizes.append(size)
        await asyncio.Event().wait()

    sizes: list[int] = []
    with pytest.raises(Deadlock) as caught:
        run(main())
    assert caught.value.time_s == 0.0
    assert 50 <= sizes[0] <= 128


# --------------------------------------------------------------------------- asyncio on top of it


def test_timeouts_expire_at_their_time() -> None:
    async def main() -> list[float]:
        expired_s = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.Event().wait()
        expired_s.append(now_s())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 60)
        expired_s.append(now_s())
        assert await asyncio.wait_for(asyncio.sleep(10, "slept"), 11) == "slept"
        expired_s.append(now_s())
        return expired_s

    assert run(main()) == [3600.0, 3660.0, 3670.0]


def test_a_task_group_cancels_in_the_order_in_which_its_tasks_were_made() -> None:
    cancelled: list[int] = []

    async def waits(i: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(i)

    async def fails() -> None:
        await asyncio.sleep(1)
        raise ValueError("one")

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                for i in range(500):
                    group.create_task(waits(i))
                group.create_task(fails())
        assert [str(error) for error in caught.value.exceptions] == ["one"]

    run(main())
    assert cancelled == list(range(500))


def test_a_cancelled_task_cleans_up_in_virtual_time() -> None:
    async def worker() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(30)

    async def main() -> float:
        task = asyncio.create_task(worker())
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return now_s()

    assert run(main()) == 31.0


def test_context_variables_follow_tasks_and_callbacks_and_never_leak() -> None:
    variable = contextvars.ContextVar("variable", default="external")

    async def child() -> str:
        await asyncio.sleep(1)
        return variable.get()

    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        variable.set("first")
        task = asyncio.create_task(child())
        called = loop.create_future()
        loop.call_later(1, lambda: called.set_result(variable.get()))
        other = contextvars.copy_context()
        other.run(variable.set, "given")
        given_task = asyncio.create_task(child(), context=other)
        given_call = loop.create_future()
        loop.call_at(1, lambda: given_call.set_result(variable.get()), context=other)
        variable.set("second")
        return [await task, await called, await given_task, await given_call]

    assert run(main()) == ["first", "first", "given", "given"]
    assert variable.get() == "external"


def test_an_exception_in_a_callback_goes_to_the_handler_and_the_loop_goes_on() -> None:
    errors: list[object] = []

    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(type(context["exception"])))
        loop.call_later(1, lambda: 1 // 0)
        await asyncio.sleep(2)
        return now_s()

    assert run(main()) == 2.0
    assert errors == [ZeroDivisionError]


def test_debug_mode_works() -> None:
    async def main() -> float:
        await asyncio.sleep(60)
        return now_s()

    with asyncio.Runner(debug=True, loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(main()) == 60.0


def test_a_loop_that_was_stopped_runs_what_is_ready_and_stops() -> None:
    loop = VirtualTimeLoop()
    ran: list[float] = []
    try:
        loop.call_soon(loop.stop)
        loop.call_soon(lambda: ran.append(loop.time()))
        loop.call_later(1, print)
        loop.run_forever()
        loop.stop()
        loop.run_forever()
        assert ran == [0.0]
        assert loop.time() == 0.0
    finally:
        loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1, print)


def test_a_task_may_be_named() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[None]] = [
            loop.create_task(asyncio.sleep(1), name="one"),
            asyncio.create_task(asyncio.sleep(1), name="two"),
        ]
        await asyncio.wait(tasks)
        return [task.get_name() for task in tasks]

    assert run(main()) == ["one", "two"]


def test_a_task_factory_is_used() -> None:
    made: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coro.__qualname__)
        return asyncio.Task(coro, loop=loop, **options)

    async def main() -> str:
        asyncio.get_running_loop().set_task_factory(factory)
        task = asyncio.create_task(asyncio.sleep(1), name="named")
        await task
        assert made == ["sleep"]
        return task.get_name()

    assert run(main()) == "named"


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
    with pytest.raises(VirtualTimeExceeded, match="stubborn: .*test_virtual_time.py") as caught:
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
            threading.active_count(),
            len([*Path("/proc/self/fd").iterdir()]),
        )

    async def main() -> object:
        return signal.getsignal(signal.SIGINT)

    before = state()
    assert run(main()) is signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError):
        run(divide())
    assert state() == before
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


# --------------------------------------------------------------------------- the real world


def test_every_method_of_a_loop_either_works_or_is_refused() -> None:
    """A method that a later Python adds fails here until someone decides."""
    works = {
        *("run_forever", "run_until_complete", "stop", "is_running", "is_closed", "close", "time"),
        *("call_soon", "call_soon_threadsafe", "call_later", "call_at", "create_future", "create_task"),
        *("set_task_factory", "get_task_factory", "get_debug", "set_debug"),
        *("get_exception_handler", "set_exception_handler"),
        *("default_exception_handler", "call_exception_handler"),
        *("shutdown_asyncgens", "shutdown_default_executor"),
    }
    methods = {name for name in dir(asyncio.AbstractEventLoop) if not name.startswith("_")}
    assert methods == works | set(REFUSED)
    assert not works & set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_the_real_world_is_refused(name: str) -> None:
    async def main() -> None:
        await getattr(asyncio.get_running_loop(), name)(0, print)

    with pytest.raises(NotInVirtualTime, match=f"^{name} waits for the real world") as caught:
        run(main())
    assert caught.value.operation == name


@pytest.mark.parametrize(
    "ask",
    [
        lambda: asyncio.to_thread(print),
        lambda: asyncio.create_subprocess_exec("true"),
        lambda: asyncio.open_connection("localhost", 1),
        lambda: asyncio.start_server(lambda *_: None, "localhost"),
    ],
)
def test_what_asyncio_builds_on_it_is_refused(ask: Callable[[], Any]) -> None:
    async def main() -> None:
        await ask()

    with pytest.raises(NotInVirtualTime):
        run(main())


def test_calls_from_another_thread_are_refused_and_from_its_own_allowed() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        events: list[str] = []

        def foreign() -> None:
            try:
                loop.call_soon_threadsafe(events.append, "never")
            except NotInVirtualTime as error:
                events.append(error.operation)

        thread = threading.Thread(target=foreign)
        thread.start()
        thread.join()
        context = contextvars.copy_context()
        context.run(variable.set, "own")
        loop.call_soon_threadsafe(lambda: events.append(variable.get()), context=context)
        await asyncio.sleep(0)
        return events

    variable = contextvars.ContextVar[str]("variable")

    assert run(main()) == ["a call from another thread (call_soon_threadsafe)", "own"]


def test_a_dropped_async_generator_is_closed() -> None:
    closed_s: list[float] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(5)
            closed_s.append(now_s())

    async def main() -> None:
        async for _ in numbers():
            break
        await asyncio.sleep(60)
        assert closed_s == [5.0]

    run(main())


# --------------------------------------------------------------------------- the same each time


def test_sets_of_tasks_and_futures_keep_their_order_and_names_begin_anew() -> None:
    async def main() -> list[list[int | str]]:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(1000)]
        tasks = [asyncio.create_task(asyncio.sleep(i % 3)) for i in range(1000)]
        done, pending = await asyncio.wait([*futures, *tasks], timeout=1.5)
        order: list[list[int | str]] = [
            [tasks.index(task) for task in done if isinstance(task, asyncio.Task)]
        ]
        order.append([futures.index(future) for future in pending if not isinstance(future, asyncio.Task)])
        order.append([task.get_name() for task in tasks])
        await asyncio.gather(*tasks)
        return order

    first = run(main())
    litter = [bytearray(i % 400) for i in range(20_000)]
    del litter[::2]
    assert run(main()) == first
    assert first[2] == [f"Task-{i}" for i in range(2, 1002)]


def test_tasks_and_futures_are_equal_to_themselves_only() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(3)]
        assert len({*futures, *futures}) == 3
        assert len({hash(future) for future in futures}) == 3
        assert futures[0] == futures[0] != futures[1]

    run(main())


def storm(seed: int, hash_seed: str) -> bytes:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(SOURCES)}
    command = [sys.executable, str(HERE / "storm.py"), str(seed)]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=60).stdout


def test_a_storm_of_tasks_logs_the_same_bytes_in_every_process() -> None:
    """Twice in each of two processes that hash and lay out memory differently."""
    one, other = storm(1, "1"), storm(1, "2")
    first, second, rest = one.split(b"\n\n")
    assert rest == b""
    assert first == second, "two runs in one process differ"
    assert one == other, "two processes differ"
    assert len(first.splitlines()) > 1000
    for event in (
        b"is cancelled",
        b"closes generator",
        b"race:",
        b"group failed",
        b"got nothing",
        b"holds the lock",
    ):
        assert event in first
    assert storm(2, "1") != one
