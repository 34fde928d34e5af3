"""Every command that prints from a run's folder, on a folder whose texts others have made: models, recipes, hosts."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

import click
import pytest

from flexmarl.actors.messages import Query, Selection
from flexmarl.actors.names import PolicyName, Step
from flexmarl.actors.run_events import (
    InstanceChanged,
    RunEnded,
    RunEvent,
    RunStalled,
    TrajectoryFailed,
)
from flexmarl.actors.spans import Span
from flexmarl.launch.cli.main import main
from flexmarl.launch.cli.registry import cli
from flexmarl.launch.monitoring import store_view
from flexmarl.launch.run_folder.json_lines import event_to_json
from flexmarl.launch.run_folder.run_directory import RunDirectory

from ..monitoring.page.folders import STARTED, folder_of
from ..monitoring.timeline.test_timeline import write as write_spans
from ..run_folder.records import record as step_record
from ..run_folder.samples.files import record, recorded_run, trajectory

HOSTILE = "M\x1b[2J\x1b]0;owned\x07\x9b1m\x08\r\x7f\u202e\u2066[red]:smile:"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
NO_RUN_FOLDER = {"bench", "completion", "doctor", "new", "plan", "simulate"}
"""The commands that take no run. A new command belongs here, or into ``COMMANDS``."""


class Screen(StringIO):
    """Standard output. ``is_terminal``: colours are allowed."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def hostile_run(folder: Path) -> Path:
    """A run that has failed. Its folder, agent, policy, host and texts are hostile."""
    agent = turn_name = HOSTILE
    config = (
        f"recipe: {json.dumps(HOSTILE)}\nmode: {json.dumps(HOSTILE)}\n"
        f"agents: {{{json.dumps(agent)}: {{policy: {json.dumps(agent)}}}}}\ntraining: {{steps: 9}}\n"
    )
    one = trajectory(1, 1, 0, text=HOSTILE)
    turns = [
        turn._replace(
            agent=agent, prompt=(HOSTILE, {"role": HOSTILE, "content": HOSTILE}), columns={HOSTILE: HOSTILE}
        )
        for turn in one.turns
    ]
    asked = Query(HOSTILE, HOSTILE)
    lost = one._replace(query=asked, failure=HOSTILE, turns=tuple(turns), rewards={turn_name: 1.0})
    recorded_run(folder, [record(lost, one._replace(query=asked, turns=tuple(turns)))])
    events: list[RunEvent] = [
        InstanceChanged(HOSTILE, PolicyName(HOSTILE), "gone", HOSTILE),
        TrajectoryFailed(Step(1), HOSTILE, HOSTILE, HOSTILE),
        RunStalled(Step(1), 30.0, (HOSTILE,)),
        RunEnded(False, Step(1), error=HOSTILE, traceback=HOSTILE),
    ]
    step = step_record(1, agents=(HOSTILE,)) | {f"eval/{HOSTILE}": 0.5, f"workflow/{HOSTILE}": 0.5}
    folder_of(folder, [step], [STARTED, *map(event_to_json, events)], config)
    directory = RunDirectory(folder)
    directory.logs.mkdir(exist_ok=True)
    (directory.logs / "launcher.log").write_text(HOSTILE + "\n")
    write_spans(directory, Span(HOSTILE, "turn", 1.0, 2.0, query=HOSTILE, policy=HOSTILE))
    return folder


def words_of(run: str) -> Mapping[str, Sequence[str]]:
    """The words of each command, by a name of the case that begins with the command's."""
    return {
        "admit": ["admit", run, "file", "--may", HOSTILE],
        "admit of a run that has ended": ["admit", run, "file", "--may", "watch"],
        "calibrate": ["calibrate", run],
        "credit": ["credit", run],
        "eval": ["eval", run],
        "export": ["export", run, HOSTILE, "out"],
        "logs": ["logs", run],
        "logs of an unknown actor": ["logs", run, HOSTILE],
        "node": ["node", "--join", run],
        "page": ["page", run, "--listen", HOSTILE],
        "report": ["report", run],
        "runs list": ["runs", "list", "--runs", str(Path(run).parent)],
        "runs list as JSON": ["runs", "list", "--runs", str(Path(run).parent), "--json"],
        "runs compare": ["runs", "compare", run, f"{run}2"],
        "runs compare as JSON": ["runs", "compare", run, f"{run}2", "--json"],
        "runs rm": ["runs", "rm", f"{run}2", "--yes"],
        "samples": ["samples", run],
        "samples with tokens": ["samples", run, "--tokens"],
        "samples as a list": ["samples", run, "--list"],
        "samples as JSON": ["samples", run, "--json"],
        "samples as demonstrations": [
            "samples",
            run,
            "--as-demonstrations",
            f"{HOSTILE}.jsonl",
            "--success",
            "<2",
        ],
        "samples as demonstrations of a metric": [
            "samples",
            run,
            "--as-demonstrations",
            "x",
            "--success",
            f"{HOSTILE}>1",
        ],
        "samples of an unknown query": ["samples", run, "--query", f"{HOSTILE}?"],
        "serve": ["serve", run],
        "slurm": ["slurm", run, HOSTILE],
        "status": ["status", run],
        "status as JSON": ["status", run, "--json"],
        "stop": ["stop", run],
        "store": ["store", run],
        "store of a trajectory": ["store", run, "--trajectory", "x"],
        "store as JSON": ["store", run, "--json"],
        "submit": ["submit", run, f"{run}/config.yaml"],
        "sweep": ["sweep", run, f"{HOSTILE}=1,2"],
        "top": ["top", run],
        "trace": ["trace", run],
        "train": ["train", "--resume", run],
    }


COMMANDS = tuple(words_of("run"))


def test_every_command_is_tried_or_takes_no_run() -> None:
    tried = {name.split()[0] for name in COMMANDS}
    assert tried | NO_RUN_FOLDER == set(cli.list_commands(click.Context(cli)))


@pytest.mark.parametrize(
    ("command", "is_terminal"),
    # A log that is piped stays as it is: see test_hostile_texts.py.
    [
        *((command, True) for command in COMMANDS),
        *((command, False) for command in COMMANDS if command != "logs"),
    ],
)
def test_texts_of_a_run_are_shown_and_not_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, is_terminal: bool
) -> None:
    runs = tmp_path / "runs"
    run = hostile_run(runs / f"run{HOSTILE}")
    hostile_run(runs / f"run{HOSTILE}2")
    rows = [
        {
            "sample_id": HOSTILE,
            "text": HOSTILE,
            HOSTILE: HOSTILE,
            "step": 1,
            "query": HOSTILE,
            "trajectory": 0,
        }
    ]
    for name in ("select", "trajectory"):
        monkeypatch.setattr(store_view, name, lambda *_: Selection(rows, 1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERM", "xterm-256color")
    out, err = (Screen(is_terminal=is_terminal) for _ in range(2))
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", out)
        patched.setattr(sys, "stderr", err)
        status = main([*words_of(str(run))[command]])
    for stream in (out, err):
        text = stream.getvalue()
        assert not OBEYED.search(COLOUR.sub("", text) if is_terminal else text), (status, text)
    assert (out.getvalue() + err.getvalue()).strip(), "it prints something"
    assert "M" in out.getvalue() + err.getvalue()
