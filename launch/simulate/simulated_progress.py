"""The progress of a simulation, for people: its step, its virtual time and the real one.

A thread writes the line, because the loop of a simulation has no real time: a timer in it would change the order of
its messages, and a step may take a minute. So the files of a run are the same with and without.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ...actors.run_events import RunEvent
from ...actors.step_metrics import StepMetrics
from ..monitoring.console.no_display import NoDisplay
from ..monitoring.formatting import duration

LINE_S: Final = 30.0
"""Seconds between two lines without a terminal."""
_REFRESHES_PER_S: Final = 4.0


class SimulationProgress(NoDisplay):
    """A line that is rewritten in place, and removed at the end. Without a terminal: a line every ``line_s``."""

    def __init__(
        self,
        console: Console,
        total_steps: int,
        *,
        line_s: float = LINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._console, self._total, self._line_s = console, total_steps, line_s
        self._step = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ends = threading.Event()
        self._lines = threading.Thread(target=self._print_lines, name="progress", daemon=True)
        self._live = Live(
            console=console,
            get_renderable=lambda: Text(self.text(), no_wrap=True, overflow="ellipsis"),
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._lines.start()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        else:
            self._ends.set()
            self._lines.join()
        super().__exit__(kind, error, trace)

    def event(self, event: RunEvent) -> None:
        """The first one comes when the loop of the simulation runs."""
        self._loop = asyncio.get_running_loop()

    def step(self, metrics: StepMetrics) -> None:
        self._step = metrics.step

    def text(self) -> str:
        """The line."""
        if self._loop is None:
            return f"placing the actors of the simulation; {duration(self.wall_s)}"
        words = (
            f"{self._step} of {self._total} steps simulated, {duration(self._loop.time())} of virtual time"
        )
        if self._step in (0, self._total):
            return f"{words}; {duration(self.wall_s)}"
        left_s = self.wall_s / self._step * (self._total - self._step)
        return f"{words}; {duration(self.wall_s)}, about {duration(left_s)} more"

    def _print_lines(self) -> None:
        while not self._ends.wait(self._line_s):
            self._console.print(self.text())
