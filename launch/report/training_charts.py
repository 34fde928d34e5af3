"""Charts of learning: rewards and turns by agent, figures of the weights by policy, a workflow's own metrics."""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from operator import attrgetter
from typing import Any, Final

from ...actors.step_metrics import AgentMetrics, PolicyMetrics
from ..formatting import compact
from ..json_lines import label_of
from .charts import Axes, Point
from .page_parts import grid, note, smoothed_cell, smoothed_chart, smoothing_words
from .run_history import History
from .training_sections import reward_words, rewards_of

Curves = Mapping[str, Sequence[Point]]
_OfPolicy = tuple[str, str, Callable[[float], str], Callable[[PolicyMetrics], float | None]]
_OfAgent = tuple[str, str, Callable[[float], str], Callable[[AgentMetrics], float | None]]


def percent(value: float) -> str:
    return f"{100 * value:.3g}%"


# Title, label of the y axis, its format, value. A chart without any value is left out:
_OF_POLICY: Final[tuple[_OfPolicy, ...]] = (
    ("Loss", "loss", compact, lambda policy: policy.loss),
    ("Gradient norm", "before clipping", compact, lambda policy: policy.grad_norm),
    ("Entropy", "nats per token", compact, lambda policy: policy.entropy),
    ("KL from the reference", "nats per token", compact, lambda policy: policy.kl),
    ("Clipped", "share of the tokens", percent, lambda policy: policy.clip_fraction),
    ("Ratio deviation", "mean |ratio - 1|", compact, lambda policy: policy.ratio_deviation),
    ("Advantage, mean", "over the tokens", compact, lambda policy: policy.advantage_mean),
    ("Advantage, standard deviation", "over the tokens", compact, lambda policy: policy.advantage_std),
    ("Zero advantage", "share of the samples", percent, lambda policy: _complement(policy.nonzero_advantage_share)),
    ("Stale samples", "samples", compact, lambda policy: policy.stale_samples),
    ("Skipped updates", "steps", compact, lambda policy: policy.skipped_updates),
    ("Value loss", "of the critic", compact, lambda policy: policy.value_loss),
    ("Explained variance", "of the returns", compact, lambda policy: policy.explained_variance),
    ("Learning rate", "", compact, lambda policy: policy.lr),
)  # fmt: skip
_OF_AGENT: Final[tuple[_OfAgent, ...]] = (
    ("Truncated turns", "share of the turns", percent, lambda agent: _share(agent.truncated_turns, agent)),
    ("Groups without advantage", "groups", compact, lambda agent: agent.zero_advantage_groups),
)
_QUANTILES: Final[Mapping[str, Callable[[AgentMetrics], float | None]]] = {
    "longest": lambda agent: agent.turn_tokens_max,
    "90%": lambda agent: agent.turn_tokens_p90,
    "median": lambda agent: agent.turn_tokens_p50,
    "10%": lambda agent: agent.turn_tokens_p10,
}


_KNOWN_OF_AGENT: Final = frozenset((
    "reward", "turns", "tokens", "truncated_turns", "zero_advantage_groups",
    "turn_tokens_p10", "turn_tokens_p50", "turn_tokens_p90", "turn_tokens_max",
))  # fmt: skip
_KNOWN_OF_POLICY: Final = frozenset(
    name
    for name in (field.name for field in fields(PolicyMetrics))
    if name in (
        "version", "generated_by", "carried_samples", "stale_samples", "max_staleness", "samples", "mean_tokens",
        "nonzero_advantage_share", "loss", "grad_norm", "lr", "clip_fraction", "ratio_deviation", "entropy", "kl",
        "advantage_mean", "advantage_std", "skipped_updates", "value_loss", "explained_variance", "suspensions",
        "swapped_mib", "repeated_micro_batches", "loads_by_shm", "loads_by_cuda_ipc",
    ) or name.endswith("_s")
)  # fmt: skip


def _complement(share: float | None) -> float | None:
    return None if share is None else 1.0 - share


def _share(turns: int, agent: AgentMetrics) -> float | None:
    return turns / agent.turns if agent.turns else None


def rewards(history: History) -> str:
    curves = {str(agent): rewards_of(history, agent) for agent in history.agents}
    if not curves:
        return ""
    axes = Axes(
        name="reward",
        title="Reward per agent over the steps",
        description=reward_words(history),
        x_label="step",
        y_label="mean reward",
        y_range=_unit_range([y for points in curves.values() for _, y in points]),
        marks=history.resumes,
    )
    return f"<h2>Reward</h2>{smoothed_chart(axes, curves, len(history.steps))}"


def policy_curves(history: History) -> str:
    """Small charts with one curve per policy."""
    rows = [*_OF_POLICY, *_further(PolicyMetrics, _KNOWN_OF_POLICY)]
    charts = [
        Chart(
            title,
            label,
            y_format,
            {str(policy): history.of_policy(policy, read) for policy in history.policies},
        )
        for title, label, y_format, read in rows
    ]
    return _section("Training", charts, history)


def turn_curves(history: History) -> str:
    """Small charts about the turns of each agent."""
    rows = [*_OF_AGENT, *_further(AgentMetrics, _KNOWN_OF_AGENT)]
    charts = [
        Chart(title, label, y_format, {str(agent): history.of_agent(agent, read) for agent in history.agents})
        for title, label, y_format, read in rows
    ]
    charts += [
        Chart(
            f"Length of turns: {agent}",
            "generated tokens",
            compact,
            {name: history.of_agent(agent, read) for name, read in _QUANTILES.items()},
        )
        for agent in history.agents
    ]
    return _section("Turns", charts, history)


def other_curves(history: History) -> str:
    """Small charts of the metrics that a workflow gives, and of all others that no other section knows. Those of
    several agents or policies are in one chart."""
    names = {*history.agents, *history.policies, *history.policy_of}
    charts: dict[str, dict[str, Sequence[Point]]] = {}
    played: dict[str, dict[str, Sequence[Point]]] = {}
    for key, points in history.of_others().items():
        family, _, name = key.rpartition("/")
        if label_of(family) == "opponent":
            played.setdefault(family.replace("_", " ").capitalize(), {})[name] = points
        else:
            charts.setdefault(family if name in names else key, {})[name] = points
    of_workflow = [
        Chart(title, "mean of the step", compact, curves, keep=True) for title, curves in charts.items()
    ]
    of_games = [Chart(title, "", compact, curves) for title, curves in played.items()]
    return _section("Metrics of the workflow", of_workflow, history) + _section(
        "Opponents", of_games, history
    )


# --------------------------------------------------------------------------- small charts


@dataclass(frozen=True)
class Chart:
    """``keep``: it is drawn also if it is zero in every step; such others are named in a sentence."""

    title: str
    y_label: str
    y_format: Callable[[float], str]
    curves: Curves
    keep: bool = False


def _further(part: type[Any], known: Container[str]) -> list[tuple[str, str, Callable[[float], str], Any]]:
    """The figures of a part of the metrics that have no row of their own."""
    return [
        (field.name.replace("_", " ").capitalize(), "", compact, attrgetter(field.name))
        for field in fields(part)
        if field.name not in known
    ]


def _section(heading: str, charts: Sequence[Chart], history: History) -> str:
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


def _axes(heading: str, chart: Chart, curves: Curves, history: History) -> Axes:
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
    return re.sub(r"[^a-z0-9]", lambda found: f"-{ord(found.group()):x}-", title.lower())


def _unit_range(values: list[float]) -> Point | None:
    """[0, 1] for rewards within it, so that runs compare at a glance."""
    return (0.0, 1.0) if values and min(values) >= 0 and 0.25 < max(values) <= 1 else None
