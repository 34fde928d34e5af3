"""Stored runs as tables for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from ..monitoring.console.terminal import Terminal
from ..monitoring.formatting import OF_REWARDS, count, duration
from .compare import MISSING, Spread, compare, compare_seeds
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


def show_comparison(runs: Sequence[StoredRun]) -> None:
    """Prints the differing settings and the figures to standard output: a column for each run, or for the runs that
    differ in their seeds alone."""
    if (seeds := compare_seeds(runs)) is not None:
        _show_columns([_group_name(group) for group in seeds.groups], seeds.config, seeds.figures)
    else:
        comparison = compare(runs)
        _show_columns([run.name for run in runs], comparison.config, comparison.figures)


def _group_name(group: Sequence[StoredRun]) -> str:
    return group[0].name if len(group) == 1 else f"{group[0].name} and {count(len(group) - 1, 'more seed')}"


def _show_columns(
    names: Sequence[str], config: Mapping[str, tuple[Any, ...]], figures: Mapping[str, tuple[Any, ...]]
) -> None:
    console = _console()
    for title, rows in (("config", config), ("figures", figures)):
        if not rows:
            console.print(f"{title}: no differences")
            continue
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("")
        for name in names:
            table.add_column(name, overflow="fold")
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
    if isinstance(value, Spread):
        return _spread(value)
    return f"{value:.4g}" if type(value) is float else str(value)


def _spread(value: Spread) -> str:
    """``0.91 (0.88 to 0.93, n=3)``; the number alone if all are equal."""
    if value.least == value.greatest:
        return f"{value.mean:.4g}" if value.count > 1 else f"{value.mean:.4g} (n=1)"
    return f"{value.mean:.4g} ({value.least:.4g} to {value.greatest:.4g}, n={value.count})"
