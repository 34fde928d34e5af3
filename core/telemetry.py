"""What a process says of itself: structured log lines, event-loop lag, memory, CPU time."""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TextIO

import psutil
import structlog

_LAG_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class ProcessStatistics:
    """``loop_lag_ms``: the longest time, since this was last asked, that the event loop came late to a timer.
    ``rss_mib``: resident memory; ``cpu_s``: CPU seconds used since the process began."""

    pid: int
    loop_lag_ms: float
    rss_mib: float
    cpu_s: float


class LoopLag:
    """Measures how late the running loop calls a timer that is due every quarter of a second."""

    def __init__(self) -> None:
        self._worst_s = 0.0
        self._schedule()

    def _schedule(self) -> None:
        self._due = time.monotonic() + _LAG_INTERVAL_S  # not the loop's clock: uvloop's counts milliseconds
        self._timer = asyncio.get_running_loop().call_later(_LAG_INTERVAL_S, self._tick)

    def _tick(self) -> None:
        self._worst_s = max(self._worst_s, time.monotonic() - self._due)
        self._schedule()

    def read_ms(self) -> float:
        worst_s, self._worst_s = max(self._worst_s, time.monotonic() - self._due), 0.0
        return worst_s * 1e3

    def close(self) -> None:
        self._timer.cancel()


def process_statistics(lag: LoopLag) -> ProcessStatistics:
    process = psutil.Process()
    with process.oneshot():
        cpu = process.cpu_times()
        return ProcessStatistics(
            process.pid, lag.read_ms(), process.memory_info().rss / 2**20, cpu.user + cpu.system
        )


def configure_logging(actor: str, stream: TextIO) -> None:
    """JSON lines on ``stream``, each bound to the actor's name. Only for processes that are flexmarl's own."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(stream),
    )
    structlog.contextvars.bind_contextvars(actor=actor, started=round(time.time(), 3))
