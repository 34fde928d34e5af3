"""The interface of a run's displays."""

from types import TracebackType
from typing import Protocol, Self

from ....actors.run_events import RunEvent
from ....actors.step_metrics import StepMetrics


class Display(Protocol):
    """Shows one run, as a context: entered before the first actor starts, left when the last one has ended."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def wall_s(self) -> float:
        """Seconds from the display's beginning until now, or until its end."""
        ...

    def step(self, metrics: StepMetrics) -> None:
        """Shows a finished step and ends the phase. A missing or non-finite value leaves the last one on show."""
        ...

    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Shows the run's present work until the next ``phase`` or ``step``."""
        ...

    def event(self, event: RunEvent) -> None:
        """Shows an event if it concerns people, as a warning or a note; displays for programs show each one."""

    def warn(self, text: str, *, at_once: bool = False) -> None:
        """Shows a warning. ``at_once``: without rate limit, as in answer to a signal."""
        ...

    def note(self, text: str) -> None:
        """Shows a line that is not a warning. Displays for programs leave it out."""

    def tick(self) -> None:
        """Shows text that waited for the rate limit; to be called about once a second."""
        ...
