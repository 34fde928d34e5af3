"""The live table of a run's progress, for terminals."""

from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ....actors.names import AgentName, PolicyName
from ..formatting import compact, duration, words_wrapped
from .progress_state import SMOOTHING_STEPS, Mean, ProgressState, one_line
from .progress_views import WARNING, View, last_line
from .rate_limit import RateLimit

_REFRESHES_PER_S = 8.0


class LiveView(View):
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
        style = "yellow" if text.startswith(WARNING) else ""
        self._console.print(Text(words_wrapped(text, self._console.width), style=style))

    def stop(self, how: str, wall_s: float) -> None:
        self._live.stop()  # draws the last numbers and shows the cursor again
        self.message(last_line(self._state, how, wall_s))

    def _render(self) -> RenderableType:
        return Group(self._header(), self._bar(), self._numbers(), self._smoothing(), self._agents())

    def _header(self) -> Text:
        state = self._state
        busy = str(state.phase) if state.phase else "training" if state.step else "starting"
        words = Text.assemble((state.name, "bold"), f" · {state.mode} · ", (busy, "cyan"))
        return _fitting(words, self._console.width)

    def _bar(self) -> RenderableType:
        state, left_s = self._state, self._state.remaining_s()
        steps = f"step {state.step}/{state.total_steps}"
        share = f"{min(1.0, state.step / max(1, state.total_steps)):.0%}"
        time_left = "" if left_s is None else f"{duration(round(left_s))} left"
        width = max(4, min(40, self._console.width - len(steps) - len(share) - len(time_left) - 4))
        bar = ProgressBar(total=max(1, state.total_steps), completed=state.step, width=width)
        grid = Table.grid(padding=(0, 1))
        cells = (_on_one_row(Text(words)) for words in (steps, share, time_left))
        grid.add_row(next(cells), bar, *cells)
        return grid

    def _numbers(self) -> Text:
        state = self._state
        words = []
        if (speed := state.tokens_per_s.value) is not None:
            words.append(f"{compact(speed)} tokens/s")
        if (step_s := state.step_s.value) is not None:
            words.append(f"{duration(step_s)}/step")
        if (overlap := state.overlap_s.value) is not None:
            words.append(f"overlap {overlap:.3f} s/step")
        if pool := str(state.pool):
            words.append(pool)
        failed = (f"{state.failed} failed", "yellow" if state.failed else "")
        return _fitting(Text.assemble(*(f"{word} · " for word in words), failed), self._console.width)

    def _smoothing(self) -> Text:
        words = f"reward, loss, grad norm and rates are smoothed over about {SMOOTHING_STEPS} steps"
        return _fitting(Text(words, "dim"), self._console.width)

    def _agents(self) -> Table:
        """One row per agent. Agents of one policy stand together, and only the first row shows the policy's numbers.

        If the terminal is narrow, the least important columns are left out.
        """
        columns = self._columns()
        table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim")
        table.add_column("agent", no_wrap=True, min_width=5)
        for title in columns:
            is_text = title in ("trend", "policy")
            table.add_column(title, no_wrap=True, justify="left" if is_text else "right")
        for policy in self._state.policies:
            names = [name for name, agent in self._state.agents.items() if agent.policy == policy]
            for index, name in enumerate(names):
                cells = self._agent_cells(name)
                if index == 0:
                    cells |= self._policy_cells(policy)
                table.add_row(Text(one_line(name)), *(Text(cells.get(title, "")) for title in columns))
        return table

    def _columns(self) -> list[str]:
        """The columns beside the agents' names that the terminal has room for."""
        agents = self._state.agents
        widths = dict(_COLUMNS)
        if self._console.options.ascii_only:
            del widths["trend"]
        if all(str(name) == agent.policy for name, agent in agents.items()):
            del widths["policy"]
        else:
            widths["policy"] = _widest(("policy", *(one_line(agent.policy) for agent in agents.values())))
        room = self._console.width - _widest(("agent", *map(one_line, agents))) - _GAP
        shown = set()
        for title, width in widths.items():
            if room < width:
                break
            room -= width + _GAP
            shown.add(title)
        return [title for title in _IN_ORDER if title in shown]

    def _agent_cells(self, name: AgentName) -> dict[str, str]:
        agent = self._state.agents[name]
        return {
            "reward": _format_mean(agent.reward, ".3f"),
            "trend": agent.trail.spark(),
            "policy": one_line(agent.policy),
        }

    def _policy_cells(self, name: PolicyName) -> dict[str, str]:
        policy = self._state.policies[name]
        return {
            "version": "-" if policy.version is None else str(policy.version),
            "loss": _format_mean(policy.loss, ".4f"),
            "grad norm": _format_mean(policy.grad_norm, ".3f"),
            "samples": "-" if policy.samples is None else str(policy.samples),
            "staleness": str(policy.max_staleness),
        }


_GAP = 2
# The columns, the most important one first, with the usual width of each.
_COLUMNS = {
    "reward": 6,
    "trend": 12,
    "version": 7,
    "policy": 6,
    "loss": 7,
    "grad norm": 9,
    "samples": 7,
    "staleness": 9,
}
_IN_ORDER = ("reward", "trend", "policy", "version", "loss", "grad norm", "samples", "staleness")


def _format_mean(mean: Mean, form: str) -> str:
    return "-" if mean.value is None else format(mean.value, form)


def _widest(words: Iterable[str]) -> int:
    return max(map(cell_len, words))


def _on_one_row(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _fitting(text: Text, width: int) -> Text:
    """Keeps ``text`` on one row of ``width`` columns: words that have no room at its end are left out."""
    if text.cell_len > width:
        fits = text.plain[: max(0, width - 1)].rfind(" ")
        if fits > 0:
            text.truncate(fits)
            text.append(" …")
    return _on_one_row(text)
