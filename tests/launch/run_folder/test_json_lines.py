"""``metrics.jsonl`` and ``events.jsonl``: written from classes and read back as the same."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.figures import FIGURES
from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.run_events import Evaluated, RunEvent
from flexmarl.actors.step_metrics import SUBJECT_OF, StepMetrics
from flexmarl.launch.run_folder.json_lines import (
    KeptLines,
    event_from_json,
    event_to_json,
    keep_lines,
    metrics_from_json,
    metrics_to_json,
    object_of,
    read_lines,
)
from flexmarl.launch.run_folder.line_writer import LineWriter

from ...actors.test_run_events import EVENTS

SOLVER, JUDGE, SHARED = AgentName("solver"), AgentName("judge"), PolicyName("shared")
METRICS = StepMetrics(
    Step(3),
    time_s=9.0,
    step_s=3.0,
    rollout_s=2.0,
    tokens=100,
    tokens_per_s=33.25,
    overlap_s=0.5,
    figures={"failed_trajectories": 1},
    eval_s=0.25,
    evaluation={"accuracy": 0.5, "reward/solver": 0.75},
    versions={SHARED: Version(3)},
    generated_by={SHARED: Version(2)},
    source={"difficulty": 0.5},
    filters={"overlong": 3},
    by_agent={
        SOLVER: {"reward": 0.5, "turns": 8, "tokens": 40, "truncated_turns": 1},
        JUDGE: {"reward": 0.25, "filtered_samples": 2},
    },
    by_policy={SHARED: {"samples": 8, "loss": 0.125, "grad_norm": 1.5, "lr": 1e-3}},
    by_process={"store": {"loop_lag_ms": 0.5, "rss_mib": 100.0, "mailbox_served": 7, "credit_waits": 2}},
    by_device={"GPU-1": {"device_busy_percent": 93.5, "device_used_mib": 70000.0}},
    by_actor={"store": {"rows_ready": 5, "puts": 0}, "solver-0": {"engine_batch_occupancy": 0.75}},
)


def through_a_file(line: dict[str, Any], folder: Path) -> dict[str, Any]:
    lines = LineWriter(folder / "lines.jsonl", pytest.fail)
    lines.write(line)
    lines.close()
    (read,), bad = read_lines(folder / "lines.jsonl")
    assert not bad
    return read


def test_what_json_does_not_know_is_null(tmp_path: Path) -> None:
    line = {"step": 1, "loss": math.nan, "reward": -math.inf, "versions": {"a": 1}}
    read = through_a_file(line, tmp_path)
    assert read == {"step": 1, "loss": None, "reward": None, "versions": {"a": 1}}


def test_metrics_have_flat_keys_by_agent_policy_and_process() -> None:
    line = metrics_to_json(METRICS)
    assert line["step"] == 3 and line["overlap_s"] == 0.5 and line["failed_trajectories"] == 1
    assert line["reward/solver"] == 0.5 and line["reward/judge"] == 0.25
    assert line["filtered_samples/judge"] == 2
    assert (line["turns/solver"], line["tokens/solver"], line["truncated_turns/solver"]) == (8, 40, 1)
    assert line["loss/shared"] == 0.125 and line["samples/shared"] == 8
    assert line["versions"] == {"shared": 3} and line["generated_by"] == {"shared": 2}
    assert line["eval/accuracy"] == 0.5 and line["eval/reward/solver"] == 0.75 and line["eval_s"] == 0.25
    assert line["rss_mib/store"] == 100.0 and line["device_used_mib/GPU-1"] == 70000.0
    assert line["mailbox_served/store"] == 7 and line["credit_waits/store"] == 2
    assert line["source/difficulty"] == 0.5
    assert line["actor.rows_ready/store"] == 5 and line["actor.puts/store"] == 0
    assert line["actor.engine_batch_occupancy/solver-0"] == 0.75
    assert "value_loss/shared" not in line and "loss/solver" not in line and "reward/shared" not in line


def test_no_key_belongs_to_two_parts() -> None:
    """An agent and its policy may have the same name."""
    names = [name for subject in SUBJECT_OF.values() for name in FIGURES[subject]]
    assert len(names) == len(set(names)) and not {"eval", "workflow", "source", "versions"} & set(names)


def test_metrics_are_read_back_as_they_were(tmp_path: Path) -> None:
    assert metrics_from_json(through_a_file(metrics_to_json(METRICS), tmp_path)) == METRICS


def test_a_figure_that_is_not_finite_is_read_as_not_measured(tmp_path: Path) -> None:
    policy = METRICS.by_policy[SHARED] | {"loss": math.nan}
    read = metrics_from_json(
        through_a_file(metrics_to_json(replace(METRICS, by_policy={SHARED: policy})), tmp_path)
    )
    del policy["loss"]
    assert read is not None and read.by_policy[SHARED] == policy


@pytest.mark.parametrize("missing", ["step", "time_s", "step_s", "rollout_s", "tokens", "tokens_per_s"])
def test_a_line_without_a_required_figure_is_no_step(missing: str) -> None:
    line = metrics_to_json(METRICS)
    assert metrics_from_json({**line, missing: None}) is None
    del line[missing]
    assert metrics_from_json(line) is None


@given(
    st.dictionaries(
        st.sampled_from([*metrics_to_json(METRICS), "no/such", "nor this"]),
        st.one_of(st.floats(), st.integers(), st.none(), st.text(max_size=3), st.lists(st.none())),
    )
)
def test_any_line_is_a_step_or_none(damage: dict[str, Any]) -> None:
    step = metrics_from_json({**metrics_to_json(METRICS), **damage})
    assert step is None or json.dumps(metrics_to_json(step), allow_nan=False)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.event)
def test_events_are_read_back_as_they_were(tmp_path: Path, event: RunEvent) -> None:
    line = through_a_file(event_to_json(event), tmp_path)
    assert line["event"] == event.event and line["time"] > 1e9 and None not in line.values()
    assert event_from_json(line) == event


def test_a_metric_never_hides_a_field_of_its_event() -> None:
    line = event_to_json(Evaluated(Step(4), 1.0, {"step": 0.5, "event": 2.0, "accuracy": 0.25}))
    assert (line["step"], line["event"], line["accuracy"]) == (4, "evaluated", 0.25)


@pytest.mark.parametrize(
    "line", [{}, {"event": "tea_time"}, {"event": []}, {"event": "checkpoint_saved", "step": 3}]
)
def test_an_unknown_event_or_one_without_its_fields_is_none(line: dict[str, Any]) -> None:
    assert event_from_json(line) is None


def test_lines_that_hold_no_object_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert read_lines(path) == ([], 0)
    path.write_text('{"a": 1}\n\n[1]\n{"b": \n' + "[" * 100_000)
    assert read_lines(path) == ([{"a": 1}], 3)


def test_damaged_lines_and_one_that_a_crash_cut_off_are_removed_and_named(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    long = "x" * 500
    path.write_bytes(
        f'{{"step": 1}}\n{{"step": 2\n\n{{"stop": 3}}\n\xff{long}\n{{"step": 4}}\n{{"ste'.encode("latin1")
    )
    kept = keep_lines(path, lambda record: "step" in record, lambda record: True)
    assert path.read_text() == '{"step": 1}\n{"step": 4}\n'
    assert kept.objects == [{"step": 1}, {"step": 4}] and kept.torn == '{"ste'
    assert [(number, text[:10]) for number, text in kept.damaged] == [
        (2, '{"step": 2'), (4, '{"stop": 3'), (5, "\ufffd" + "x" * 9),
    ]  # fmt: skip
    assert len(kept.damaged[2][1]) < 100
    assert keep_lines(tmp_path / "nothing", lambda record: True, lambda record: True) == KeptLines([], [])


def test_a_line_with_half_a_pair_of_surrogates_is_read() -> None:
    """Texts of models may be cut there, and ``json.dumps`` writes them."""
    assert object_of(json.dumps({"text": "\ud83d"})) == {"text": "\ud83d"}
    assert object_of(b'{"text": "\xff"}') is None
