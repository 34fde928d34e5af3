"""Whole runs that record their trajectories, and continue after a stop."""

import json
from pathlib import Path

import pytest

import flexmarl
from flexmarl.launch.cli.main import main

from ...conftest import SIMULATED_POLICIES
from ...in_process import RunsHere

SETTINGS = (*SIMULATED_POLICIES, "evaluation.every=2", "checkpoint.every=2")

Key = tuple[int, bool, str, int, int]


def recorded(run: Path) -> list[Key]:
    with flexmarl.Samples(run) as samples:
        return [row[:5] for row in samples.rows()]


def test_a_run_is_recorded_and_a_resumed_one_continues_without_doubles(
    runs_here: RunsHere, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs_here.train("recorded", *SETTINGS, "training.steps=4", "rollout.workers=2")
    assert run.status == 0, run.text
    first = recorded(run.directory)
    assert len(first) == len(set(first))
    trained = [line["turns/solver"] + line["turns/checker"] for line in run.metrics]
    assert [sum(row[0] == step and not row[1] for row in first) for step in (1, 2, 3, 4)] == trained
    assert [sum(row[0] == step and row[1] for row in first) for step in (0, 2, 4)] == [8, 8, 8]
    with flexmarl.Samples(run.directory) as samples:
        for line in run.metrics:
            ended = samples.trajectories(step=line["step"], evaluation=False)
            mean = sum(one.rewards["solver"] for one in ended) / len(ended)
            assert mean == pytest.approx(line["reward/solver"])
        assert samples.recorded().dropped == 0
    assert not [*run.directory.glob("samples.sqlite-*")], "closed, with all that was written"

    second = runs_here.resume("recorded", "training.steps=6")
    assert second.status == 0, second.text
    both = recorded(run.directory)
    assert len(both) == len(set(both)) and set(first) <= set(both)
    assert {row[0] for row in both if not row[1]} == {1, 2, 3, 4, 5, 6}
    assert {row[0] for row in both if row[1]} == {0, 2, 4, 6}

    assert main(["samples", str(run.directory), "--best", "1", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)
    assert {turn["agent"] for turn in best["turns"]} == {"solver", "checker"}
    assert main(["samples", str(run.directory), "--evaluation", "--limit", "1", "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["query"] in (run.directory / "report.html").read_text()


def test_zero_steps_record_nothing(runs_here: RunsHere) -> None:
    run = runs_here.train("unrecorded", *SETTINGS, "training.steps=2", "samples.steps=0")
    assert run.status == 0, run.text
    assert not (run.directory / "samples.sqlite").exists()
    assert not any("dropped_records" in key for line in run.metrics for key in line)
