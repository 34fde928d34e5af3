"""The parts of a step's time."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.launch.monitoring.slowness.step_parts import PARTS, split_step
from flexmarl.launch.run_folder.json_lines import metrics_from_json

from ...run_folder.records import record

SECONDS = st.floats(-1e3, 1e6)


def step_of(line: dict[str, Any]) -> StepMetrics:
    step = metrics_from_json(line)
    assert step is not None
    return step


def test_a_step_where_agents_train_one_after_the_other() -> None:
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


@given(st.lists(SECONDS, min_size=9, max_size=9))
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
