"""Telemetry of one process: structured log lines, event-loop lag, memory, CPU time.

Logging. In a process of flexmarl's own, ``configure_logging`` decides. In a service that embeds flexmarl the service
does, and nothing of it is changed: if it has configured structlog, our lines go there; if not, they are records of the
standard library's loggers ``flexmarl.*``, under its handlers and levels. ``delivery_context`` adds the request that was
being served to each line; a service puts it among its own structlog processors.

structlog and psutil are imported when they are needed: they would double the import time of an actor system.
"""

import asyncio
import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, TextIO, cast, get_args

from .base.texts import printable
from .call_context import current_delivery

if TYPE_CHECKING:
    import psutil
    from structlog.typing import Processor

# An idle process wakes once a second for this alone.
_LAG_INTERVAL_S = 1.0

Line = MutableMapping[str, Any]
LogLevel = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """``loop_lag_ms``: the longest delay of a timer of the event loop since the last reading; 0 in the first one.
    ``rss_mib``: resident memory. ``cpu_s``: CPU seconds used since the process began."""

    pid: int
    loop_lag_ms: float
    rss_mib: float
    cpu_s: float


class LoopLag:
    """Measures the delay of a timer that is due every second; a block of the loop that is shorter may not show.

    It begins with the first reading: without one the process has no timer, and a loop in virtual time can come to its
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
        """The longest delay since the last reading, in milliseconds; 0 in the first one, which begins the
        measurement."""
        if self._timer is None:
            self._schedule()
        worst_s, self._worst_s = max(self._worst_s, time.monotonic() - self._due), 0.0
        return worst_s * 1e3

    def close(self) -> None:
        """Ends the measurement. Can be repeated."""
        if self._timer is not None:
            self._timer.cancel()


@cache
def _process_of(pid: int) -> "psutil.Process":
    """Making one reads three files."""
    import psutil

    return psutil.Process(pid)


def process_usage(lag: LoopLag) -> ProcessUsage:
    """The figures of this process now. ``lag``: is read, as by ``read_ms``. In virtual time without memory and CPU
    seconds: all simulated processes are this one, and reading these took a twelfth of a simulation's time."""
    if getattr(asyncio.get_running_loop(), "is_virtual", False):
        return ProcessUsage(os.getpid(), lag.read_ms(), 0.0, 0.0)
    process = _process_of(os.getpid())
    with process.oneshot():
        cpu = process.cpu_times()
        return ProcessUsage(
            process.pid, lag.read_ms(), process.memory_info().rss / 2**20, cpu.user + cpu.system
        )


def delivery_context(logger: Any, method: str, line: Line) -> Line:
    """A structlog processor: adds ``actor``, ``node``, ``message_id`` and ``trace_id`` to lines that are logged while a
    request is served, by its handler or by a task that this started. Fields of the line itself take precedence.

    A message id is ``SENDER:NUMBER``. The trace id is the id of the first request of a chain of calls, in every process
    that takes part.
    """
    delivery = current_delivery.get()
    if delivery is not None:
        line.setdefault("actor", delivery.actor)
        line.setdefault("node", delivery.node)
        line.setdefault("message_id", delivery.message_id)
        line.setdefault("trace_id", f"{delivery.trace_id:016x}")
    return line


def show_control_characters(logger: Any, method: str, line: Line) -> Line:
    """A structlog processor for lines that are shown on a terminal: texts in them may be another host's."""
    for key, value in line.items():
        if isinstance(value, str):
            line[key] = printable(value)
    return line


class _Logger:
    """Chooses between structlog and the standard library at each line: a service may configure structlog after it has
    imported flexmarl."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._standard = logging.getLogger(name)

    def __getattr__(self, method: str) -> Any:
        structlog = sys.modules.get("structlog")  # not imported by anyone: not configured
        if structlog is not None and structlog.is_configured():
            return getattr(structlog.get_logger(self._name), method)
        return partial(self._log, method)

    def _log(self, method: str, event: str, *, exc_info: Any = None, **fields: Any) -> None:
        """A record with a readable message, and the fields as ``record.flexmarl``."""
        if method == "exception":
            method, exc_info = "error", True if exc_info is None else exc_info
        level = logging.getLevelNamesMapping()[method.upper()]
        if not self._standard.isEnabledFor(level):
            return
        line = delivery_context(self, method, fields)
        text = " ".join([event, *(f"{name}={value!r}" for name, value in line.items())])
        # The caller's frame is the second: ``partial`` has no Python frame.
        self._standard.log(level, "%s", text, exc_info=exc_info, stacklevel=2, extra={"flexmarl": dict(line)})


class EventLogger(Protocol):
    """Logs events with fields: ``log.warning("message refused", peer="a")``."""

    def debug(self, event: str, **fields: Any) -> Any:
        """Logs what only a developer looks for."""
        ...

    def info(self, event: str, **fields: Any) -> Any:
        """Logs a normal event."""
        ...

    def warning(self, event: str, **fields: Any) -> Any:
        """Logs an event after which the program continues, and that someone should look at."""
        ...

    def error(self, event: str, **fields: Any) -> Any:
        """Logs a failure."""
        ...

    def exception(self, event: str, **fields: Any) -> Any:
        """Logs a failure with the traceback of the exception that is being handled."""
        ...


def get_logger(name: str) -> EventLogger:
    """The logger of a module of flexmarl: ``log = get_logger(__name__)``."""
    return cast(EventLogger, _Logger(name))


# The events and keys that a log counts apart: more than a run has peers.
_MOST_PERIODS = 256


class BoundedLog:
    """Logs events that a peer can cause as often as it likes: at most ``lines`` of each within ``period_s``. Events
    with another ``key`` (an address, say) are counted apart. Those that are left out are counted: as ``not_logged`` of
    the next line, or of the last one, by ``close``.

    Memory is bounded too: when ``_MOST_PERIODS`` are counted, the events of all new keys share ``lines``.
    """

    def __init__(self, logger: EventLogger, lines: int = 10, period_s: float = 60.0) -> None:
        self._logger = logger
        self._lines = lines
        self._period_s = period_s
        self._periods: dict[tuple[str, str], _Period] = {}
        """By event and key."""

    def warning(self, event: str, key: str = "", **fields: Any) -> None:
        """Logs a warning, if there is room for one of ``event`` and ``key``."""
        if self._has_room(event, key, fields):
            self._logger.warning(event, **fields)

    def error(self, event: str, key: str = "", **fields: Any) -> None:
        """Logs an error, if there is room for one of ``event`` and ``key``."""
        if self._has_room(event, key, fields):
            self._logger.error(event, **fields)

    def _has_room(self, event: str, key: str, fields: dict[str, Any]) -> bool:
        now = time.monotonic()
        if (event, key) not in self._periods and len(self._periods) >= _MOST_PERIODS:
            self._end_periods(now)
            if len(self._periods) >= _MOST_PERIODS:
                key = ""
        period = self._periods.get((event, key))
        if period is None or now >= period.end:
            if period is not None and period.not_logged:
                fields["not_logged"] = period.not_logged
            period = self._periods[event, key] = _Period(now + self._period_s)
        if period.lines >= self._lines:
            period.not_logged += 1
            return False
        period.lines += 1
        if period.lines == self._lines:
            fields["further"] = f"counted and not logged for {period.end - now:.0f} s"
        return True

    def _end_periods(self, now: float) -> None:
        """Forgets the periods that are over by ``now``, and logs the counts that no line has reported yet."""
        not_logged: Counter[str] = Counter()
        for (event, key), period in list(self._periods.items()):
            if now >= period.end:
                not_logged[event] += period.not_logged
                del self._periods[event, key]
        for event, count in not_logged.items():
            if count:
                self._logger.warning(event, not_logged=count)

    def close(self) -> None:
        """Logs the counts that no line has reported yet. Can be repeated."""
        self._end_periods(math.inf)


class _Period:
    """The lines of one event and key since the first one, until ``end``."""

    __slots__ = ("end", "lines", "not_logged")

    def __init__(self, end: float) -> None:
        self.end = end
        self.lines = 0
        self.not_logged = 0


class _Lines:
    """A stream that drops lines which can't be written: the log is often on the disk that is full, and logging must
    not fail an actor for that."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def _import_structlog() -> None:
    """Imports structlog without rich. It takes rich, if that is there, for tracebacks that are not used here: a tenth
    of an actor's start. rich can be imported afterwards."""
    if "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # Python's sign for a module that can't be imported
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]


def configure_logging(node: str, stream: IO[str], level: LogLevel = "info") -> None:
    """Writes lines to ``stream``, each with the node's name: JSON, or readable text if it is a terminal. Lines that
    can't be written are lost, and those below ``level`` are left out.

    For processes of flexmarl's own: it configures structlog for the whole process.
    """
    _import_structlog()
    import structlog

    started = round(time.time(), 3)

    def bind_process(logger: Any, method: str, line: Line) -> Line:
        line.setdefault("node", node)
        line.setdefault("started", started)  # incarnations of an actor write to the same file
        return line

    processors: list[Processor] = [structlog.contextvars.merge_contextvars, delivery_context]
    processors += [structlog.processors.add_log_level]
    if stream.isatty():
        clock = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
        processors += [
            clock,
            structlog.processors.format_exc_info,
            show_control_characters,
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
        ]
    else:
        clock = structlog.processors.TimeStamper(fmt="iso")
        exceptions = structlog.processors.format_exc_info
        processors += [bind_process, clock, exceptions, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Lines(stream))),
    )
