"""The thread of one sink.

    the loop  ── put ──>  a bounded queue  ──>  the thread: open, write, write, ..., close

A sink may block, hang and raise: the loop never waits for it, but at the end, for a limited time. The thread is a
daemon, so that one that hangs does not keep the process either. Figures that find the queue full, or whose ``write``
raises, are lost and counted.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from ....actors.run_events import RunEvent, SinkClosed, SinkFailed, SinkOpened
from .sink import Figures, Sink, SinkRun
from .sink_series import SinkSeries

QUEUED: Final = 1000
"""The most figures that wait for a sink."""

Made = Callable[[], Figures]


class SinkThread:
    """``report`` is called in the loop: with ``SinkOpened``, with ``SinkFailed`` for the first error, and at the end
    with ``SinkClosed``."""

    def __init__(self, name: str, sink: Sink, run: SinkRun, report: Callable[[RunEvent], None]) -> None:
        """To be called in the loop, which is running."""
        self.name = name
        self._sink, self._run = sink, run
        self._report: Callable[[RunEvent], None] | None = report
        """None after the end: a thread that was given up may come late."""
        self._series = SinkSeries(run.folder / "sinks" / f"{name.replace('/', '_')}.json")
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._waiting: deque[Made] = deque()
        self._closing = self._given_up = False
        self._opened = self._failed = False
        self._put_count = self._written = self._skipped = self._errors = 0
        self._run_failed = False
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()

    def put(self, figures_of: Made) -> None:
        """Never waits. ``figures_of`` is called in the thread."""
        self._put_count += 1
        with self._changed:
            if len(self._waiting) < QUEUED:
                self._waiting.append(figures_of)
                self._changed.notify()

    async def close(self, timeout_s: float, *, failed: bool) -> None:
        """Waits until all is written and the sink is closed, at most ``timeout_s``. ``failed``: the run has, by an
        error."""
        self._run_failed = failed
        with self._changed:
            self._closing = True
            self._changed.notify()
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            self._given_up = True
            self._fail(TimeoutError(f"not closed within {timeout_s:g} s"))
        lost = self._put_count - self._written - self._skipped
        self._say(SinkClosed(self.name, self._written, lost, self._errors))
        self._report = None

    # ------------------------------------------------------------------ in the thread

    def _work(self) -> None:
        self._try(self._open)
        while (figures_of := self._next()) is not None:
            self._try(partial(self._write, figures_of))
        if self._opened:
            self._try(lambda: self._sink.close(self._run_failed))
        self._in_loop(self._ended.set)

    def _next(self) -> Made | None:
        """None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting.popleft() if self._waiting and not self._given_up else None

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # a sink's code may raise anything, SystemExit too
            self._errors += 1
            self._in_loop(self._fail, error)

    def _open(self) -> None:
        self._series.read()
        name, place = self._sink.open(self._run, self._series.name)
        self._opened = True
        if name != self._series.name:
            self._series.named(name)
        self._in_loop(self._say, SinkOpened(self.name, place))

    def _write(self, figures_of: Made) -> None:
        if not self._opened:
            self._open()
        figures = figures_of()
        if self._sink.appends_only and self._series.has(figures):
            self._skipped += 1
            return
        self._sink.write(figures)
        self._written += 1
        if self._sink.appends_only:
            self._series.written(figures)

    def _in_loop(self, call: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed: the run has not waited for this sink
            pass

    # ------------------------------------------------------------------ in the loop

    def _fail(self, error: BaseException) -> None:
        if not self._failed:
            self._failed = True
            self._say(SinkFailed(self.name, f"{type(error).__name__}: {error}"))

    def _say(self, event: RunEvent) -> None:
        if self._report is not None:
            self._report(event)
