"""What a process says of itself: structured log lines, event-loop lag, memory, CPU time.

Logging. In a process that is flexmarl's own, ``configure_logging`` decides. In a service that embeds flexmarl the
service does, and nothing of it is changed: where it has configured structlog, our lines go there; where it has not,
they are records of the standard library's loggers ``flexmarl.*``, under its handlers and levels. ``delivery_context``
says in each line which request was being served; a service puts it among its own structlog processors.
"""

import asyncio
import logging
import time
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO, cast

import psutil
import structlog
from structlog.typing import FilteringBoundLogger, Processor

from .call_context import current_delivery

# An idle process wakes once a second for this alone.
_LAG_INTERVAL_S = 1.0
# From the record back to the line that logged: logging's caller, structlog's bound logger (3 frames).
_FRAMES_OF_STRUCTLOG = 4

Line = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProcessStatistics:
    """``loop_lag_ms``: the longest time, since this was last asked, that the event loop came late to a timer; 0
    when it is asked for the first time.
    ``rss_mib``: resident memory; ``cpu_s``: CPU seconds used since the process began."""

    pid: int
    loop_lag_ms: float
    rss_mib: float
    cpu_s: float


class LoopLag:
    """Measures how late the running loop calls a timer that is due every second; no shorter block is sure to show.

    It begins when it is first read: a process that nobody asks has no timer, and a loop in virtual time can come to its
    end.
    """

    def __init__(self) -> None:
        self._worst_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def _schedule(self) -> None:
        self._due = time.monotonic() + _LAG_INTERVAL_S  # not the loop's clock: uvloop's counts milliseconds
        self._timer = asyncio.get_running_loop().call_later(_LAG_INTERVAL_S, self._tick)

    def _tick(self) -> None:
        self._worst_s = max(self._worst_s, time.monotonic() - self._due)
        self._schedule()

    def read_ms(self) -> float:
        if self._timer is None:
            self._schedule()
        worst_s, self._worst_s = max(self._worst_s, time.monotonic() - self._due), 0.0
        return worst_s * 1e3

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def process_statistics(lag: LoopLag) -> ProcessStatistics:
    process = psutil.Process()
    with process.oneshot():
        cpu = process.cpu_times()
        return ProcessStatistics(
            process.pid, lag.read_ms(), process.memory_info().rss / 2**20, cpu.user + cpu.system
        )


def delivery_context(logger: Any, method: str, line: Line) -> Line:
    """A structlog processor: binds ``actor``, ``node``, ``message_id`` and ``trace_id`` to what is logged while a
    request is served, by its handler or by a task that this started. What a line says itself comes first.

    A message id is ``SENDER:NUMBER``. The trace id is that of the first request of a chain, in every process it
    leads to.
    """
    delivery = current_delivery.get()
    if delivery is not None:
        line.setdefault("actor", delivery.actor)
        line.setdefault("node", delivery.node)
        line.setdefault("message_id", delivery.message_id)
        line.setdefault("trace_id", f"{delivery.trace_id:016x}")
    return line


def _to_record(logger: Any, method: str, line: Line) -> tuple[tuple[str], dict[str, Any]]:
    """The last processor for the standard library: a readable message, and the fields as ``record.flexmarl``."""
    event = line.pop("event")
    options: dict[str, Any] = {"exc_info": line.pop("exc_info", None), "stacklevel": _FRAMES_OF_STRUCTLOG}
    text = " ".join([str(event), *(f"{name}={value!r}" for name, value in line.items())])
    return (text,), options | {"extra": {"flexmarl": dict(line)}}


class _Logger:
    """Decides line by line: a service may configure structlog after it has imported us."""

    def __init__(self, name: str) -> None:
        self._structlog = structlog.get_logger(name)
        # Not by structlog's LoggerFactory, which sets the logger class of the whole process.
        self._standard = structlog.wrap_logger(
            logging.getLogger(name),
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.contextvars.merge_contextvars,
                delivery_context,
                _to_record,
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
        )

    def __getattr__(self, method: str) -> Any:
        return getattr(self._structlog if structlog.is_configured() else self._standard, method)


def get_logger(name: str) -> FilteringBoundLogger:
    """The logger of a module of flexmarl's: ``log = get_logger(__name__)``."""
    return cast(FilteringBoundLogger, _Logger(name))


class _Lines:
    """A stream that takes no line rather than to fail whoever logs: the log is often on the disk that is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def configure_logging(node: str, stream: TextIO) -> None:
    """Lines on ``stream``, each bound to the node's name: JSON, or readable where it is a terminal. Those that can't be
    written are lost.

    For processes that are flexmarl's own; it changes how the whole process logs by structlog.
    """
    started = round(time.time(), 3)

    def bind_process(logger: Any, method: str, line: Line) -> Line:
        line.setdefault("node", node)
        line.setdefault("started", started)  # tells incarnations apart: they write to the same file
        return line

    processors: list[Processor] = [structlog.contextvars.merge_contextvars, delivery_context]
    processors += [structlog.processors.add_log_level]
    if stream.isatty():
        clock = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
        processors += [
            clock,
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
        ]
    else:
        clock = structlog.processors.TimeStamper(fmt="iso")
        exceptions = structlog.processors.format_exc_info
        processors += [bind_process, clock, exceptions, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Lines(stream))),
    )
