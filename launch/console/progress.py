"""Shows the progress of a run: a live table on a terminal, plain lines everywhere else.

    agents = {"sorter": "sorter", "checker": "checker"}  # agent -> its policy
    with Progress(console, run_name="sorting", mode="strict", total_steps=400, agents=agents) as progress:
        progress.phase("starting 5 processes")
        progress.step(metrics)  # after every step
        progress.warn("trajectory q17_0_3 timed out")

There is no thread and no timer: calls store a few numbers and sometimes redraw (at most 8 times a second). Plain lines
(about one a second at most) are meant for grep:

    step 120/400 reward sorter=0.512 checker=0.301 tokens/s=14.4k overlap=0.012s

All text is shown as it is: markup and control characters in it have no effect.
"""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console

from ...actors.names import AgentName, PolicyName
from ...actors.step_metrics import StepMetrics
from ..formatting import count, number
from .progress_state import Phase, ProgressState, one_line
from .progress_views import WARNING, LineView, LiveView, View
from .rate_limit import Clock, RateLimit

_LINES_PER_S = 1.0
_BURST = 5  # lines that may come at once before the rate applies
_MESSAGES_HELD = 50


class Progress:
    """Shows one run's progress on ``console``: a live table if it is a terminal, else plain lines.

    ``total_steps`` and the step numbers count from the run's beginning, also after a resume; the first ``first_step``
    steps finished before the resume. ``agents``: the policy of each. ``line_interval_s``: seconds between plain step
    lines. ``clock``: monotonic seconds. Leaving the context restores the terminal, also after an exception.
    """

    def __init__(
        self,
        console: Console,
        *,
        run_name: str,
        mode: str,
        total_steps: int,
        agents: Mapping[AgentName, PolicyName],
        first_step: int = 0,
        line_interval_s: float = 10.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._state = ProgressState(one_line(run_name), one_line(mode), total_steps, agents, clock)
        self._state.step = first_step
        self._lines = RateLimit(_LINES_PER_S, _BURST, clock)
        self._view: View
        if console.is_terminal and not console.is_dumb_terminal:
            self._view = LiveView(console, self._state)
        else:
            self._view = LineView(console, self._state, self._lines, line_interval_s)
        self._held: dict[str, int] = {}  # messages that wait for the rate limit, and how often each came
        self._dropped = 0

    def __enter__(self) -> Self:
        self._view.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._print_held(all_of_them=True)
        finally:
            self._view.stop("ended" if kind is None else f"stopped by {kind.__name__}")

    def step(self, metrics: StepMetrics) -> None:
        """Shows a finished step and ends the phase. A missing or non-finite value leaves the last one on show."""
        self._state.record(metrics)
        accuracy = number(metrics.evaluation.get("accuracy"))
        if accuracy is not None:
            self._hold(f"eval step {self._state.step} accuracy={accuracy:.3f}")
        self._update()

    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """Shows the run's present work until the next ``phase`` or ``step``."""
        text = one_line(text)
        changed = self._state.phase is None or self._state.phase.text != text
        self._state.phase = Phase(text, done, total)
        self._update(phase_changed=changed)

    def note(self, text: str) -> None:
        """Prints a line of its own, such as for a saved checkpoint."""
        self._hold(one_line(text))
        self._update()

    def warn(self, text: str, *, at_once: bool = False) -> None:
        """Prints a warning. ``at_once``: without rate limit, as in answer to a signal."""
        self._hold(f"{WARNING}{one_line(text)}")
        self._print_held(all_of_them=at_once)
        self._update()

    def tick(self) -> None:
        """Prints messages that waited for the rate limit; to be called regularly."""
        self._update()

    def _update(self, phase_changed: bool = False) -> None:
        self._print_held()
        self._view.update(phase_changed)

    def _hold(self, message: str) -> None:
        if message in self._held or len(self._held) < _MESSAGES_HELD:
            self._held[message] = self._held.get(message, 0) + 1
        else:
            self._dropped += 1

    def _print_held(self, all_of_them: bool = False) -> None:
        while self._held and (self._lines.take() or all_of_them):
            message = next(iter(self._held))
            times = self._held.pop(message)
            self._view.message(message if times == 1 else f"{message} ({times} times)")
        if self._dropped and not self._held:
            more = count(self._dropped, "more message")
            self._view.message(f"{WARNING}{more} came too fast to be shown")
            self._dropped = 0
