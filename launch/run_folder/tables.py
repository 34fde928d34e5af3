"""Stored runs as tables for people."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ..monitoring.console.terminal import Terminal
from ..monitoring.formatting import OF_REWARDS, duration
from .compare import MISSING, Comparison
from .stored_run import StoredRun

_PIPED_WIDTH = 240


def show_list(runs: Sequence[StoredRun]) -> None:
    """Prints a row for each run, in the order of ``runs``, to standard output."""
    table = Table()
    for column in ("run", "recipe", "state", "steps", "last evaluation", "age", "size"):
        table.add_column(column, no_wrap=column == "run", overflow="fold")
    for run in runs:
        steps = f"{run.step}" if run.steps is None else f"{run.step}/{run.steps}"
        cells = (run.name, run.recipe, run.state, steps, _evaluation(run), _age(run.age_s))
        table.add_row(*cells, _size(run.size_bytes))
    _console().print(table)


def show_comparison(runs: Sequence[StoredRun], comparison: Comparison) -> None:
    """Prints the differing settings and the figures to standard output, a column for each run. ``comparison``: of the
    same ``runs``."""
    console = _console()
    for title, rows in (("config", comparison.config), ("figures", comparison.figures)):
        if not rows:
            console.print(f"{title}: no differences")
            continue
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("")
        for run in runs:
            table.add_column(run.name, overflow="fold")
        for key, values in rows.items():
            table.add_row(key, *map(_text, values))
        console.print(table)


def _console() -> Terminal:
    console = Terminal()
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


def _evaluation(run: StoredRun) -> str:
    """The workflow's metrics and the step; the rewards if the workflow has no metrics."""
    if run.evaluated_step is None:
        return ""
    metrics = {name: value for name, value in run.evaluation.items() if not name.startswith(OF_REWARDS)}
    figures = ", ".join(f"{name} {value:.3g}" for name, value in (metrics or run.evaluation).items())
    return f"{figures} (step {run.evaluated_step})"


def _age(seconds: float) -> str:
    days = int(seconds // 86400)
    return f"{days} d" if days >= 2 else duration(round(seconds))


def _size(size_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"


def _text(value: Any) -> str:
    if value is MISSING:
        return "(no such key)"
    if value is None:
        return "-"
    return f"{value:.4g}" if type(value) is float else str(value)
