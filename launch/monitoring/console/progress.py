"""Shows the progress of a run: a live table on a terminal, plain lines everywhere else.

    agents = {"sorter": "sorter", "checker": "checker"}  # agent -> its policy
    with Progress(console, run_name="sorting", mode="strict", total_steps=400, agents=agents) as progress:
        progress.phase("starting 5 processes")
        progress.step(metrics)  # after every step
        progress.warn("trajectory q17_0_3 timed out")

There is no thread and no timer: calls store a few numbers and sometimes redraw (at most 8 times a second). Plain lines
(about one a second at most) are meant for grep:

    step 120/400 | 1.92 steps/s, 2 min 26 s left | smoothed: reward sorter=0.512 checker=0.301, tokens/s=14.4k

All text is shown as it is: markup and control characters in it have no effect.
"""

import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Literal, Self

from rich.console import Console

from ....actors.names import AgentName, PolicyName
from ....actors.run_events import Evaluated, RunEvent, RunStalled, SftDone, TrajectoryFailed
from ....actors.step_metrics import StepMetrics
from ....core.errors import ActorDead, ActorFailed
from ..formatting import count
from .display import Display
from .event_text import note_of, warning_of
from .live_view import LiveView
from .progress_state import Phase, ProgressState, one_line
from .progress_views import WARNING, LineView, QuietView, View
from .rate_limit import Clock, RateLimit

_LINES_PER_S = 1.0
_BURST = 5  # lines that may come at once before the rate applies
_MESSAGES_HELD = 50
_SHOWN_FAILURES = 3

Detail = Literal["quiet", "normal", "verbose"]


class Progress(Display):
    """Shows one run's progress on ``console``: a live table if it is a terminal, else plain lines.

    ``total_steps`` and the step numbers count from the run's beginning, also after a resume; the first ``first_step``
    steps finished before the resume. ``agents``: the policy of each. ``line_interval_s``: seconds between plain step
    lines. ``detail``: ``quiet`` shows warnings alone; ``verbose`` shows a plain line for every step, and every failed
    trajectory with its traceback, without a limit of the rate. ``clock``: monotonic seconds. Leaving the context
    restores the terminal, also after an exception.
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
        detail: Detail = "normal",
        clock: Clock = time.monotonic,
    ) -> None:
        self._state = ProgressState(one_line(run_name), one_line(mode), total_steps, agents, clock)
        self._state.step = first_step
        self._detail = detail
        unlimited = detail == "verbose"
        self._lines = RateLimit(_LINES_PER_S, math.inf if unlimited else _BURST, clock)
        self._view: View
        if detail == "quiet":
            self._view = QuietView(console)
        elif unlimited:
            self._view = LineView(console, self._state, self._lines, 0.0)
        elif console.is_terminal and not console.is_dumb_terminal:
            self._view = LiveView(console, self._state)
        else:
            self._view = LineView(console, self._state, self._lines, line_interval_s)
        self._held: dict[str, int] = {}  # messages that wait for the rate limit, and how often each came
        self._dropped = 0
        self._failures = 0
        self._ended_s: float | None = None

    def __enter__(self) -> Self:
        self._view.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended_s = round(self._state.elapsed_s(), 3)  # every line shows the same one
        failed = isinstance(error, ActorDead | ActorFailed)  # the report of the failure follows
        how = "ended" if kind is None else "failed" if failed else f"stopped by {kind.__name__}"
        try:
            self._print_held(all_of_them=True)
        finally:
            self._view.stop(how, self._ended_s)

    @property
    def wall_s(self) -> float:
        return self._state.elapsed_s() if self._ended_s is None else self._ended_s

    def step(self, metrics: StepMetrics) -> None:
        self._state.record(metrics)
        self._update()

    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None:
        text = one_line(text)
        changed = self._state.phase is None or self._state.phase.text != text
        self._state.phase = Phase(text, done, total)
        self._update(phase_changed=changed)

    def event(self, event: RunEvent) -> None:
        if isinstance(event, Evaluated | SftDone):
            self._state.end_phase()
        if (warning := warning_of(event)) is not None:
            self._warn_of(event, warning)
        elif (note := note_of(event, self._state.total_steps)) is not None:
            self.note(note)

    def _warn_of(self, event: RunEvent, warning: str) -> None:
        if isinstance(event, RunStalled):  # of several lines, and the more urgent the less there is else
            self.warn(warning, at_once=True)
            for cause in event.causes:
                self._view.message(f"  {one_line(cause)}")
            return
        if not isinstance(event, TrajectoryFailed):
            self.warn(warning)
            return
        self._failures += 1
        if self._detail == "verbose":
            self.warn(warning)
            for line in event.traceback.splitlines():
                self._view.message(f"  {one_line(line)}")
        elif self._failures <= _SHOWN_FAILURES:
            self.warn(warning)

    def note(self, text: str) -> None:
        """Prints a line of its own, such as for a saved checkpoint."""
        if self._detail != "quiet":
            self._hold(one_line(text))
        self._update()

    def warn(self, text: str, *, at_once: bool = False) -> None:
        warning = f"{WARNING}{one_line(text)}"
        if at_once:  # also if so many are held that one more would only be counted
            self._print_held(all_of_them=True)
            self._view.message(warning)
        else:
            self._hold(warning)
        self._update()

    def tick(self) -> None:
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
