"""A loop in virtual time: what passes at once, in which order, and that nothing is by chance."""

import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.core.errors import Deadlock
from flexmarl.core.testing.virtual_time import VirtualTimeLoop, run

from ...patience import PATIENCE_S
from .clock import now_s

HERE = Path(__file__).parents[1]
SOURCES = HERE.parent.parent / "scripts" / "src"


# --------------------------------------------------------------------------- the clock


def test_a_million_hours_pass_at_once() -> None:
    async def main() -> float:
        await asyncio.sleep(3600 * 1000)
        return now_s()

    assert run(main()) == 3_600_000.0


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
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, timeout=PATIENCE_S
    ).stdout


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
