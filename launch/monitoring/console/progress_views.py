"""The displays of a run's progress as lines: plain lines, and warnings alone."""

from typing import Protocol

from rich.console import Console

from ....core.base.texts import printable
from ..formatting import compact, duration, words_wrapped
from .progress_state import ProgressState, one_line
from .rate_limit import RateLimit

WARNING = "warning: "
_SIGN_OF_LIFE_S = 60.0


class View(Protocol):
    """A form of the display: lines, a table, or warnings alone. ``Progress`` calls it."""

    def start(self) -> None:
        """Begins to show the run; to be called first, and once."""

    def update(self, phase_changed: bool) -> None:
        """Shows the present state if it is due: called after each change of it and about once a second."""

    def message(self, text: str) -> None:
        """Prints a line that stays; the caller has applied the limit of the rate."""

    def stop(self, how: str, wall_s: float) -> None:
        """Shows the end: ``how`` in words, after ``wall_s`` seconds. The terminal is as it was. The last call."""


class QuietView(View):
    """Prints warnings alone."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def start(self) -> None: ...

    def update(self, phase_changed: bool) -> None: ...

    def message(self, text: str) -> None:
        print_line(self._console, text)

    def stop(self, how: str, wall_s: float) -> None: ...


class LineView(View):
    """Prints plain lines.

    - A step line for the first step, the last one, and one every ``interval_s`` between. Neither phases nor messages
      delay it.
    - A phase when it is new, and every ``interval_s`` while it lasts.
    - A message when it comes, within the rate of ``lines``.
    - After a minute without any line, the step or the phase under way.
    """

    def __init__(self, console: Console, state: ProgressState, lines: RateLimit, interval_s: float) -> None:
        self._console, self._state, self._lines = console, state, lines
        self._interval_s = interval_s
        self._next_step_s = self._next_phase_s = self._printed_s = 0.0
        self._first_step = self._shown_step = state.step  # a resumed run has no numbers yet
        self._known_phases: set[str] = set()

    def start(self) -> None:
        agents = ",".join(map(one_line, self._state.agents))
        self._lines.take()
        self.message(
            f"run {self._state.name} mode={self._state.mode} steps={self._state.total_steps} agents={agents}"
        )

    def update(self, phase_changed: bool) -> None:
        now = self._state.elapsed_s()
        if self._step_is_due(now):
            self._lines.spend()
            self._next_step_s = now + self._interval_s
            self._step_line()
        phase = self._state.phase
        if phase is not None and (phase.text not in self._known_phases or now >= self._next_phase_s):
            if self._lines.take(leave=1):
                self._next_phase_s = now + self._interval_s
                self._known_phases.add(phase.text)
                self.message(f"phase {phase}")
        elif now - self._printed_s >= _SIGN_OF_LIFE_S:
            state = self._state
            seconds = duration(round(now - state.changed_s))
            self.message(f"step {state.step + 1}/{state.total_steps} is under way ({seconds})")

    def _step_is_due(self, now: float) -> bool:
        state = self._state
        if state.step == self._shown_step:
            return False
        first, last = self._shown_step == self._first_step, state.step >= state.total_steps
        return first or last or now >= self._next_step_s

    def message(self, text: str) -> None:
        self._printed_s = self._state.elapsed_s()
        print_line(self._console, text)

    def stop(self, how: str, wall_s: float) -> None:
        if self._state.step != self._shown_step:
            self._step_line()
        self.message(last_line(self._state, how, wall_s))

    def _step_line(self) -> None:
        state = self._state
        self._shown_step = state.step
        parts = [f"step {state.step}/{state.total_steps}"]
        if (step_s := state.pace_s()) is not None:
            parts.append(f"{pace(step_s)}, {duration(round(state.remaining_s() or 0))} left")
        rewards = [(one_line(name), agent.reward.value) for name, agent in state.agents.items()]
        shown = [f"{name}={reward:.3f}" for name, reward in rewards if reward is not None]
        figures = ["reward " + " ".join(shown)] if shown else []
        if (speed := state.tokens_per_s.value) is not None:
            figures.append(f"tokens/s={compact(speed)}")
        if (overlap := state.overlap_s.value) is not None:
            figures.append(f"overlap={overlap:.3f}s")
        if pool := str(state.pool):
            figures.append(pool)
        if figures:
            parts.append(f"smoothed: {', '.join(figures)}")
        if state.failed:
            parts.append(f"failed={state.failed}")
        self.message(" | ".join(parts))


def pace(step_s: float) -> str:
    """``1.92 steps/s``, or ``35.1 s/step`` if a step takes longer than a second."""
    return f"{1 / step_s:.3g} steps/s" if 0 < step_s < 1 else f"{duration(step_s)}/step"


def last_line(state: ProgressState, how: str, wall_s: float) -> str:
    """The line at a run's end. ``how``: its end in words. ``wall_s``: seconds of this life alone."""
    return f"run {state.name} {how} step={state.step}/{state.total_steps} wall={duration(wall_s)}"


def print_line(console: Console, text: str) -> None:
    """Prints ``text`` with its control characters shown. A terminal's lines are broken between words; in a file a line
    stays whole, for grep."""
    text = printable(text)
    if console.is_terminal:
        text = words_wrapped(text, console.width)
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
