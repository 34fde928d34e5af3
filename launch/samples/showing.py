"""The output of ``flexmarl samples``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from ...actors.recorded_trajectory import RecordedTrajectory
from ..console.echo import echo_json
from ..console.terminal import Terminal
from ..formatting import count, listed
from ..line_writer import finite
from .conversation import show
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
            echo_json(as_object(one, tokens=tokens))
        return
    console = _console()
    texts = TokenTexts(run) if tokens and found else None
    for one in found:
        show(console, one, texts)
    for name, problem in texts.problems.items() if texts else ():
        console.print(f"tokens are numbers, as the tokenizer {name} can't be loaded: {problem}")
    total = samples.count(**filters)
    console.print(f"{len(found)} of {count_of(total)}" if total else explained(samples, filters))


def show_list(samples: Samples, filters: Mapping[str, Any], limit: int, *, as_json: bool) -> None:
    """Prints the newest ``limit`` turns at most, the oldest of them first."""
    rows = samples.rows(limit=limit, **filters)
    if as_json:
        for row in rows:
            echo_json(finite(row._asdict()))
        return
    console = _console()
    if rows:
        table = Table()
        for name in rows[0]._fields:
            table.add_column(name.replace("_", " "))
        for row in rows:
            table.add_row(*map(_cell, row))
        console.print(table)
    total = samples.count(**filters)
    words = f"{count(len(rows), 'turn')}, of {count_of(total)}" if total else explained(samples, filters)
    console.print(words)


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
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _console() -> Terminal:
    console = Terminal(highlight=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console
