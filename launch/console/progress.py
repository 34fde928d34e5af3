"""What a person sees while a run goes on: a live table on a terminal, plain lines everywhere else.

    with Progress(console, run_name="sorting", mode="strict", total_steps=400, agents=["sorter"]) as progress:
        progress.phase("starting 5 processes")
        progress.step(metrics)  # after every step, with the keys of metrics.jsonl
        progress.warn("trajectory q17_0_3 timed out")

There is no thread and no timer: the display moves when it is called, so a call stores a few numbers and now
and then redraws (8 times a second at most). Plain lines (about one a second at most) are meant for grep:

    step 120/400 reward sorter=0.512 checker=0.301 tokens/s=14.4k overlap=0.012s

Whatever text comes in is shown as text: neither markup nor control characters in it have an effect.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..formatting import compact, count, duration, number

Clock = Callable[[], float]

_SMOOTHING_STEPS = 20  # shown numbers are exponential means over about this many steps
_REFRESHES_PER_S = 8.0
_LINES_PER_S = 1.0
_BURST = 5  # lines that may come at once before the rate holds
_MESSAGES_HELD = 50
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 12


class Progress:
    """Shows one run's progress on ``console``; the form depends on whether that is a terminal.

    ``total_steps`` counts from the run's beginning, also after a resume, and so does ``metrics["step"]``, the
    number of finished steps; ``first_step`` were finished before. ``line_interval_s``: how often a plain step
    line appears. ``clock``: seconds, monotonic. Leaving the context, by an exception too, gives the terminal
    back as it was found.
    """

    def __init__(
        self,
        console: Console,
        *,
        run_name: str,
        mode: str,
        total_steps: int,
        agents: Sequence[str],
        first_step: int = 0,
        line_interval_s: float = 10.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._state = _State(_one_line(run_name), _one_line(mode), total_steps, agents, clock)
        self._state.step = first_step
        self._lines = _Bucket(_LINES_PER_S, _BURST, clock)
        self._view: _View
        if console.is_terminal and not console.is_dumb_terminal:
            self._view = _LiveView(console, self._state)
        else:
            self._view = _LineView(console, self._state, self._lines, line_interval_s)
        self._held: dict[str, int] = {}  # messages the rate holds back, and how often each came
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

    def step(self, metrics: Mapping[str, Any]) -> None:
        """A step has finished. Ends the phase; a missing or non-finite value leaves the last one standing."""
        self._state.record(metrics)
        accuracy = number(metrics.get("eval/accuracy"))
        if accuracy is not None:
            self._hold(f"eval step {self._state.step} accuracy={accuracy:.3f}")
        self._update()

    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None:
        """What the run is busy with, and how far it has got; holds until the next `phase` or `step`."""
        text = _one_line(text)
        changed = self._state.phase is None or self._state.phase.text != text
        self._state.phase = _Phase(text, done, total)
        self._update(phase_changed=changed)

    def note(self, text: str) -> None:
        """Something worth a line of its own, such as a saved checkpoint."""
        self._hold(_one_line(text))
        self._update()

    def warn(self, text: str, *, at_once: bool = False) -> None:
        """Like `note`, for what a person should look into. ``at_once``: whatever the rate, as for the answer to
        something that the person did."""
        self._hold(f"{_WARNING}{_one_line(text)}")
        self._print_held(all_of_them=at_once)
        self._update()

    def tick(self) -> None:
        """Time has passed: shows what the rate has held back. To be called now and then while nothing happens."""
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
            self._view.message(f"{_WARNING}{more} came too fast to be shown")
            self._dropped = 0


_WARNING = "warning: "


def _one_line(text: str) -> str:
    """``text`` without line breaks and control characters: names and errors may come from anywhere."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


# --------------------------------------------------------------------------- what is known


class _Bucket:
    """Lets ``per_s`` events a second pass, and up to ``burst`` at once after a pause."""

    def __init__(self, per_s: float, burst: int, clock: Clock) -> None:
        self._per_s, self._burst, self._clock = per_s, float(burst), clock
        self._tokens, self._filled_at = float(burst), clock()

    def take(self, leave: int = 0) -> bool:
        """Whether one more may pass now, so that ``leave`` still may."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + self._per_s * (now - self._filled_at))
        self._filled_at = now
        # Time adds up with rounding errors: 0.999... of a token is one.
        if self._tokens < 1 + leave - 1e-6:
            return False
        self._tokens -= 1
        return True


@dataclass(frozen=True, slots=True)
class _Phase:
    text: str
    done: int | None
    total: int | None

    def __str__(self) -> str:
        if self.done is None:
            return self.text
        return f"{self.text} {self.done}" + ("" if self.total is None else f"/{self.total}")


class _Trail:
    """A curve of any length in at most 2 * `_SPARK_WIDTH` numbers: when full, neighbours are averaged."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._stride, self._sum, self._count = 1, 0.0, 0

    def add(self, value: float) -> None:
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count == self._stride:
            self._values.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self._values) == 2 * _SPARK_WIDTH:
            self._values = _paired(self._values)
            self._stride *= 2

    def spark(self) -> str:
        """The curve in block characters, from its lowest to its highest value."""
        stored = len(self._values)
        width = min(stored, _SPARK_WIDTH)
        values = [self._values[(index + 1) * stored // width - 1] for index in range(width)]
        if not values:
            return ""
        low, span = min(values), max(values) - min(values)
        top = len(_SPARKS) - 1
        return "".join(_SPARKS[round(top * (value - low) / span) if span else 0] for value in values)


def _paired(values: Sequence[float]) -> list[float]:
    """The means of neighbouring pairs; a last one without a partner stays."""
    return [
        sum(values[index : index + 2]) / len(values[index : index + 2]) for index in range(0, len(values), 2)
    ]


class _State:
    """The numbers on show."""

    def __init__(self, name: str, mode: str, total_steps: int, agents: Sequence[str], clock: Clock) -> None:
        self.name, self.mode, self.total_steps = name, mode, total_steps
        self.agents = {agent: _one_line(agent) for agent in agents}  # key in the metrics -> on screen
        self.step = 0
        self.phase: _Phase | None = None
        self.failed = 0.0
        self.means: dict[str, float] = {}
        self.latest: dict[str, float] = {}
        self.trails = {agent: _Trail() for agent in agents}
        self._clock = clock
        self._started_s = clock()
        self._recent: deque[tuple[float, int]] = deque(maxlen=50)
        self._smoothed = ["tokens_per_s", "overlap_s", "step_s"]
        self._smoothed += [f"{key}/{agent}" for key in ("reward", "loss", "grad_norm") for agent in agents]

    def record(self, metrics: Mapping[str, Any]) -> None:
        self.phase = None
        self.step = int(number(metrics.get("step")) or self.step)
        self._recent.append((self._clock(), self.step))
        self.failed += number(metrics.get("failed_trajectories")) or 0.0
        for key in self._smoothed:
            value = number(metrics.get(key))
            if value is not None:
                mean = self.means.get(key, value)
                self.means[key] = mean + (value - mean) * 2 / (_SMOOTHING_STEPS + 1)
        versions = metrics.get("versions")
        for agent, trail in self.trails.items():
            if (reward := number(metrics.get(f"reward/{agent}"))) is not None:
                trail.add(reward)
            if (samples := number(metrics.get(f"samples/{agent}"))) is not None:
                self.latest[f"samples/{agent}"] = samples
            if isinstance(versions, Mapping) and (version := number(versions.get(agent))) is not None:
                self.latest[f"version/{agent}"] = version

    def elapsed_s(self) -> float:
        return self._clock() - self._started_s

    def remaining_s(self) -> float | None:
        """Seconds to the last step at the pace of the last 50; None until two steps have finished."""
        if len(self._recent) < 2:
            return None
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        left = max(0, self.total_steps - last)
        return left * (last_s - first_s) / (last - first) if last > first else None


# --------------------------------------------------------------------------- two ways to show it


class _View(Protocol):
    def start(self) -> None: ...
    def update(self, phase_changed: bool) -> None: ...
    def message(self, text: str) -> None: ...
    def stop(self, how: str) -> None: ...


class _LineView:
    """Plain lines: a step line now and then, everything else when it happens."""

    def __init__(self, console: Console, state: _State, lines: _Bucket, interval_s: float) -> None:
        self._console, self._state, self._lines = console, state, lines
        self._interval_s = interval_s
        self._next_s = 0.0
        self._first_step = self._shown_step = state.step  # a resumed run has no numbers yet
        self._shown_phase = ""

    def start(self) -> None:
        agents = ",".join(self._state.agents.values())
        self._lines.take()
        self.message(
            f"run {self._state.name} mode={self._state.mode} steps={self._state.total_steps} agents={agents}"
        )

    def update(self, phase_changed: bool) -> None:
        phase, now = self._state.phase, self._state.elapsed_s()
        if phase is None:
            self._shown_phase = ""
        due = now >= self._next_s
        new_phase = phase is not None and phase.text != self._shown_phase
        new_step = phase is None and self._state.step != self._shown_step
        first = self._shown_step == self._first_step
        new_step = new_step and (due or first or self._state.step >= self._state.total_steps)
        if not (new_phase or new_step or (phase is not None and due)) or not self._lines.take(leave=1):
            return
        self._next_s = now + self._interval_s
        if phase is not None:
            self._shown_phase = phase.text
            self.message(f"phase {phase}")
        else:
            self._step_line()

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def stop(self, how: str) -> None:
        if self._state.step != self._shown_step:
            self._step_line()
        self.message(_last_line(self._state, how))

    def _step_line(self) -> None:
        state = self._state
        self._shown_step = state.step
        rewards = [(name, state.means.get(f"reward/{agent}")) for agent, name in state.agents.items()]
        words = [f"step {state.step}/{state.total_steps} reward"]
        words += [f"{name}={reward:.3f}" for name, reward in rewards if reward is not None]
        if (speed := state.means.get("tokens_per_s")) is not None:
            words.append(f"tokens/s={compact(speed)}")
        if (overlap := state.means.get("overlap_s")) is not None:
            words.append(f"overlap={overlap:.3f}s")
        if state.failed:
            words.append(f"failed={state.failed:g}")
        self.message(" ".join(words))


class _LiveView:
    """A table that is redrawn in place; messages scroll away above it."""

    def __init__(self, console: Console, state: _State) -> None:
        self._console, self._state = console, state
        # rich's own refresh thread would draw while the run's loop changes the numbers
        self._live = Live(console=console, get_renderable=self._render, auto_refresh=False)
        self._refreshes = _Bucket(_REFRESHES_PER_S, 4, state.elapsed_s)

    def start(self) -> None:
        self._live.start(refresh=True)

    def update(self, phase_changed: bool) -> None:
        # A phase may hold for long without another call, so a few redraws are kept for new ones.
        if self._refreshes.take(leave=0 if phase_changed else 2):
            self._live.refresh()

    def message(self, text: str) -> None:
        self._console.print(Text(text, style="yellow" if text.startswith(_WARNING) else ""))

    def stop(self, how: str) -> None:
        self._live.stop()  # draws the last numbers and shows the cursor again
        self._console.print(Text(_last_line(self._state, how)))

    def _render(self) -> RenderableType:
        return Group(self._header(), self._bar(), self._numbers(), self._agents())

    def _header(self) -> Text:
        state = self._state
        busy = str(state.phase) if state.phase else "training" if state.step else "starting"
        return _fitting(Text.assemble((state.name, "bold"), f" · {state.mode} · ", (busy, "cyan")))

    def _bar(self) -> RenderableType:
        state, left_s = self._state, self._state.remaining_s()
        steps = f"step {state.step}/{state.total_steps}"
        share = f"{min(1.0, state.step / max(1, state.total_steps)):.0%}"
        left = "" if left_s is None else f"{duration(round(left_s))} left"
        width = max(4, min(40, self._console.width - len(steps) - len(share) - len(left) - 4))
        bar = ProgressBar(total=max(1, state.total_steps), completed=state.step, width=width)
        grid = Table.grid(padding=(0, 1))
        grid.add_row(_fitting(Text(steps)), bar, _fitting(Text(share)), _fitting(Text(left)))
        return grid

    def _numbers(self) -> Text:
        means = self._state.means
        words = [f"{compact(means['tokens_per_s'])} tokens/s"] if "tokens_per_s" in means else []
        words += [f"{1000 * means['step_s']:.3g} ms/step"] if "step_s" in means else []
        words += [f"overlap {means['overlap_s']:.3f} s/step"] if "overlap_s" in means else []
        failed = (f"{self._state.failed:g} failed", "yellow" if self._state.failed else "")
        return _fitting(Text.assemble(*(f"{word} · " for word in words), failed))

    def _agents(self) -> Table:
        """One row per agent; the columns that matter least go first when the terminal is narrow."""
        means, latest, width = self._state.means, self._state.latest, self._console.width
        columns = [title for title, least_width in _COLUMNS.items() if width >= least_width]
        if self._console.options.ascii_only and "trend" in columns:
            columns.remove("trend")
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("agent", no_wrap=True, min_width=5)
        for title in columns:
            table.add_column(title, no_wrap=True, justify="left" if title == "trend" else "right")
        for agent, name in self._state.agents.items():
            cells = {
                "reward": _shown(means.get(f"reward/{agent}"), ".3f"),
                "trend": self._state.trails[agent].spark(),
                "version": _shown(latest.get(f"version/{agent}"), ".0f"),
                "loss": _shown(means.get(f"loss/{agent}"), ".4f"),
                "grad norm": _shown(means.get(f"grad_norm/{agent}"), ".3f"),
                "samples": _shown(latest.get(f"samples/{agent}"), ".0f"),
            }
            table.add_row(Text(name), *(Text(cells[title]) for title in columns))
        return table


# Column -> the terminal width from which it is shown.
_COLUMNS = {"reward": 0, "trend": 40, "version": 50, "loss": 60, "grad norm": 72, "samples": 80}


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _fitting(text: Text) -> Text:
    """One row at any width."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _last_line(state: _State, how: str) -> str:
    return f"run {state.name} {how} step={state.step}/{state.total_steps} wall={duration(state.elapsed_s())}"
