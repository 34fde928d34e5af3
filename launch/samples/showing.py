"""The output of ``flexmarl samples``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...actors.recorded_trajectory import RecordedTrajectory
from ..formatting import count, listed
from ..json_lines import finite
from .conversation import printable, show
from .reader import Order, Samples
from .tokens import TokenTexts

_PIPED_WIDTH: Final = 200


def show_trajectories(
    samples: Samples,
    run: Path,
    order: Order,
    limit: int,
    filters: Mapping[str, Any],
    *,
    tokens: bool,
    as_json: bool,
) -> None:
    """Prints at most ``limit`` trajectories, the newest or best one first, and how many there are."""
    found = samples.trajectories(order=order, limit=limit, **filters)
    if as_json:
        for one in found:
            click.echo(json.dumps(as_object(one, tokens=tokens)))
        return
    console = _console()
    texts = TokenTexts(run) if tokens and found else None
    for one in found:
        show(console, one, texts)
    for name, problem in texts.problems.items() if texts else ():
        console.print(escape(f"tokens are numbers, as the tokenizer {name} can't be loaded: {problem}"))
    total = samples.count(**filters)
    console.print(
        escape(f"{len(found)} of {count_of(total)}") if total else escape(explained(samples, filters))
    )


def show_list(samples: Samples, filters: Mapping[str, Any], limit: int, *, as_json: bool) -> None:
    """Prints the newest ``limit`` turns at most, the oldest of them first."""
    rows = samples.rows(limit=limit, **filters)
    if as_json:
        for row in rows:
            click.echo(json.dumps(finite(row._asdict())))
        return
    console = _console()
    if rows:
        table = Table()
        for name in rows[0]._fields:
            table.add_column(name.replace("_", " "))
        for row in rows:
            table.add_row(*(escape(_cell(value)) for value in row))
        console.print(table)
    total = samples.count(**filters)
    words = f"{count(len(rows), 'turn')}, of {count_of(total)}" if total else explained(samples, filters)
    console.print(escape(words))


def count_of(trajectories: int) -> str:
    return f"{trajectories} trajector{'y' if trajectories == 1 else 'ies'}"


def explained(samples: Samples, filters: Mapping[str, Any]) -> str:
    """The reason of an empty result: the filters, and the content of the file."""
    there = samples.recorded()
    if not there.trajectories:
        return f"no trajectory is recorded yet{_dropped(there.dropped)}"
    steps = "no step" if there.first_step is None else f"steps {there.first_step} to {there.last_step}"
    after = f", evaluations after step {listed(there.evaluations)}" if there.evaluations else ""
    asked = ", ".join(
        f"{name}={str(value).lower() if value in (True, False) else value}"
        for name, value in filters.items()
        if value is not None
    )
    return f"none of {count_of(there.trajectories)} fits {asked}; recorded are {steps}{after}{_dropped(there.dropped)}"


def as_object(one: RecordedTrajectory, *, tokens: bool) -> dict[str, Any]:
    """A trajectory as plain data. ``tokens``: with the ids and log-probabilities."""
    turns = [turn._asdict() for turn in one.turns]
    for turn in turns:
        if not tokens:
            turn["tokens"] = len(turn["tokens"])
            del turn["logprobs"]
    return {
        "step": one.step,
        "evaluation": one.evaluation,
        "query": one.query.id,
        "text": one.query.text,
        "trajectory": one.number,
        "rewards": one.rewards,
        "metrics": one.metrics,
        "failure": one.failure,
        "turns": turns,
    }


def _dropped(trajectories: int) -> str:
    return f" ({trajectories} could not be recorded)" if trajectories else ""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console
