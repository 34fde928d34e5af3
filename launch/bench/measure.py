"""The timed loops that all contenders share, and the statistics of their results.

It is imported in measured processes, whose memory is measured too: no large imports.
"""

import asyncio
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from ..errors import BenchmarkFailed

Call = Callable[[], Awaitable[object]]
Report = Callable[[str], None]
"""Called with the name of the part that is measured next."""
Contender = TypeVar("Contender")

MAXIMUM_STALL_S = 60.0
# Messages between two readings of the clock: a reading takes a tenth of a message's time.
ONE_WAY_BURST = 64


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of ``values`` that at least ``share`` (0 to 1) of them do not exceed (nearest rank)."""
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]


def rounded(value: float) -> float:
    """``value`` with four significant digits: more would be noise."""
    return float(f"{value:.4g}") if abs(value) < 1e4 else round(value)


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over the rounds."""
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
    """Like ``one_after_another``, for a blocking function."""
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
    """The number of calls that ended and the seconds they took, with ``in_flight`` concurrent calls.

    Each of ``in_flight`` tasks awaits one call after the other, so no task is made in the timed part. After
    ``seconds`` no new call begins; pending calls are awaited, and count with their time. Raises the error of a failed
    call, and BenchmarkFailed if the last calls take longer than MAXIMUM_STALL_S.
    """
    begin = asyncio.Event()
    running = True
    ended = 0

    async def worker() -> None:
        nonlocal ended
        await begin.wait()
        while running:
            await call()
            ended += 1

    def stop() -> None:
        nonlocal running
        running = False

    workers = [asyncio.create_task(worker()) for _ in range(in_flight)]
    await asyncio.sleep(0)  # every task waits for the start
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


async def gathered(call: Call, seconds: float, at_once: int) -> float:
    """Calls per second, as users write them: ``gather`` of ``at_once`` calls, again and again for ``seconds``.

    Raises the error of a failed call, and TimeoutError if a round takes longer than MAXIMUM_STALL_S.
    """
    ended = 0
    start = time.perf_counter()
    while (elapsed_s := time.perf_counter() - start) < seconds:
        async with asyncio.timeout(MAXIMUM_STALL_S):
            await asyncio.gather(*(call() for _ in range(at_once)))
        ended += at_once
    return ended / elapsed_s


async def one_way(
    burst: Callable[[int], Awaitable[None]], arrived: Callable[[], Awaitable[int]], seconds: float
) -> float:
    """Messages without a reply per second, from the first one to the reply with the number of arrived messages.

    ``burst``: sends ONE_WAY_BURST messages, numbered from the one given. Raises BenchmarkFailed if one was lost.
    """
    before = await arrived()
    sent = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        await burst(sent)
        sent += ONE_WAY_BURST
    count = await asyncio.wait_for(arrived(), MAXIMUM_STALL_S) - before
    elapsed_s = time.perf_counter() - start
    if count != sent:
        raise BenchmarkFailed(f"{sent} one-way messages were sent and {count} arrived")
    return sent / elapsed_s


def in_turns(contenders: Sequence[Contender], slices: int) -> Iterable[Contender]:
    """The order of measurement: each contender ``slices`` times, first as often as second, so that noise hits all."""
    for number in range(slices):
        yield from contenders if number % 2 == 0 else reversed(contenders)
