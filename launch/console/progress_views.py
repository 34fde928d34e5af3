"""The two displays of a run's progress: plain lines and a live table."""

from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...actors.names import AgentName, PolicyName
from ..formatting import compact, duration
from .progress_state import Mean, ProgressState, one_line
from .rate_limit import RateLimit

WARNING = "warning: "
_REFRESHES_PER_S = 8.0


class View(Protocol):
    def start(self) -> None: ...
    def update(self, phase_changed: bool) -> None: ...
    def message(self, text: str) -> None: ...
    def stop(self, how: str) -> None: ...


class LineView:
    """Prints plain lines: a step line every ``interval_s``, everything else when it happens."""

    def __init__(self, console: Console, state: ProgressState, lines: RateLimit, interval_s: float) -> None:
        self._console, self._state, self._lines = console, state, lines
        self._interval_s = interval_s
        self._next_s = 0.0
        self._first_step = self._shown_step = state.step  # a resumed run has no numbers yet
        self._shown_phase = ""

    def start(self) -> None:
        agents = ",".join(map(one_line, self._state.agents))
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
        rewards = [(one_line(name), agent.reward.value) for name, agent in state.agents.items()]
        words = [f"step {state.step}/{state.total_steps} reward"]
        words += [f"{name}={reward:.3f}" for name, reward in rewards if reward is not None]
        if (speed := state.tokens_per_s.value) is not None:
            words.append(f"tokens/s={compact(speed)}")
        if (overlap := state.overlap_s.value) is not None:
            words.append(f"overlap={overlap:.3f}s")
        if state.failed:
            words.append(f"failed={state.failed}")
        self.message(" ".join(words))


class LiveView:
    """Redraws a table in place; messages scroll away above it."""

    def __init__(self, console: Console, state: ProgressState) -> None:
        self._console, self._state = console, state
        # rich's own refresh thread would draw while the run's loop changes the numbers
        self._live = Live(console=console, get_renderable=self._render, auto_refresh=False)
        self._refreshes = RateLimit(_REFRESHES_PER_S, 4, state.elapsed_s)

    def start(self) -> None:
        self._live.start(refresh=True)

    def update(self, phase_changed: bool) -> None:
        # A phase may last long without another call, so a few redraws are kept for new phases.
        if self._refreshes.take(leave=0 if phase_changed else 2):
            self._live.refresh()

    def message(self, text: str) -> None:
        self._console.print(Text(text, style="yellow" if text.startswith(WARNING) else ""))

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
        state = self._state
        words = []
        if (speed := state.tokens_per_s.value) is not None:
            words.append(f"{compact(speed)} tokens/s")
        if (step_s := state.step_s.value) is not None:
            words.append(f"{1000 * step_s:.3g} ms/step")
        if (overlap := state.overlap_s.value) is not None:
            words.append(f"overlap {overlap:.3f} s/step")
        failed = (f"{state.failed} failed", "yellow" if state.failed else "")
        return _fitting(Text.assemble(*(f"{word} · " for word in words), failed))

    def _agents(self) -> Table:
        """One row per agent. Agents of one policy stand together, and only the first row shows the policy's numbers.

        If the terminal is narrow, the least important columns are left out.
        """
        columns = [title for title, least_width in _COLUMNS.items() if self._console.width >= least_width]
        if self._console.options.ascii_only and "trend" in columns:
            columns.remove("trend")
        if (
            all(str(name) == agent.policy for name, agent in self._state.agents.items())
            and "policy" in columns
        ):
            columns.remove("policy")
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("agent", no_wrap=True, min_width=5)
        for title in columns:
            left = title in ("trend", "policy")
            table.add_column(title, no_wrap=True, justify="left" if left else "right")
        for policy in self._state.policies:
            names = [name for name, agent in self._state.agents.items() if agent.policy == policy]
            for index, name in enumerate(names):
                cells = self._agent_cells(name)
                if index == 0:
                    cells |= self._policy_cells(policy)
                table.add_row(Text(one_line(name)), *(Text(cells.get(title, "")) for title in columns))
        return table

    def _agent_cells(self, name: AgentName) -> dict[str, str]:
        agent = self._state.agents[name]
        return {
            "reward": _shown(agent.reward, ".3f"),
            "trend": agent.trail.spark(),
            "policy": one_line(agent.policy),
        }

    def _policy_cells(self, name: PolicyName) -> dict[str, str]:
        policy = self._state.policies[name]
        return {
            "version": "-" if policy.version is None else str(policy.version),
            "loss": _shown(policy.loss, ".4f"),
            "grad norm": _shown(policy.grad_norm, ".3f"),
            "samples": "-" if policy.samples is None else str(policy.samples),
            "staleness": str(policy.max_staleness),
        }


# Column -> the least width of a terminal that shows it.
_COLUMNS = {
    "reward": 0,
    "trend": 40,
    "policy": 60,
    "version": 50,
    "loss": 60,
    "grad norm": 72,
    "samples": 80,
    "staleness": 92,
}


def _shown(mean: Mean, form: str) -> str:
    return "-" if mean.value is None else format(mean.value, form)


def _fitting(text: Text) -> Text:
    """Keeps ``text`` on one row at any width."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _last_line(state: ProgressState, how: str) -> str:
    return f"run {state.name} {how} step={state.step}/{state.total_steps} wall={duration(state.elapsed_s())}"
