"""Measures flexmarl for ``flexmarl bench calls``, through its public interface."""

import asyncio
import time
from typing import Any

import numpy as np
import psutil

from ...core.errors import ActorDead
from ...core.ref import ActorRef
from ...core.system import ActorSystem
from ...core.wire.zeromq import Tcp
from ..errors import BenchmarkFailed
from .array_actor import Sink
from .bench_actors import Caller, Echo
from .measure import (
    MAXIMUM_STALL_S,
    ONE_WAY_BURST,
    calls_in_flight,
    gathered,
    one_after_another,
    one_way,
)

_HANGING = 100


def new_system(*, curve: bool) -> ActorSystem:
    """A system whose processes are connected by TCP with CURVE, or else by ipc."""
    return ActorSystem("bench", tcp=Tcp() if curve else None)


async def latency(echo: ActorRef[Echo], argument: dict[str, str] | None, seconds: float) -> list[float]:
    """Microseconds of each call made one after the other within ``seconds``."""
    if argument is None:
        return await one_after_another(lambda: echo.api.empty(), seconds)
    return await one_after_another(lambda: echo.api.echo_dict(argument), seconds)


async def calls_per_s(echo: ActorRef[Echo], seconds: float, in_flight: int) -> float:
    count, elapsed_s = await calls_in_flight(lambda: echo.api.empty(), seconds, in_flight)
    return count / elapsed_s


async def gathered_per_s(
    echo: ActorRef[Echo], argument: dict[str, str] | None, seconds: float, at_once: int
) -> float:
    if argument is None:
        return await gathered(lambda: echo.api.empty(), seconds, at_once)
    return await gathered(lambda: echo.api.echo_dict(argument), seconds, at_once)


async def one_way_per_s(echo: ActorRef[Echo], seconds: float) -> float:
    async def burst(first: int) -> None:
        for number in range(first, first + ONE_WAY_BURST):
            await echo.tell("hear", number)

    return await one_way(burst, lambda: echo.within(MAXIMUM_STALL_S).heard(), seconds)


async def fan_in_calls_per_s(
    callers: list[ActorRef[Caller]], echo: ActorRef[Echo], seconds: float, in_flight: int
) -> float:
    """Calls per second of one actor by all ``callers`` together, each with ``in_flight`` concurrent calls."""
    timeout_s = seconds + 2 * MAXIMUM_STALL_S
    start = time.perf_counter()
    counts = await asyncio.gather(
        *(caller.within(timeout_s).run(echo, seconds, in_flight) for caller in callers)
    )
    return sum(counts) / (time.perf_counter() - start)


async def array_gb_s(sink: ActorRef[Sink], array: np.ndarray[Any, np.dtype[np.uint8]], stamp: int) -> float:
    """10^9 bytes per second of one call with ``array``, from the request to the reply. See ``Bare.array_gb_s``."""
    array[-1] = stamp
    start = time.perf_counter()
    arrived = await sink.within(MAXIMUM_STALL_S).take(array)
    elapsed_s = time.perf_counter() - start
    if arrived != stamp:
        raise BenchmarkFailed("the array did not arrive as it was sent")
    return array.nbytes / elapsed_s / 1e9


async def start_and_rest(*, curve: bool, rest_s: float) -> dict[str, float]:
    """Measures an actor's process: start, rest and death.

    Seconds from ``spawn`` to the first reply; resident memory and percentage of one core during ``rest_s`` without
    calls; milliseconds from ``kill -9`` until the last of ``_HANGING`` pending calls has failed.
    """
    async with new_system(curve=curve) as system:
        start = time.perf_counter()
        echo = await system.spawn(Echo, "echo", process=True)
        await echo.api.empty()
        first_reply_s = time.perf_counter() - start
        process = psutil.Process(await echo.api.pid())
        before = process.cpu_times()
        await asyncio.sleep(rest_s)
        after = process.cpu_times()
        used_s = after.user + after.system - before.user - before.system
        rss_mib = process.memory_info().rss / 2**20
        hanging = [asyncio.ensure_future(echo.within(MAXIMUM_STALL_S).wait()) for _ in range(_HANGING)]
        await echo.api.empty()  # sent after them: when it returns, they have arrived
        start = time.perf_counter()
        process.kill()
        errors = await asyncio.gather(*hanging, return_exceptions=True)
        killed_s = time.perf_counter() - start
        if not all(isinstance(error, ActorDead) and error.actor == echo.name for error in errors):
            raise BenchmarkFailed(f"calls to a killed actor did not raise ActorDead: {errors[0]!r}")
        return {
            "spawn_first_reply_s": first_reply_s,
            "idle_rss_mib": rss_mib,
            "idle_cpu_percent": round(100 * used_s / rest_s, 3),  # rounds off the error of subtracting floats
            "kill_to_dead_ms": 1e3 * killed_s,
        }
