"""The content of ``flexmarl top``, of runs' folders and of the answers of their processes."""

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.names import PolicyName, Step
from flexmarl.actors.run_events import (
    InstanceChanged,
    PolicyResumed,
    PolicySuspended,
    RunEnded,
    RunEvent,
    TrajectoryFailed,
)
from flexmarl.launch.monitoring.page.recorded_run import RecordedRun
from flexmarl.launch.monitoring.top.overview import Overview, Section, overview, shorten, views_of
from flexmarl.launch.run_folder.json_lines import event_to_json

from ...run_folder.records import record
from ..page.folders import STARTED, folder_of

CONFIG = (
    "recipe: my/sort\nmode: strict\ntraining: {steps: 9}\n"
    "agents: {sorter: {policy: small}, checker: {policy: small}, judge: {policy: frozen}}\n"
)
LIVE: Mapping[str, Any] = {
    "step": 2,
    "phase": "rollouts",
    "since_s": 61.0,
    "idle_s": 0.0,
    "causes": (),
    "instances": {"small": 2, "frozen": 1},
    "processes": {},
    "waiting": {"small": 7},
    "running": {"small-0": 3},
    "waits": ("trainer: micro-batch of small, for 2 s",),
}
STEPS = [
    record(step, agents=("small",)) | {"reward/sorter": 0.25, "queue_s/sorter": 4.0, "turns/sorter": 2}
    for step in (1, 2)
]


@contextmanager
def alive(folder: Path) -> Iterator[None]:
    """As a process that works on the run has it."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def overview_of(folder: Path, live: Mapping[str, Any] | None = None) -> Overview:
    run = RecordedRun(folder)
    run.set_live(live)
    with run.reading():
        return overview(run, views_of(run))


def section(overview: Overview, title: str) -> Section:
    return next(section for section in overview.sections if section.title.startswith(title))


def lines(overview: Overview) -> list[str]:
    return [line for section in overview.sections for line in section.lines]


def texts(overview: Overview) -> list[str]:
    cells = [cell for section in overview.sections for row in section.rows for cell in row]
    return [*lines(overview), *cells]


def test_a_running_run_shows_its_agents_with_queue_instances_and_trainer(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "first", STEPS, config=CONFIG)
    with alive(folder):
        shown_run = overview_of(folder, LIVE)
    assert not shown_run.has_ended
    agents = section(shown_run, "Agents")
    rows = {row[0]: dict(zip(agents.columns, row, strict=True)) for row in agents.rows}
    assert rows["sorter"] == {
        "agent": "sorter", "policy": "small", "version": "2", "reward": "0.250", "queue": "7", "wait": "2 s",
        "instances": "2", "trainer": "busy 23%",
    }  # fmt: skip
    assert rows["judge"]["version"] == rows["judge"]["trainer"] == "-" and rows["judge"]["instances"] == "1"
    assert section(shown_run, "Instances").rows == [("small-0", "-", "ready", "3", "")]
    assert section(shown_run, "Waits").lines == ["trainer: micro-batch of small, for 2 s"]
    first, state, *_ = lines(shown_run)
    assert first.startswith("first · strict · step 2/9 · ") and first.endswith(" left")
    assert state == "Running for 61 s, now: rollouts"


def test_a_process_that_does_not_answer_leaves_the_folder_to_show(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, STEPS, config=CONFIG)
    with alive(folder):
        shown_run = overview_of(folder)
    assert "has not answered yet" in lines(shown_run)[1]
    assert section(shown_run, "Agents").rows[0][:3] == ("sorter", "2", "0.250")


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([event_to_json(RunEnded(False, Step(2)))], "This run has ended: done."),
        ([], "This run has ended: killed."),
        ([event_to_json(RunEnded(False, Step(2), error="boom"))], "This run has ended: failed."),
    ],
)
def test_a_run_that_has_ended_says_so(tmp_path: Path, events: list[dict[str, Any]], words: str) -> None:
    shown_run = overview_of(folder_of(tmp_path, STEPS, [STARTED, *events], CONFIG), LIVE)
    assert shown_run.has_ended and lines(shown_run)[1].startswith(words)
    assert section(shown_run, "Waits").lines == [], "an answer from before its end"
    assert ("boom" in lines(shown_run)) == ("failed" in words)


def test_a_run_that_no_process_has_worked_on_is_shown_too(tmp_path: Path) -> None:
    shown_run = overview_of(folder_of(tmp_path, [], []))
    assert "No process has worked on this run yet." in lines(shown_run)


def test_the_slots_of_a_shared_pool_have_their_policies_with_the_reasons(tmp_path: Path) -> None:
    small, large = PolicyName("small"), PolicyName("large")
    moves: list[RunEvent] = [
        PolicyResumed(small, "slot-0", "it has work", 1, 0.1, "shm"),
        PolicySuspended(small, "slot-0", "large waits", 1, 0.1, "shm"),
        PolicyResumed(large, "slot-0", "its samples are there", 1, 0.1, "shm"),
    ]
    config = "agents: {a: {policy: small}, b: {policy: large}}\n"
    steps = [
        record(1, agents=("small", "large"))
        | {f"pool_{part}_s/small": 1.0 for part in ("computing", "idle", "swapping", "waiting")}
    ]
    folder = folder_of(tmp_path, steps, [STARTED, *map(event_to_json, moves)], config)
    shown_run = overview_of(folder)
    [slot] = section(shown_run, "Slots").rows
    assert (slot[0], slot[1], slot[3]) == ("slot-0", "large", "its samples are there")
    trainers = {row[0]: row[5] for row in section(shown_run, "Agents").rows}
    assert trainers == {"a": "suspended, computing 25%", "b": "on slot-0"}


HOSTILE = "\x1b[2J\x1b]0;owned\x07[red]x[/]\u202eabc\x9b1m\u2066"


def test_texts_of_others_are_harmless_and_short(tmp_path: Path) -> None:
    name = f"a{HOSTILE}"
    config = f"agents: {{{json.dumps(name)}: {{policy: {json.dumps(name)}}}}}\nmode: {json.dumps(HOSTILE)}\n"
    events: list[RunEvent] = [
        InstanceChanged(name, PolicyName(name), "gone", HOSTILE),
        TrajectoryFailed(Step(1), HOSTILE, "x" * 10_000_000 + HOSTILE, HOSTILE),
    ]
    folder = folder_of(tmp_path, [record(1, agents=(name,))], [STARTED, *map(event_to_json, events)], config)
    live = {**LIVE, "phase": HOSTILE, "waits": [HOSTILE * 100_000], "causes": ["\n" * 10_000_000 + "z"]}
    with alive(folder):
        shown_run = overview_of(folder, live)
    assert any("[red]" in text for text in texts(shown_run))
    for text in texts(shown_run):
        assert text.isprintable() and len(text) < 1000, text[:100]


def test_a_long_text_is_cut_and_says_so() -> None:
    assert shorten("a\nb") == "a b" and shorten("x" * 400) == "x" * 400
    assert shorten("x" * 401) == f"{'x' * 400} …" and shorten(" " * 10_000 + "z") == " …"
