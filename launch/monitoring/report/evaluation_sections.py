"""Charts of the evaluations: accuracy and pass@k, and each other metric, of all samplings."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from ..formatting import compact, count
from .charts import Axes, Line, Point, cell, figure, line_chart, same_as
from .page_parts import ON_ANOTHER, evenly, grid, named_lines
from .run_history import History
from .training_charts import identifier, percent

# Shares of queries or trajectories in the metrics of evaluations, of any sampling.
_ACCURACY: Final = re.compile(r"(\w+/)?(accuracy|pass@\d+)")
_DOTS: Final = 60  # with more evaluations, points are not marked

Curves = dict[str, list[Point]]


def evaluations(history: History) -> str:
    """Accuracy in a chart of its own, the other metrics in small ones."""
    names = dict.fromkeys(name for metrics in history.evaluations.values() for name in sorted(metrics))
    curves = {name: history.evaluated(name) for name in names}
    shares = {name: points for name, points in curves.items() if _ACCURACY.fullmatch(name)}
    curves_by_metric: dict[str, Curves] = {}
    for name, points in curves.items():
        if name not in shares:
            title, label = _title_and_label(name, history.samplings)
            curves_by_metric.setdefault(title, {})[label] = points
    cells = [
        _other(title, _in_order(of_title, history), history) for title, of_title in curves_by_metric.items()
    ]
    further = f"<h2>Evaluations</h2>{grid(cells)}" if cells else ""
    return _accuracy(shares, history) + further


def _in_order(curves: Curves, history: History) -> Curves:
    """The curves of agents in the order of the other charts, so that each has its colour."""
    places = {str(agent): place for place, agent in enumerate(history.agents)}
    ordered = sorted(curves, key=lambda name: places.get(name.rpartition("/")[2], len(places)))
    return {name: curves[name] for name in ordered}


def _title_and_label(name: str, samplings: Sequence[str]) -> tuple[str, str]:
    """The chart of a metric, and its name in it: ``sampled/reward/solver`` is in that of ``reward``."""
    sampling, _, rest = name.partition("/")
    sampled = rest if sampling in samplings else name
    return sampled.partition("/")[0], name


def _accuracy(curves: Mapping[str, Sequence[Point]], history: History) -> str:
    if not curves:
        return ""
    points = max(curves.values(), key=len)
    axes = Axes(
        name="accuracy",
        title="Accuracy of the evaluations",
        description="; ".join(
            f"{name}: " + ", ".join(f"step {x:g}: {y:.1%}" for x, y in of_metric[:50])
            for name, of_metric in curves.items()
        ),
        x_label="step",
        y_label="accuracy",
        y_range=(0.0, 1.0),
        y_format=percent,
        marks=history.resumes,
    )
    lines, key = _lines(curves, values=len(curves) == 1)
    words = count(len(points), "evaluation") + ("; step 0 is before training." if points[0][0] == 0 else ".")
    words += " Training never used these problems." if history.held_out else ""
    return f"<h2>Accuracy</h2>{figure(lambda width: line_chart(axes, lines, width), words, key)}"


def _other(title: str, curves: Curves, history: History) -> str:
    ys = [y for points in curves.values() for _, y in points]
    axes = Axes(
        name=identifier(f"evaluation {title}"),
        title=title.replace("_", " ").capitalize(),
        description="; ".join(
            f"{name}: " + ", ".join(f"step {x:g}: {compact(y)}" for x, y in points[:50])
            for name, points in curves.items()
        ),
        x_label="step",
        y_label="",
        y_range=(0.0, 1.0) if min(ys) >= 0 and max(ys) <= 1 else None,
        marks=history.resumes,
    )
    lines, key = _lines(curves, values=False)
    return cell(lambda width: line_chart(axes, lines, width), axes.title, key)


def _lines(curves: Mapping[str, Sequence[Point]], *, values: bool) -> tuple[list[Line], str]:
    """``values``: each point is marked and has its value, if they are few."""
    same = same_as(curves)
    lines = [
        Line(
            name,
            evenly(points),
            index,
            dots=values and len(points) <= _DOTS,
            dash=ON_ANOTHER if name in same else "",
        )
        for index, (name, points) in enumerate(curves.items())
    ]
    return lines, named_lines(lines, same)
