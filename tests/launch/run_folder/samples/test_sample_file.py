"""The file of recorded trajectories: bounded, whole after kill -9, without doubles after a resume."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from flexmarl.launch.run_folder.samples.reader import Samples
from flexmarl.launch.run_folder.samples.sample_file import SampleFile

from .files import NO_LIMIT, compared, record, recorded_run, trajectory


def steps_in(run: Path, *, evaluation: bool) -> list[int]:
    with Samples(run) as samples:
        return sorted({one.step for one in samples.rows(evaluation=evaluation)})


def test_the_last_steps_and_all_evaluations_stay(tmp_path: Path) -> None:
    records = [record(trajectory(0, 9, 0, evaluation=True))]
    records += [record(*(trajectory(step, query, 0) for query in (1,))) for step in range(1, 8)]
    run = recorded_run(tmp_path / "run", records, steps=3)
    assert steps_in(run.path, evaluation=False) == [5, 6, 7]
    assert steps_in(run.path, evaluation=True) == [0]


def test_pages_of_removed_steps_are_used_again(tmp_path: Path) -> None:
    directory = recorded_run(tmp_path / "run")
    file = SampleFile(directory.samples, 4, NO_LIMIT)
    sizes = []
    for step in range(1, 40):
        text = os.urandom(20_000).hex()
        file.add([record(trajectory(step, 1, 0, text=text))])
        sizes.append(file._used_bytes())
    file.close()
    assert max(sizes[10:]) < 8 * 40_000 and directory.samples.stat().st_size < 8 * 40_000


def test_a_group_that_begins_again_replaces_its_record(tmp_path: Path) -> None:
    first = record(trajectory(3, 1, 0), trajectory(3, 1, 5, failure="lost"))
    again = record(trajectory(3, 1, 0, 0.75))
    run = recorded_run(tmp_path / "run", [first, record(trajectory(3, 2, 0)), again])
    with Samples(run.path) as samples:
        found = [(one.query.id, one.number, one.rewards["solver"]) for one in samples.trajectories()]
    assert found == [("q1", 0, 0.75), ("q2", 0, 0.5)]


def test_trajectories_of_an_evaluation_come_one_by_one(tmp_path: Path) -> None:
    parts = [record(trajectory(3, 1, number, evaluation=True)) for number in (0, 1, 0)]
    run = recorded_run(tmp_path / "run", [*parts, record(trajectory(3, 1, 0))])
    with Samples(run.path) as samples:
        assert [one.number for one in samples.trajectories(evaluation=True)] == [0, 1]
        assert samples.count() == 3


def test_a_resumed_run_repeats_the_later_steps(tmp_path: Path) -> None:
    records = [record(trajectory(step, 1, 0)) for step in range(1, 6)]
    records += [record(trajectory(step, 9, 0, evaluation=True)) for step in (0, 2, 4)]
    run = recorded_run(tmp_path / "run", records)
    file = SampleFile(run.samples, 50, NO_LIMIT)
    file.forget_after(3)
    file.close()
    assert steps_in(run.path, evaluation=False) == [1, 2, 3]
    assert steps_in(run.path, evaluation=True) == [0, 2]


def test_at_its_limit_the_oldest_steps_go_and_then_nothing_is_taken(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run")
    file = SampleFile(run.samples, 50, 400_000)
    refused = 0
    for step in range(1, 10):
        refused += file.add([record(trajectory(step, 1, 0, text=os.urandom(25_000).hex()))])
    assert not refused and file._used_bytes() <= 400_000 + 100_000
    big = [
        record(trajectory(0, query, 0, evaluation=True, text=os.urandom(50_000).hex())) for query in range(8)
    ]
    refused = file.add(big, dropped=2)
    file.close()
    assert 0 < refused < 8
    with Samples(run.path) as samples:
        assert samples.recorded().dropped == refused + 2
        assert steps_in(run.path, evaluation=False) == [9]


def test_a_file_at_its_limit_takes_the_steps_of_a_resumed_run(tmp_path: Path) -> None:
    """Also if one step alone fills it."""
    run = recorded_run(tmp_path / "run")
    for life in range(3):
        file = SampleFile(run.samples, 50, 400_000)
        file.forget_after(2 * life)
        for step in (2 * life + 1, 2 * life + 2):
            groups = [record(trajectory(step, query, 0, text=os.urandom(50_000).hex())) for query in range(6)]
            assert file.add(groups) < len(groups)
        file.close()
        assert 2 * life + 2 in steps_in(run.path, evaluation=False)


def test_a_locked_file_is_not_taken_for_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded_run(tmp_path / "run", [record(trajectory(1, 1, 0))])
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda path, **options: connect(path, **options | {"timeout": 0.0})
    )
    other = sqlite3.connect(run.samples)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        SampleFile(run.samples, 50, NO_LIMIT)
    other.close()
    assert steps_in(run.path, evaluation=False) == [1]


def test_a_killed_writer_leaves_all_that_was_answered(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run")
    program = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[4])!r})
from flexmarl.launch.run_folder.samples.sample_file import SampleFile
file = SampleFile(Path({str(run.samples)!r}), 50, 1 << 40)
file.add([sys.stdin.buffer.read()])
file._database.execute("BEGIN")
file._database.execute("DELETE FROM records")
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run(
        [sys.executable, "-P", "-c", program], input=record(trajectory(1, 1, 0)), timeout=60, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert steps_in(run.path, evaluation=False) == [1]
    file = SampleFile(run.samples, 50, NO_LIMIT)
    file.add([record(trajectory(2, 1, 0))])
    file.close()
    assert steps_in(run.path, evaluation=False) == [1, 2]


def test_a_file_that_can_not_be_read_is_kept_beside_a_new_one(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run")
    run.samples.write_bytes(b"not a database" * 1000)
    file = SampleFile(run.samples, 50, NO_LIMIT)
    file.add([record(trajectory(1, 1, 0))])
    file.close()
    assert file.replaced == run.path / "samples.sqlite.damaged" and file.replaced.exists()
    run.samples.write_bytes(b"not a database" * 1000)
    file = SampleFile(run.samples, 50, NO_LIMIT)
    file.add([record(trajectory(1, 1, 0))])
    file.close()
    assert file.replaced == run.path / "samples.sqlite.damaged-2" and file.replaced.exists()
    assert steps_in(run.path, evaluation=False) == [1]


def test_one_invalid_record_changes_nothing(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run")
    file = SampleFile(run.samples, 50, NO_LIMIT)
    with pytest.raises(ValueError, match="not a record"):
        file.add([record(trajectory(1, 1, 0)), b"x"])
    file._database.execute(
        "CREATE TRIGGER full BEFORE INSERT ON records BEGIN SELECT RAISE(ABORT, 'full'); END"
    )
    with pytest.raises(sqlite3.Error, match="full"):
        file.add([record(trajectory(1, 1, 0))])
    file.close()
    with Samples(run.path) as samples:
        assert samples.count() == 0


# --------------------------------------------------------------------------- the trainer's log-probabilities


def gaps(run: Path) -> dict[tuple[int, int, int], tuple[float, ...]]:
    """Trainer minus engine, by step, trajectory and turn."""
    with Samples(run) as samples:
        return {
            (one.step, one.number, turn.number): tuple(
                trainer - engine for trainer, engine in zip(turn.trainer_logprobs, turn.logprobs, strict=True)
            )
            for one in samples.trajectories(evaluation=False)
            for turn in one.turns
            if turn.trainer_logprobs
        }


def test_log_probabilities_of_the_trainer_join_their_turns_in_any_order(tmp_path: Path) -> None:
    first, second = trajectory(1, 1, 0), trajectory(1, 1, 1)
    run = recorded_run(tmp_path / "run")
    file = SampleFile(run.samples, 50, NO_LIMIT)
    assert file.add_compared([compared(first)]) == 0, "before its group has closed"
    file.add(
        [record(first, second), record(trajectory(1, 2, 0)), record(trajectory(1, 1, 0, evaluation=True))]
    )
    assert gaps(run.path) == {(1, 0, 0): (0.25, 0.25), (1, 0, 1): (0.25,)}
    file.add_compared([compared(second, by=-0.5, version=3)])
    file.close()
    assert gaps(run.path)[1, 1, 0] == (-0.5, -0.5)
    with Samples(run.path) as samples:
        (late,) = (one for one in samples.trajectories(query="q1", evaluation=False) if one.number == 1)
        assert [turn.trainer_version for turn in late.turns] == [3, 3]
        (evaluated,) = samples.trajectories(evaluation=True)
        assert evaluated.turns[0].trainer_logprobs == () and evaluated.turns[0].trainer_version is None


def test_of_a_computation_that_was_repeated_the_last_one_counts(tmp_path: Path) -> None:
    one = trajectory(1, 1, 0)
    run = recorded_run(tmp_path / "run", [record(one)])
    file = SampleFile(run.samples, 50, NO_LIMIT)
    file.add_compared([compared(one), compared(one, by=0.5)])
    file.close()
    assert gaps(run.path)[1, 0, 0] == (0.5, 0.5)


def test_log_probabilities_go_with_their_steps(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run")
    file = SampleFile(run.samples, 2, NO_LIMIT)
    for step in range(1, 6):
        file.add([record(trajectory(step, 1, 0))])
        file.add_compared([compared(trajectory(step, 1, 0))])
    file.add_compared([compared(trajectory(2, 1, 0))])  # too late
    steps = "SELECT DISTINCT step FROM compared ORDER BY step"
    assert file._database.execute(steps).fetchall() == [(4,), (5,)]
    file.forget_after(4)
    assert file._database.execute(steps).fetchall() == [(4,)]
    file.close()
    assert {step for step, *_ in gaps(run.path)} == {4}


def test_log_probabilities_without_room_are_refused_and_counted(tmp_path: Path) -> None:
    one = trajectory(1, 1, 0, text="x" * 5000)._replace(query=trajectory(1, 1, 0).query)
    long = one._replace(turns=(one.turns[0]._replace(tokens=(1,) * 200_000),))
    run = recorded_run(tmp_path / "run", [record(one)])
    file = SampleFile(run.samples, 50, 300_000)
    assert file.add_compared([compared(long)], dropped=2) == 1
    assert file._database.execute("SELECT * FROM counts").fetchall() == [("dropped_compared", 3)]
    file.close()
    assert gaps(run.path) == {}
