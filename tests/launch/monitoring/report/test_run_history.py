"""A run's files, read back for its report."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.names import Step
from flexmarl.actors.run_events import Evaluated
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.launch.monitoring.report.run_history import (
    PARTS,
    History,
    first_and_last,
    load_history,
    split_step,
)
from flexmarl.launch.run_folder.json_lines import event_to_json, metrics_from_json

from .records import FINITE, record


def step_of(line: dict[str, Any]) -> StepMetrics:
    step = metrics_from_json(line)
    assert step is not None
    return step


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


def test_split_of_a_step_where_agents_train_one_after_the_other() -> None:
    split = dict(zip(PARTS, split_step(step_of(record(1, ["a", "b"]))), strict=True))
    assert split == pytest.approx(
        {
            "rollout only": 0.038,
            "rollout and training": 0.012,
            "training only": 0.014,
            "optimizer": 0.002,
            "publishing weights": 0.004,
            "other": 0.0,
        }
    )


@given(st.lists(FINITE, min_size=9, max_size=9))
def test_the_parts_of_a_step_add_up_and_are_never_negative(values: list[float]) -> None:
    keys = [
        "rollout_s",
        "overlap_s",
        *(f"{key}_s/{agent}" for key in ("backward", "optimizer", "publish") for agent in "ab"),
    ]
    step_s = abs(values[-1])
    line = record(1, ["a", "b"]) | dict(zip(keys, values, strict=False)) | {"step_s": step_s}
    parts = split_step(step_of(line))
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(step_s, rel=1e-6, abs=1e-6)


def test_nothing_is_left_of_a_step_whose_policies_worked_in_parallel() -> None:
    """No rounding error is shown as other time."""
    line = record(1, ["a"]) | {"step_s": 0.08, "rollout_s": 0.0, "overlap_s": 0.0}
    parts = split_step(step_of(line | {"backward_s/a": 0.29, "optimizer_s/a": 0.28, "publish_s/a": 0.06}))
    assert dict(zip(PARTS, parts, strict=True))["other"] == 0.0


def test_first_and_last() -> None:
    points = [(float(step), float(step)) for step in range(1, 41)]
    assert first_and_last(points) == (1.5, 39.5)
    assert first_and_last(points[:1]) == (1.0, 1.0)
    assert first_and_last([]) is None
