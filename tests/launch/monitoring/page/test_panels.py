"""The data of the panels: pure functions of a run's folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.figures import FIGURES
from flexmarl.actors.names import PolicyName, Step
from flexmarl.actors.run_events import (
    CheckpointSaved,
    Evaluated,
    InstanceChanged,
    InstanceMoved,
    NodeLost,
    PolicyResumed,
    PolicySuspended,
    RunContinued,
    RunEnded,
    RunStalled,
    TrajectoryFailed,
)
from flexmarl.launch.errors import RunDirectoryError, SamplesUnreadable
from flexmarl.launch.monitoring.page import (
    figures_panel,
    learning_panel,
    now_panel,
    policies_panel,
    settings_panel,
    timeline_panel,
)
from flexmarl.launch.monitoring.page.headline import headline
from flexmarl.launch.monitoring.page.page_app import WEB
from flexmarl.launch.monitoring.page.panels import PANELS
from flexmarl.launch.monitoring.page.plain import plain, without_markup
from flexmarl.launch.monitoring.page.recorded_run import RecordedRun
from flexmarl.launch.run_folder.json_lines import event_to_json

from ...run_folder.records import record
from .folders import STARTED, folder_of, step_line


def run_of(folder: Path, metrics: Any, *events: Any) -> RecordedRun:
    run = RecordedRun(folder_of(folder, metrics, [STARTED, *map(event_to_json, events)]))
    run.refresh()
    return run


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.name)
def test_every_panel_has_a_module_and_shows_empty_runs_too(tmp_path: Path, panel: Any) -> None:
    assert (WEB / "panels" / f"{panel.name}.js").is_file()
    empty = RecordedRun(tmp_path / "missing")
    for run in (empty, run_of(tmp_path / "begun", []), run_of(tmp_path / "run", [record(1), record(2)])):
        try:
            json.dumps(plain(panel.view(run, {})), allow_nan=False)
        except (SamplesUnreadable, RunDirectoryError):
            assert panel.reads_samples  # the page shows the reason


def test_the_reasons_for_slow_steps_are_shown_now(tmp_path: Path) -> None:
    lines = [
        record(step, ["a"]) | {"step_s": 1.0, "rollout_s": 0.2, "backward_s/a": 0.7} for step in range(1, 9)
    ]
    (finding, *_) = now_panel.view(run_of(tmp_path, lines), {})["findings"]
    assert finding["cause"] == "late training" and finding["key"] == "mode"
    assert finding["seconds_per_step"] > 0.5


def test_every_module_of_a_panel_has_a_row() -> None:
    assert {path.stem for path in (WEB / "panels").iterdir()} == {panel.name for panel in PANELS}


def test_the_headline_prefers_a_success_to_rewards(tmp_path: Path) -> None:
    """In a zero-sum game the mean reward says nothing."""
    evaluations = [
        Evaluated(Step(step), 1.0, {"reward/a": 0.0, "exploitability": value})
        for step, value in ((0, 0.536), (2, 0.331))
    ]
    run = run_of(tmp_path / "game", [record(1), record(2)], *evaluations)
    assert headline(run) == "Exploitability fell from 0.536 to 0.331 in 2 steps"
    assert headline(run_of(tmp_path / "none", [])) == "No training step has finished"
    rewards = run_of(tmp_path / "rewards", [record(1), record(2)])
    assert headline(rewards).startswith("Mean reward rose from 0.508 to 0.516")
    failed = run_of(tmp_path / "failed", [record(1)], RunEnded(False, error="boom"))
    assert headline(failed) == "Failed after 1 step"


def test_now_shows_the_failure_with_the_next_step(tmp_path: Path) -> None:
    ended = RunEnded(False, error="ValueError: boom", traceback="File x")
    failure = now_panel.view(run_of(tmp_path / "a", [record(1)], ended), {})["failure"]
    assert failure["error"] == "ValueError: boom" and "flexmarl logs" in failure["next"]
    saved = run_of(tmp_path / "b", [record(1)], CheckpointSaved(Step(1), "there"), ended)
    assert f"flexmarl train --resume {tmp_path / 'b'}" == now_panel.view(saved, {})["failure"]["next"]
    stopped = run_of(tmp_path / "c", [record(1)], RunEnded(True, Step(1), error="stopped by SIGTERM"))
    assert now_panel.view(stopped, {})["failure"] is None


def test_now_shows_a_standstill_until_something_ends(tmp_path: Path) -> None:
    stalled = RunStalled(Step(1), 60.0, ("the store waits for rows",))
    shown = now_panel.view(run_of(tmp_path / "a", [record(1)], stalled), {})["standstill"]
    assert shown["causes"] == ["the store waits for rows"]
    continued = run_of(tmp_path / "b", [record(1)], stalled, RunContinued(Step(1), 61.0))
    assert now_panel.view(continued, {})["standstill"] is None


def test_news_are_the_newest_first_with_lost_nodes_and_failed_trajectories(tmp_path: Path) -> None:
    events = [NodeLost("n2", "node n2 is lost: gone"), TrajectoryFailed(Step(1), "t1", "boom", "")]
    news = now_panel.view(run_of(tmp_path, [record(1)], *events), {})["news"]
    assert [line["text"] for line in news] == ["trajectory t1 was dropped: boom", "node n2 is lost: gone"]
    assert all(line["warning"] for line in news)


def test_learning_shows_evaluations_first_and_the_charts_of_the_table_of_figures(tmp_path: Path) -> None:
    evaluation = {"eval/reward/sorter": 0.2, "eval/accuracy": 0.5}
    run = run_of(
        tmp_path, [step_line(1, evaluation), step_line(2, {"truncated_turns/sorter": 1, "turns/sorter": 4})]
    )
    charts = learning_panel.view(run, {})["charts"]
    assert [chart["title"] for chart in charts[:3]] == [
        "Accuracy",
        "Reward in evaluations",
        "Reward in training",
    ]
    by_title = {chart["title"]: chart for chart in charts}
    assert by_title["Truncated turns"]["series"] == [
        {"label": "sorter", "key": "truncated_turns/sorter", "over": "turns/sorter"}
    ]
    assert by_title["Zero advantage"]["complement"]
    assert [series["label"] for series in by_title["Loss"]["series"]] == ["sorter", "checker"]


def test_figures_are_all_of_the_run_with_units_and_meanings(tmp_path: Path) -> None:
    more = {"actor.rows_ready/store": 3, "workflow/tries": 2, "of_tomorrow/x": 1, "eval/accuracy": 0.5}
    run = run_of(tmp_path, [step_line(1, more)])
    charts = figures_panel.view(run, {})["charts"]
    keys = [series["key"] for chart in charts for series in chart["series"]]
    assert sorted(keys) == sorted(run.curves.all_keys())
    by_title = {chart["title"]: chart for chart in charts}
    assert by_title["step_s"]["unit"] == "s" and by_title["reward"]["subject"] == "agent"
    assert by_title["accuracy"]["subject"] == "evaluation" and by_title["tries"]["subject"] == "workflow"
    assert by_title["of_tomorrow"]["subject"] == "name"
    assert all(chart["meaning"] for chart in charts)


def test_the_stays_of_policies_on_slots_are_made_of_their_events(tmp_path: Path) -> None:
    a, b = PolicyName("a"), PolicyName("b")
    events: list[PolicySuspended | PolicyResumed] = [
        PolicySuspended(a, "slot-0, slot-1", "no work", 0, 0.1, "none"),
        PolicyResumed(b, "slot-0", "b has waited", 2**20, 0.2, "shm"),
        PolicySuspended(b, "slot-0", "a has waited", 2**20, 0.1, "shm"),
        PolicyResumed(a, "slot-0", "its turn", 2**20, 0.2, "shm"),
    ]
    lines = [STARTED, *(event_to_json(event, 1_000_010.0 + at) for at, event in enumerate(events))]
    run = RecordedRun(folder_of(tmp_path, [record(1, ("a", "b"))], lines))
    with run.reading():
        shown = policies_panel.view(run, {})
    stays = shown["stays"]
    lanes = [
        (stays["slots"][slot], stays["policies"][policy], *rest) for slot, policy, *rest in stays["stays"]
    ]
    assert lanes == [
        ("slot-0", "a", 1_000_000.0, 1_000_010.0, "Left: no work"),
        ("slot-1", "a", 1_000_000.0, 1_000_010.0, "Left: no work"),
        ("slot-0", "b", 1_000_011.0, 1_000_012.0, "b has waited. Left: a has waited"),
        ("slot-0", "a", 1_000_013.0, None, "its turn"),
    ]
    assert [row["kind"] for row in shown["reasons"]] == ["suspended", "resumed", "suspended", "resumed"]


def test_moves_of_instances_have_their_reasons(tmp_path: Path) -> None:
    events = [
        InstanceChanged("x-0", PolicyName("a"), "serving", "it has joined"),
        InstanceMoved("x-0", PolicyName("a"), PolicyName("b"), "b has a queue of 9"),
    ]
    shown = policies_panel.view(run_of(tmp_path, [record(1)], *events), {})
    assert [move["text"] for move in shown["moves"]] == [
        "x-0 moves from a to b: b has a queue of 9",
        "x-0 serves a: it has joined",
    ]
    [instance] = shown["instances"]
    assert (instance["name"], instance["policy"], instance["state"]) == ("x-0", "b", "moving")


def test_settings_are_texts_by_key(tmp_path: Path) -> None:
    config = "recipe: r\nmode: null\ntraining: {steps: 9, flags: [1, 2]}\n"
    run = RecordedRun(folder_of(tmp_path, [], config=config))
    run.refresh()
    shown = settings_panel.view(run, {})["config"]
    assert shown["mode"] == "null" and shown["training.steps"] == "9" and shown["training.flags"] == "[1, 2]"


def test_meanings_have_no_markup() -> None:
    meanings = [without_markup(row.meaning) for rows in FIGURES.values() for row in rows.values()]
    assert not [meaning for meaning in meanings for mark in ("](", "<", "&", "`") if mark in meaning]


def test_texts_are_made_harmless() -> None:
    hostile = {"\x1b[2J": ["\u202egnp.exe", float("inf"), b"x", {"n": 1}]}
    assert plain(hostile) == {"\\x1b[2J": ["\\u202egnp.exe", None, "b'x'", {"n": 1}]}


def test_a_timeline_without_spans_and_windows_that_are_invalid_are_no_error(tmp_path: Path) -> None:
    run = run_of(tmp_path, [record(1)])
    for query in (
        {},
        {"begin": "x"},
        {"begin": "5", "end": "1"},
        {"width": "0"},
        {"width": "-"},
        {"begin": "nan"},
    ):
        assert timeline_panel.view(run, query)["spans"] == []
    assert "no span 7" in timeline_panel.view(run, {"span": "7"})["error"]
    assert "no span x" in timeline_panel.view(run, {"span": "x"})["error"]
