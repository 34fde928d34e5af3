"""Charts of learning: rewards and turns by agent, figures of the weights by policy, a workflow's own metrics."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from ....actors.figures import FIGURES, Chart, Figure, Subject
from ...run_folder.json_lines import label_of
from ..formatting import compact
from .charts import Axes, Point
from .page_parts import grid, note, smoothed_cell, smoothed_chart, smoothing_words
from .run_history import History
from .training_sections import reward_caption, rewards_of

Curves = Mapping[str, Sequence[Point]]
_QUANTILES: Final = {
    "longest": "turn_tokens_max", "90%": "turn_tokens_p90", "median": "turn_tokens_p50", "10%": "turn_tokens_p10"
}  # fmt: skip


def percent(value: float) -> str:
    """A share as a percentage of three digits."""
    return f"{100 * value:.3g}%"


def rewards(history: History) -> str:
    """The section about rewards, a curve for each agent, as HTML; empty without rewards."""
    curves = {str(agent): rewards_of(history, agent) for agent in history.agents}
    if not curves:
        return ""
    axes = Axes(
        name="reward",
        title="Reward per agent over the steps",
        description=reward_caption(history),
        x_label="step",
        y_label="mean reward",
        y_range=_unit_range([y for points in curves.values() for _, y in points]),
        marks=history.resumes,
    )
    return f"<h2>Reward</h2>{smoothed_chart(axes, curves, len(history.steps))}"


def policy_curves(history: History) -> str:
    """Small charts with one curve per policy."""
    charts = [
        _chart(chart, {str(policy): history.of_policy(policy, row.name) for policy in history.policies})
        for row, chart in _rows_with_charts("policy")
    ]
    return _section("Training", charts, history)


def turn_curves(history: History) -> str:
    """Small charts about the turns of each agent."""
    charts = [
        _chart(
            chart, {str(agent): history.of_agent(agent, row.name, chart.share_of) for agent in history.agents}
        )
        for row, chart in _rows_with_charts("agent")
    ]
    charts += [
        SmallChart(
            f"Length of turns: {agent}",
            "generated tokens",
            compact,
            {name: history.of_agent(agent, figure) for name, figure in _QUANTILES.items()},
        )
        for agent in history.agents
    ]
    return _section("Turns", charts, history)


def other_curves(history: History) -> str:
    """Small charts of the metrics that a workflow gives, of a query source's, and of all others that no other section
    knows. Those of several agents or policies are in one chart."""
    names = {*history.agents, *history.policies, *history.policy_of}
    sections: dict[str, dict[str, dict[str, Sequence[Point]]]] = {}
    for key, points in history.of_others().items():
        family, _, name = key.rpartition("/")
        if label_of(family) == "opponent":
            section, title = "Opponents", family.replace("_", " ").capitalize()
        else:
            section = "Query source" if family == "source" else "Metrics of the workflow"
            title = family if name in names else key
        sections.setdefault(section, {}).setdefault(title, {})[name] = points
    return "".join(
        _section(section, [_other_chart(section, title, curves) for title, curves in charts.items()], history)
        for section in ("Metrics of the workflow", "Query source", "Opponents")
        if (charts := sections.get(section))
    )


def _other_chart(section: str, title: str, curves: Curves) -> "SmallChart":
    label = "mean of the step" if section == "Metrics of the workflow" else ""
    return SmallChart(title, label, compact, curves, keep=section != "Opponents")


# --------------------------------------------------------------------------- small charts


@dataclass(frozen=True)
class SmallChart:
    """``keep``: it is drawn also if it is zero in every step; such others are named in a sentence."""

    title: str
    y_label: str
    y_format: Callable[[float], str]
    curves: Curves
    keep: bool = False


def _rows_with_charts(subject: Subject) -> list[tuple[Figure, Chart]]:
    return [(row, row.chart) for row in FIGURES[subject].values() if row.chart is not None]


def _chart(chart: Chart, curves: Curves) -> SmallChart:
    """The chart of a figure. One without any value is left out later."""
    if chart.complement:
        curves = {name: [(step, 1.0 - value) for step, value in points] for name, points in curves.items()}
    return SmallChart(chart.title, chart.y_label, percent if chart.percent else compact, curves)


def _section(heading: str, charts: Sequence[SmallChart], history: History) -> str:
    cells, zero = [], []
    for chart in charts:
        curves = {name: points for name, points in chart.curves.items() if points}
        if not curves:
            continue
        if not chart.keep and not any(y for points in curves.values() for _, y in points):
            zero.append(chart.title.lower())
            continue
        cells.append(smoothed_cell(_axes(heading, chart, curves, history), curves, len(history.steps)))
    if not cells:
        return ""
    words = smoothing_words(len(history.steps), bool(history.resumes))
    words += f" Zero in every step: {', '.join(zero)}." if zero else ""
    return f"<h2>{escape(heading)}</h2>{grid(cells)}{note(words.strip())}"


def _axes(heading: str, chart: SmallChart, curves: Curves, history: History) -> Axes:
    ends = ", ".join(f"{name} {chart.y_format(points[-1][1])}" for name, points in curves.items())
    return Axes(
        name=identifier(f"{heading} {chart.title}"),
        title=chart.title,
        description=f"at the end: {ends}",
        x_label="step",
        y_label=chart.y_label,
        y_format=chart.y_format,
        marks=history.resumes,
    )


def identifier(title: str) -> str:
    """Letters, digits and hyphens that no other title has."""
    return re.sub(r"[^a-z0-9]", lambda match: f"-{ord(match.group()):x}-", title.lower())


def _unit_range(values: list[float]) -> Point | None:
    """[0, 1] for rewards within it, so that runs compare at a glance."""
    return (0.0, 1.0) if values and min(values) >= 0 and 0.25 < max(values) <= 1 else None
