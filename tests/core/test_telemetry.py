"""The event loop's lag: what blocks the loop shows, and what does not, does not."""

import asyncio
import os
import time

from flexmarl.core.telemetry import LoopLag, process_statistics


async def test_a_blocked_loop_shows_once() -> None:
    lag = LoopLag()
    await asyncio.sleep(0)
    time.sleep(0.6)  # noqa: ASYNC251  # blocks the loop on purpose
    for _ in range(3):  # the late timer runs
        await asyncio.sleep(0)
    statistics = process_statistics(lag)
    assert statistics.loop_lag_ms >= 300
    assert statistics.pid == os.getpid() and statistics.rss_mib > 1 and statistics.cpu_s > 0
    assert lag.read_ms() < 300
    lag.close()
