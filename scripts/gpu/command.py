"""The command ``scripts/gpu/battery``."""

import json
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from rich.console import Console
from rich.text import Text

from flexmarl.launch.cli.exit_status import exit_status
from flexmarl.launch.hosts import env

from .checks import Card, Check, shown
from .isolation import Result, run_isolated
from .processes import adopt_orphans
from .results import ResultsPage, read_setting, show_table
from .table import FOLDER, TESTS, Row

_LOG_LINES = 110  # the stack of a thread, as faulthandler cuts it


def _rows(_context: click.Context, _parameter: click.Parameter, names: tuple[str, ...]) -> tuple[Row, ...]:
    rows = {row.name: row for row in TESTS}
    if unknown := [name for name in names if name.upper() not in rows]:
        raise click.BadParameter(f"unknown {', '.join(unknown)}; there are: {', '.join(rows)}")
    return tuple(rows[name.upper()] for name in dict.fromkeys(names)) or TESTS


def _device(_context: click.Context, _parameter: click.Parameter, device: str) -> str:
    if not re.fullmatch(r"cpu|cuda:\d+", device):
        raise click.BadParameter(f"{device}: cpu, or a card such as cuda:0")
    return device


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("rows", nargs=-1, metavar="[TEST]...", callback=_rows)
@click.option(
    "--device",
    default="cuda:0",
    show_default=True,
    callback=_device,
    help="The card, or cpu: then the tests that need no card run, with small shapes.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object for each check instead of a table."
)
@click.option(
    "--list", "listed", is_flag=True, help="List the tests, and the point that each proves, and stop."
)
@click.option(
    "--results",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append the results to this page. Default: scripts/gpu/RESULTS.md for a card, none for cpu.",
)
@click.option(
    "--limit-factor",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    help="Multiply the limit of each test, for a slow machine. Default: 1.",
)
def battery(
    rows: tuple[Row, ...],
    device: str,
    as_json: bool,
    listed: bool,
    results: Path | None,
    limit_factor: float,
) -> int:
    """Test flexmarl on one GPU, each test with its pass criterion; all of them by default.

    \b
    Examples:
      scripts/gpu/battery                       # all, in less than 30 minutes
      scripts/gpu/battery --list
      scripts/gpu/battery T0 T1 T7 T5 T10       # the most telling ones first
      scripts/gpu/battery T5 --device cuda:1 --json > t5.jsonl
      scripts/gpu/battery --device cpu          # those that need no card, with small shapes
      FLEXMARL_PYTHON=python3 scripts/gpu/battery T0     # without an installation, on a machine without internet

    Each test is a process of its own, which is killed with all that it has started at its limit; the next one runs
    then. Models are made from configs: nothing is downloaded. Nothing else should use the card. Exits with 0 if no test
    has failed, with 1 otherwise.
    """
    if listed:
        _list(Console())
        return 0
    setting = read_setting(device)
    path = results or (None if device == "cpu" else FOLDER / "RESULTS.md")
    page = None if path is None else ResultsPage(path, setting)
    # Not before the words are read: a refusal leaves the caller's process as it was.
    adopt_orphans()
    _end_like_ctrl_c()
    ended: list[Result] = []
    with TemporaryDirectory(prefix="flexmarl-battery-", dir=env.runtime_base()) as folder:
        card = Card(device, Path(folder), limit_factor)
        for row in rows:
            limit_s = row.limit_s * limit_factor
            _say(f"{row.name}: {row.proves} (at most {limit_s:g} s)")
            try:
                ended.append(run_isolated(row, card, _report(row, as_json), limit_s))
            except KeyboardInterrupt:
                if page is not None:
                    page.end(ended, row.name)
                raise
            if page is not None:
                page.append(ended[-1])
            _show_log_of_failure(ended[-1])
    if not as_json:
        show_table(Console(), setting, ended)
    if page is not None:
        page.end(ended)
    return 1 if any(result.outcome == "failed" for result in ended) else 0


def _end_like_ctrl_c() -> None:
    """From now on the end of a lent machine, or of its connection, kills the test under way: its processes would keep
    the card's memory."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def _report(row: Row, as_json: bool) -> Callable[[Check], None]:
    def report(check: Check) -> None:
        if as_json:
            click.echo(json.dumps({"test": row.name, **check.plain()}))
            return
        criterion = f" ({check.criterion}) {check.verdict}" if check.criterion else ""
        _say(f"  {check.name}: {shown(check.value, check.unit)}{criterion}")

    return report


def _show_log_of_failure(result: Result) -> None:
    """Prints the last lines of the test's own output: its folder is removed."""
    if result.outcome != "failed" or result.log is None:
        return
    lines = result.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    _say("\n".join([f"  the end of the output of {result.test}:", *(f"    {line}" for line in lines)]))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _list(console: Console) -> None:
    for row in TESTS:
        places = "card or cpu" if row.on_cpu else "card"
        console.print(Text(f"{row.name:4} {row.proves}"), soft_wrap=True)
        console.print(Text(f"     {places}, at most {row.limit_s} s"), soft_wrap=True)
        if row.doubts:
            doubts = f"     doubtful by the code of 923309b: {', '.join(row.doubts)}"
            console.print(Text(doubts), soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the process's exit status: 0 passed, 1 failed, 2 refused, 130 stopped."""
    return exit_status(
        lambda: int(battery.main(arguments, prog_name="scripts/gpu/battery", standalone_mode=False) or 0)
    )
