"""The display of a run that nothing shows: of a program that embeds it, or of a simulation."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from ....actors.run_events import RunEvent
from ....actors.step_metrics import StepMetrics
from ....core.telemetry import get_logger
from .display import Display

log = get_logger(__name__)


class NoDisplay(Display):
    """Measures the time, and logs warnings."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = clock()
        self._ended_s: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended_s = self._clock() - self._started_s

    @property
    def wall_s(self) -> float:
        return self._clock() - self._started_s if self._ended_s is None else self._ended_s

    def step(self, metrics: StepMetrics) -> None: ...

    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None: ...

    def event(self, event: RunEvent) -> None: ...

    def warn(self, text: str, *, at_once: bool = False) -> None:
        log.warning(text)

    def note(self, text: str) -> None: ...

    def tick(self) -> None: ...
