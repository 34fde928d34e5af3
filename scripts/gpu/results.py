"""The results of a battery: as a table for people, and as a section of RESULTS.md."""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flexmarl.core.errors import FlexmarlError

from .checks import Check, shown
from .isolation import Result

_ROOT = Path(__file__).parents[2]
_COLOURS = {"passed": "green", "failed": "red", "left out": "yellow"}


class NoDevice(FlexmarlError):
    """PyTorch does not see the card."""

    def __init__(self, device: str, version: str, names: Sequence[str]) -> None:
        super().__init__(
            f"device {device}: PyTorch ({version}) sees {', '.join(names) or 'no card'}; "
            "`flexmarl doctor` shows the driver's view, and --device cpu runs the tests that need no card"
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """The place and time of a battery: the device's name, its driver, the versions, the commit."""

    device: str
    driver: str
    torch: str
    python: str
    commit: str
    date: str

    def __str__(self) -> str:
        return f"{self.device}, driver {self.driver}, torch {self.torch}, Python {self.python}, commit {self.commit}"


def read_setting(device: str) -> Setting:
    """Describes this machine. Raises NoDevice if PyTorch sees no such card."""
    version, names = _read_torch(device)
    index = None if device == "cpu" else int(device.partition(":")[2])
    if index is not None and index >= len(names):
        raise NoDevice(device, version, names)
    return Setting(
        device="CPU" if index is None else f"{names[index]} ({device})",
        driver=_driver(),
        torch=version,
        python=sys.version.split()[0],
        commit=_commit(),
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )


def _read_torch(device: str) -> tuple[str, list[str]]:
    """The version, and the names of the cards, none for a CPU. Raises NoDevice if it can't be imported."""
    with suppress(PackageNotFoundError):
        if device == "cpu":  # an import takes seconds
            return importlib.metadata.version("torch"), []
    # In a process of its own: the process that runs the battery holds no memory of a device.
    names_of = "[torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]"
    program = f"import json, torch; print(json.dumps([torch.__version__, {names_of}]))"
    text = _output([sys.executable, "-P", "-c", program])
    if not text:
        raise NoDevice("torch", "not installed", [])
    version, names = json.loads(text.splitlines()[-1])
    return version, names


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return (_output(command).splitlines() or ["none"])[0]


def _commit() -> str:
    """The short hash, with ``+`` if files have changed since."""
    git = ["git", "-C", str(_ROOT)]
    commit = _output([*git, "rev-parse", "--short", "HEAD"])
    if not commit:
        return "unknown"
    return f"{commit}{'+' if _output([*git, 'status', '--porcelain', '--untracked-files=no']) else ''}"


def _output(command: list[str]) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""


def show_table(console: Console, setting: Setting, results: Sequence[Result]) -> None:
    """Prints a row for each check, and the outcome of each test."""
    table = Table(title=Text(str(setting)), title_justify="left", title_style="bold")
    for name in ("test", "check", "value", "criterion", ""):
        table.add_column(name)
    for result in results:
        for number, check in enumerate(result.checks):
            name = "" if number else result.test
            verdict = Text(check.verdict, style=_COLOURS.get(check.verdict.lower(), ""))
            table.add_row(
                name, Text(check.name), Text(shown(check.value, check.unit)), Text(check.criterion), verdict
            )
        outcome = Text(f"{result.outcome}, {result.seconds:.0f} s", style=_COLOURS[result.outcome])
        table.add_row("", "", "", "", outcome, end_section=True)
    console.print(table)
    console.print(Text(summary(results)))


def summary(results: Sequence[Result]) -> str:
    """The counts of tests by outcome, with the names of all that have not passed."""
    parts = []
    for outcome in _COLOURS:
        names = [result.test for result in results if result.outcome == outcome]
        listed = f" ({', '.join(names)})" if names and outcome != "passed" else ""
        parts.append(f"{len(names)} {outcome}{listed}")
    return ", ".join(parts)


class ResultsPage:
    """Writes a section of the page of results, and begins the page if there is none. Each test's rows are written when
    the test ends: a battery that is stopped, or killed with its machine, loses no earlier test."""

    def __init__(self, path: Path, setting: Setting) -> None:
        """Begins the section. Raises OSError, before any test, if the page can't be written."""
        self._path = path
        if not path.exists():
            path.write_text("# Results of `scripts/gpu/battery`\n")
        self._write(
            "", f"## {setting.date}, {setting.device}", "", f"{setting}.", "",
            "| test | check | value | criterion | |", "|---|---|---|---|---|",
        )  # fmt: skip

    def append(self, result: Result) -> None:
        """Appends the rows of a test."""
        last = f"| {result.test} | | {result.seconds:.0f} s | | {result.outcome} |"
        self._write(*(_row(result, check) for check in result.checks), last)

    def end(self, results: Sequence[Result], stopped_in: str = "") -> None:
        """Appends the counts of all tests. ``stopped_in``: the test that the battery was stopped in."""
        self._write("", f"{summary(results)}{f'; stopped in {stopped_in}' if stopped_in else ''}.")

    def _write(self, *lines: str) -> None:
        with self._path.open("a") as page:
            page.write("".join(f"{line}\n" for line in lines))


def _row(result: Result, check: Check) -> str:
    cells: list[Any] = [
        result.test,
        check.name,
        shown(check.value, check.unit),
        check.criterion,
        check.verdict,
    ]
    return f"| {' | '.join(str(cell).replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"
