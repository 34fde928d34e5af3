"""The panel *Figures*: every figure of a run, by subject, with its unit and meaning from the table of figures."""

from typing import Any, Final

from ....actors.figures import FAMILIES, FIGURES
from ...run_folder.json_lines import label_of
from .curves import Query
from .plain import without_markup
from .recorded_run import RecordedRun

_SUBJECTS: Final = (
    "step",
    "evaluation",
    "agent",
    "policy",
    "opponent",
    "workflow",
    "source",
    "filters",
    "actor",
    "process",
    "device",
)
_OF_ACTOR: Final = "actor."
_MEANINGS: Final = {
    "version": ("policy", "versions", "the policy's version after the step"),
    "generated_by": ("policy", "versions", "the version that the step's turns were meant for"),
    "eval": ("evaluation", "", "a metric of the evaluations"),
    **{family: (family, "", meaning) for family, meaning in FAMILIES.items()},
}
_ROWS: Final = {name: (subject, row) for subject, rows in FIGURES.items() for name, row in rows.items()}


def view(run: RecordedRun, query: Query) -> dict[str, Any]:
    """One chart for each figure, with a curve for each of its subjects. ``query`` has no parameters."""
    charts: dict[str, dict[str, Any]] = {}
    for key in run.curves.all_keys():
        figure, slash, name = key.partition("/")
        of = figure if figure not in _MEANINGS or figure in ("version", "generated_by") else key
        chart = charts.get(of)
        if chart is None:
            subject, unit, meaning = _row(figure)
            title = key.partition("/")[2] if of == key and slash else figure
            chart = charts[of] = {
                "title": title, "subject": subject, "unit": unit, "meaning": meaning, "series": [],
            }  # fmt: skip
        chart["series"].append({"label": name or figure, "key": key})
    order = {subject: place for place, subject in enumerate(_SUBJECTS)}
    return {"charts": sorted(charts.values(), key=lambda chart: order.get(chart["subject"], len(order)))}


def _row(figure: str) -> tuple[str, str, str]:
    """Subject, unit and meaning."""
    if figure in _MEANINGS:
        return _MEANINGS[figure]
    if figure in _ROWS:
        subject, row = _ROWS[figure]
        return subject, "" if row.unit == "–" else row.unit, without_markup(row.meaning)
    if figure.startswith(_OF_ACTOR):
        return "actor", "", "of the actor's own statistics"
    return label_of(figure), "", "a figure that this version does not know"
