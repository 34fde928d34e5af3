"""The parts that the output of all benchmarks shares: the progress, a table of goals, a warning."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..monitoring.formatting import compact

# Above this load by other programs the figures are not reliable.
_BUSY_PERCENT = 10


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """Shows progress by a bar on a terminal, else by lines. Yields a function to be called before each part."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
        return
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    text = TextColumn("{task.description}", markup=False)
    # No refresh thread: it would disturb the measurement. The bar is drawn between two parts.
    with Progress(text, *columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        begun = 0

        def report(description: str) -> None:
            nonlocal begun
            bar.update(task, description=description, completed=begun)
            bar.refresh()
            begun += 1

        yield report


def warn_if_busy(console: Console, result: Mapping[str, Any]) -> None:
    if (busy := result["machine"]["busy_percent"]) > _BUSY_PERCENT:
        console.print(
            Text(f"The machine was {busy:.0f} % busy with other things: measure again.", style="yellow")
        )


def goals_table(title: str, goals: list[dict[str, Any]], beside: str = "bare") -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for column in ("measured", beside, "ratio"):
        table.add_column(column, justify="right")
    table.add_column("goal")
    table.add_column("")
    for verdict in goals:
        table.add_row(
            verdict["words"],
            compact(verdict["measured"]),
            "" if verdict["bare"] is None else compact(verdict["bare"]),
            "" if verdict["ratio"] is None else f"{verdict['ratio']:.2f}",
            verdict["goal"],
            "[green]met" if verdict["met"] else "[red]not met",
        )
    return table
