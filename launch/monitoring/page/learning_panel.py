"""The panel *Learning*: evaluations, rewards, and the figures of agents and policies that show if they learn."""

from collections.abc import Iterable
from typing import Any, Final

from ....actors.figures import FIGURES, Figure, Subject
from ...run.run_endings import evaluated_names
from ..formatting import OF_REWARDS
from .curves import Query
from .headline import headline
from .plain import without_markup
from .recorded_run import RecordedRun

_OF_REWARD: Final = ("turn_reward",)


def view(run: RecordedRun, query: Query) -> dict[str, Any]:
    """The charts in their order; ``key`` and ``over``, its divisor, are keys of curves. ``query`` has no parameters."""
    return {
        "headline": headline(run),
        "held_out": run.config.get("evaluation.held_out") is True,
        "resumes": run.resumes,
        "charts": [chart for chart in _charts(run) if chart["series"]],
    }


def _charts(run: RecordedRun) -> Iterable[dict[str, Any]]:
    evaluations = run.evaluations
    names = list(dict.fromkeys(name for metrics in evaluations.values() for name in metrics))
    for name in [name for name in evaluated_names(evaluations) if not name.startswith(OF_REWARDS)]:
        yield _chart(name, "evaluation", [_series(name, f"eval/{name}")], percent=_is_share(name))
    rewards = [name for name in names if name.startswith("reward/")]
    if rewards:
        of_agents = [_series(name.partition("/")[2], f"eval/{name}") for name in rewards]
        yield _chart("Reward in evaluations", "evaluation", of_agents)
    yield _of_figure(run, "agent", FIGURES["agent"]["reward"], "Reward in training", "reward")
    for name in _OF_REWARD:
        yield _of_figure(run, "agent", FIGURES["agent"][name], "Reward of single turns", "reward")
    members = [_series(f"{name}", f"elo/{name}") for name in run.curves.names("elo")]
    yield _chart("Elo against past versions", "opponents", members)
    scores = [_series(name, f"opponent_score/{name}") for name in run.curves.names("opponent_score")]
    yield _chart("Score against past versions", "opponents", scores)
    metrics = run.curves.names("workflow")
    for name in metrics:
        yield _chart(name, "workflow", [_series(name, f"workflow/{name}")])
    subjects: tuple[Subject, ...] = ("policy", "agent")
    for subject in subjects:
        for figure in FIGURES[subject].values():
            if figure.chart is not None and figure.name not in _OF_REWARD:
                yield _of_figure(run, subject, figure, figure.chart.title, subject)


def _is_share(metric: str) -> bool:
    return any(word in metric for word in ("accuracy", "pass@", "success"))


def _of_figure(run: RecordedRun, subject: str, figure: Figure, title: str, group: str) -> dict[str, Any]:
    chart = figure.chart
    complement = chart is not None and chart.complement
    over = f"{chart.share_of}/" if chart is not None and chart.share_of else ""
    series = [
        _series(name, f"{figure.name}/{name}", f"{over}{name}" if over else "")
        for name in run.curves.names(figure.name)
    ]
    return {
        **_chart(title, group, series, percent=chart is not None and chart.percent),
        "unit": (chart.y_label if chart is not None else "") or figure.unit,
        "meaning": f"{'1 minus: ' if complement else ''}{without_markup(figure.meaning)}",
        "complement": complement,
        "small": group in ("policy", "agent"),
        "subject": subject,
    }


def _chart(title: str, group: str, series: list[dict[str, str]], *, percent: bool = False) -> dict[str, Any]:
    words = title[:1].upper() + title[1:].replace("_", " ")
    return {"title": words, "group": group, "series": series, "percent": percent, "unit": "", "meaning": ""}


def _series(label: str, key: str, over: str = "") -> dict[str, str]:
    return {"label": label, "key": key, "over": over}
