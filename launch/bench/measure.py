"""The clock of every contender, so that all are measured by the same loops, and the statistics of what it gave."""

import asyncio
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from ..errors import BenchmarkFailed

Call = Callable[[], Awaitable[object]]
Contender = TypeVar("Contender")

MAXIMUM_STALL_S = 60.0


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of ``values`` that at least ``share`` (0 to 1) of them do not exceed (nearest rank)."""
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each figure, the median of the rounds."""
    return {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}


async def one_after_another(call: Call, seconds: float) -> list[float]:
    """The duration in microseconds of every call made within ``seconds``; at least one."""
    durations: list[float] = []
    clock = time.perf_counter
    now = clock()
    end = now + seconds
    while now < end:
        start = clock()
        await call()
        now = clock()
        durations.append((now - start) * 1e6)
    return durations


def one_after_another_blocking(call: Callable[[], object], seconds: float) -> list[float]:
    """As ``one_after_another``, of a function that blocks."""
    durations: list[float] = []
    clock = time.perf_counter
    now = clock()
    end = now + seconds
    while now < end:
        start = clock()
        call()
        now = clock()
        durations.append((now - start) * 1e6)
    return durations


async def calls_in_flight(call: Call, seconds: float, in_flight: int) -> tuple[int, float]:
    """How many calls ended and the seconds they took, ``in_flight`` of them under way at any moment.

    Each of ``in_flight`` tasks awaits one call after the other: no task is made in the timed part. After
    ``seconds`` no new call begins; those under way are waited for, and count with their time. Raises what a call
    raised, and BenchmarkFailed where the last of them take longer than MAXIMUM_STALL_S.
    """
    begin = asyncio.Event()
    going_on = True
    ended = 0

    async def worker() -> None:
        nonlocal ended
        await begin.wait()
        while going_on:
            await call()
            ended += 1

    def stop() -> None:
        nonlocal going_on
        going_on = False

    workers = [asyncio.create_task(worker()) for _ in range(in_flight)]
    await asyncio.sleep(0)  # all of them wait for the start
    start = time.perf_counter()
    begin.set()
    timer = asyncio.get_running_loop().call_later(seconds, stop)
    try:
        done, late = await asyncio.wait(
            workers, timeout=seconds + MAXIMUM_STALL_S, return_when=asyncio.FIRST_EXCEPTION
        )
        elapsed_s = time.perf_counter() - start
        for task in done:
            task.result()
        if late:
            raise BenchmarkFailed(
                f"{len(late)} of {in_flight} calls in flight did not end within {MAXIMUM_STALL_S:g} s"
            )
    finally:
        timer.cancel()
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return ended, elapsed_s


def in_turns(contenders: Sequence[Contender], slices: int) -> Iterable[Contender]:
    """Who is measured next: each ``slices`` times, and each as often first as second, so that noise hits all alike."""
    for number in range(slices):
        yield from contenders if number % 2 == 0 else reversed(contenders)
