"""The parts that the commands of all benchmarks share: their options, and the way from a measurement to its result."""

import json
import logging
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import click
import structlog
import uvloop
from rich.console import Console

from . import result_tables
from .measure import Report

Command = TypeVar("Command", bound=Callable[..., Any])
Result = dict[str, Any]


def common_options(rounds: int, quick_time: str) -> Callable[[Command], Command]:
    """The options of every benchmark. ``rounds``: the default. ``quick_time``: about how long ``--quick`` takes."""
    options = (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables."),
        click.option(
            "--rounds",
            type=click.IntRange(1),
            help=f"Rounds, whose median is shown. Default: {rounds}, 1 with --quick.",
        ),
        click.option("--quick", is_flag=True, help=f"A first look in {quick_time}; not for comparisons."),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def run_benchmark(
    measure: Callable[[Report], Result | Coroutine[Any, Any, Result]],
    parts: int,
    tables: Callable[[Console, Mapping[str, Any]], None],
    as_json: bool,
) -> int:
    """Measures, with the progress on standard error, and shows the result on standard output. Returns the exit status.

    ``parts``: how often ``measure`` reports a part. ``tables``: show the result if ``as_json`` is false.
    """
    _log_warnings_only()
    with result_tables.progress(Console(stderr=True), parts) as report:
        measured = measure(report)
        result = measured if isinstance(measured, dict) else uvloop.run(measured)
    if as_json:
        click.echo(json.dumps(result))
    else:
        tables(Console(), result)
    return 0


def _log_warnings_only() -> None:
    """Sends the runtime's warnings and errors to standard error; standard output is for the result."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
