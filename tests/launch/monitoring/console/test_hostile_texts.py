"""Texts of models, recipes, names and other hosts, on their way to a terminal through each command's own printer."""

import dataclasses
import html
import io
import json
import random
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import structlog

from flexmarl.actors.messages import Selection
from flexmarl.actors.names import Step
from flexmarl.actors.run_events import TrajectoryFailed
from flexmarl.core.base.texts import printable
from flexmarl.core.telemetry import configure_logging, get_logger
from flexmarl.launch.cli import doctor
from flexmarl.launch.cli.exit_status import exit_status
from flexmarl.launch.cli.main import main
from flexmarl.launch.cli.status import words_of
from flexmarl.launch.config.config_reading import resolve, to_yaml
from flexmarl.launch.errors import RunFailed
from flexmarl.launch.hosts.nodes.probing import HostFinding
from flexmarl.launch.monitoring import store_view
from flexmarl.launch.monitoring.console.echo import echo, json_line
from flexmarl.launch.monitoring.console.output import Output
from flexmarl.launch.monitoring.console.terminal import Terminal
from flexmarl.launch.monitoring.page.frozen_page import write_report
from flexmarl.launch.run.run_control import ProcessStatus, RunStatus
from flexmarl.launch.run_folder import tables
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.run_folder.samples.conversation import show
from flexmarl.launch.run_folder.stored_run import read_run

from ...conftest import SIMULATED_POLICIES, TINY
from ...run_folder.samples.files import record, recorded_run, trajectory

OBEYED = [
    *map(chr, [*range(1, 9), *range(11, 32), *range(127, 160)]),
    *"\u061c\u200e\u200f\u202a\u202e\u2066\u2069",
]
COMMANDS = [
    "\x1b[2J",
    "\x1b]0;owned\x07",
    "\x1b[31mred",
    "\x9b2J",
    "\x1b]8;;http://x\x1b\\",
    "\r> ",
    "\x08\x08",
]
MARKUP = ["[red]", "[/]", "[link=http://x]", ":smile:", "[gpu]", "[/nonsense]"]


class OnTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def hostile(seed: int) -> list[str]:
    """Parts of one text, each between marks."""
    draw = random.Random(seed)
    parts = [draw.choice(OBEYED), draw.choice(COMMANDS), draw.choice(MARKUP)]
    draw.shuffle(parts)
    return [f"M{number}{part}" for number, part in enumerate(parts)]


def stopped_run(folder: Path, text: str) -> RunDirectory:
    run = RunDirectory.create(
        folder / f"run{text.replace('/', '')}", to_yaml(resolve(str(TINY), [*SIMULATED_POLICIES]))
    )
    events = [
        {"time": 1.0, "event": "run_started", "name": text, "steps": 2, "mode": "strict"},
        {
            "time": 2.0,
            "event": "run_ended",
            "step": 1,
            "wall_s": 1.0,
            "stopped": False,
            "error": text,
            "kind": text,
        },
    ]
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    (run.logs / "launcher.log").write_text(text + "\n")
    return run


def on_console(text: str, form: Any) -> None:
    output = Output(form, sys.stdout)
    config = resolve(str(TINY), [*SIMULATED_POLICIES])
    with output.display(config, text, 0) as display:
        display.phase(text)
        display.warn(text, at_once=True)
        display.event(TrajectoryFailed(Step(1), text, text, f"{text}\n{text}"))
    output.note(text)
    output.result(text)


def in_samples(text: str) -> None:
    one = trajectory(1, 1, 0, text=text)
    turn = one.turns[0]._replace(
        agent=text, prompt=(text, {"role": text, "content": text}), columns={text: text}
    )
    one = one._replace(
        query=dataclasses.replace(one.query, id=text), failure=text, turns=(turn,), rewards={text: 1.0}
    )
    show(Terminal(highlight=False), one)
    show(Terminal(highlight=False), one, lambda turn: [text] * len(turn.tokens))


def in_tables(text: str, run: RunDirectory) -> None:
    stored = dataclasses.replace(read_run(run.path), recipe=text, evaluation={text: 1.0}, evaluated_step=1)
    tables.show_list([stored])
    other = dataclasses.replace(stored, config={text: text}, rewards={text: 1.0})
    tables.show_comparison([stored, other])
    tables.show_comparison([dataclasses.replace(other, config={text: text, "seed": text}), other])


def of_host(text: str) -> None:
    doctor._show_host(Terminal(), HostFinding(text, text, None, None, 0.0, (text,)))


def in_log(text: str, _: RunDirectory) -> None:
    configure_logging("node", sys.stdout, "warning")
    get_logger("flexmarl.core.x").warning(text, field=text, several=[text])
    try:
        raise ValueError(text)
    except ValueError:
        get_logger("flexmarl.core.x").exception("failed")


def raised(error: Exception) -> int:
    raise error


PRINTERS: Mapping[str, Callable[[str, RunDirectory], object]] = {
    "normal": lambda text, run: on_console(text, "normal"),
    "verbose": lambda text, run: on_console(text, "verbose"),
    "quiet": lambda text, run: on_console(text, "quiet"),
    "samples": lambda text, run: in_samples(text),
    "store": lambda text, run: store_view.show(Selection([{"sample_id": text, "text": text, text: 1}], 1)),
    "runs": in_tables,
    "status": lambda text, run: main(["status", str(run.path)]),
    "status of a running run": lambda text, run: echo(
        words_of(run.path, RunStatus(1, 2, text, 1.0, {text: 1}, {text: ProcessStatus(1, 1.0)}))
    ),
    "logs": lambda text, run: main(["logs", str(run.path)]),
    "refusal": lambda text, run: exit_status(lambda: raised(RunFailed(text))),
    "usage": lambda text, run: exit_status(lambda: raised(click.UsageError(text))),
    "file": lambda text, run: exit_status(lambda: raised(OSError(2, text, text))),
    "doctor": lambda text, run: of_host(text),
    "log": in_log,
}


@pytest.mark.parametrize("printer", PRINTERS)
def test_control_characters_are_shown_and_markup_is_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printer: str
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERM", "xterm-256color")
    known = structlog.get_config()
    for seed in range(20):
        parts = hostile(seed)
        text = "".join(parts)
        run = stopped_run(tmp_path / str(seed), text)
        screen = OnTerminal()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", screen)
            patched.setattr(sys, "stderr", screen)
            PRINTERS[printer](text, run)
        structlog.configure(**known)
        shown = screen.getvalue()
        plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)  # numbers in tables have colours
        for part in parts:
            assert part.isprintable() or part not in shown, (seed, part, shown)
            assert printable(part) in plain, (seed, part, shown)
        assert not [char for char in OBEYED if char in shown and char not in "\x1b\r"], (seed, shown)


@pytest.mark.parametrize("seed", range(20))
def test_the_report_has_no_elements_of_others(tmp_path: Path, seed: int) -> None:
    element = random.Random(seed).choice(
        ["<img src=x onerror=M>", "</title><M>", "\"'><M>", "<!--M", "&lt;M<M"]
    )
    text = "".join(hostile(seed)) + element
    run = stopped_run(tmp_path, text)
    metrics = {"step": 1, "time_s": 1.0, f"reward/{text}": 1.0, f"eval/{text}": 1.0, f"workflow/{text}": 1.0}
    run.metrics.write_text(json.dumps(metrics) + "\n")
    one = trajectory(1, 1, 0, evaluation=True, text=text)
    samples = recorded_run(tmp_path / "other", [record(one._replace(failure=text))]).samples
    samples.rename(run.samples)
    page = write_report(run.path).read_text()
    shown = element.replace("<", "\\u003c")
    assert (
        element not in page.replace(f"<title>{html.escape(run.path.name)}", "")
        and json.dumps(shown)[1:-1].replace("\\\\", "\\") in page
    )


@pytest.mark.parametrize("seed", range(20))
def test_json_has_the_text_in_ascii(seed: int) -> None:
    text = "".join(hostile(seed))
    line = json_line({text: text})
    assert line.isascii() and line.isprintable() and json.loads(line) == {text: text}


def test_a_log_that_is_piped_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stopped_run(tmp_path, "a\x1b[1mb")
    assert main(["logs", str(run.path)]) == 0
    assert capsys.readouterr().out.rstrip("\n") in ("a\x1b[1mb", "ab")  # click takes colours out for a pipe


def test_samples_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded_run(tmp_path / "run", config=to_yaml(resolve(str(TINY), [*SIMULATED_POLICIES])))
    assert main(["samples", str(run.path), "--query", "\x1b[2J[red]"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_all_commands_print_by_the_terminal_that_shows_them() -> None:
    """Numbers of benchmarks are this program's own."""
    launch = Path(store_view.__file__).parents[1]
    assert (launch / "cli").is_dir()
    others = [
        f"{file.relative_to(launch)}:{number}"
        for file in launch.rglob("*.py")
        if file.relative_to(launch).parts[0] not in ("bench", "recipes", "examples")
        and file.name not in ("terminal.py", "echo.py")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if " Console(" in line or "click.echo(" in line or "secho(" in line or "rich.markup" in line
    ]
    assert not others
