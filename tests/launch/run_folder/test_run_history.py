"""A run's files, read back for its report."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.names import Step
from flexmarl.actors.run_events import Evaluated
from flexmarl.launch.run_folder.json_lines import event_to_json
from flexmarl.launch.run_folder.run_history import (
    History,
    first_and_last,
    load_history,
)

from .records import record


def load(folder: Path, records: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]] = ()) -> History:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    return load_history(folder)


def test_steps_lost_before_a_resume_are_replaced(tmp_path: Path) -> None:
    lost = [record(step, tokens=1) for step in range(1, 13)]
    again = [record(step, tokens=2, time_s=0.07 * (step - 9)) for step in range(10, 12)]
    history = load(tmp_path, [*lost, *again])
    assert [step.step for step in history.steps] == list(range(1, 12))
    assert history.total("tokens") == 9 * 1 + 2 * 2
    assert history.resumes == [10]
    assert history.wall_s == pytest.approx(0.07 * (12 + 2))


def test_a_clock_that_goes_on_after_a_resume_counts_once(tmp_path: Path) -> None:
    first = [record(step) for step in range(1, 11)]
    again = [record(step, time_s=0.07 * step) for step in range(6, 21)]
    assert load(tmp_path, [*first, *again]).wall_s == pytest.approx(0.07 * (10 + 15))


def test_a_clock_that_starts_again_is_a_resume_too(tmp_path: Path) -> None:
    """The lost steps may have been removed from the file before the run resumed."""
    again = [record(step, time_s=0.07 * (step - 10)) for step in range(11, 21)]
    history = load(tmp_path, [*(record(step) for step in range(1, 11)), *again])
    assert history.resumes == [11] and len(history.steps) == 20
    assert history.wall_s == pytest.approx(0.07 * 20)


def test_an_evaluation_written_apart_joins_its_step(tmp_path: Path) -> None:
    evaluated = event_to_json(Evaluated(Step(2), 1.0, {"accuracy": 0.5}))
    history = load(tmp_path, [record(1), record(2)], [evaluated])
    assert history.evaluated("accuracy") == [(2, 0.5)]
    assert len(history.steps) == 2 and not history.resumes
    assert history.of_step("tokens") == [(1, 1024), (2, 1024)]


def test_first_and_last() -> None:
    points = [(float(step), float(step)) for step in range(1, 41)]
    assert first_and_last(points) == (1.5, 39.5)
    assert first_and_last(points[:1]) == (1.0, 1.0)
    assert first_and_last([]) is None
