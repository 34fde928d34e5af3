"""``flexmarl.Samples``: filters, order, and files that can't be read."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import flexmarl
from flexmarl.launch.errors import InvalidCondition, RunDirectoryError, SamplesUnreadable
from flexmarl.launch.run_folder.run_directory import RunDirectory
from flexmarl.launch.run_folder.samples.conditions import Condition
from flexmarl.launch.run_folder.samples.reader import Samples
from flexmarl.launch.run_folder.samples.sample_file import SampleFile

from .files import NO_LIMIT, record, recorded_run, trajectory

RECORDS = [
    record(trajectory(1, 1, 0, 0.1), trajectory(1, 1, 1, 0.9), trajectory(1, 1, 2, failure="ValueError: x")),
    record(trajectory(2, 2, 0, 0.4)),
    record(trajectory(2, 3, 0, 0.6, evaluation=True)),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_run(tmp_path_factory.mktemp("runs") / "run", RECORDS).path


Key = tuple[int, str, int]


def keys(run: Path, **filters: Any) -> list[Key]:
    with flexmarl.Samples(run) as samples:
        found = samples.trajectories(**filters)
        filters.pop("order", None), filters.pop("limit", None)
        assert samples.count(**filters) >= len(found)
        return [(one.step, one.query.id, one.number) for one in found]


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ({}, [(1, "q1", 0), (1, "q1", 1), (1, "q1", 2), (2, "q2", 0), (2, "q3", 0)]),
        ({"step": 1}, [(1, "q1", 0), (1, "q1", 1), (1, "q1", 2)]),
        ({"step": ">1", "evaluation": False}, [(2, "q2", 0)]),
        ({"evaluation": True}, [(2, "q3", 0)]),
        ({"failed": True}, [(1, "q1", 2)]),
        ({"failed": False, "step": "1-1"}, [(1, "q1", 0), (1, "q1", 1)]),
        ({"reward": "<0.2"}, [(1, "q1", 0), (1, "q1", 1)]),
        ({"reward": "<0.2", "agent": "solver"}, [(1, "q1", 0)]),
        ({"agent": "judge", "step": 1}, [(1, "q1", 0), (1, "q1", 1)]),
        ({"query": "q2"}, [(2, "q2", 0)]),
        ({"query": "3+2"}, [(2, "q3", 0)]),
        ({"query": "%"}, []),
        ({"answer": "no"}, [(1, "q1", 0), (1, "q1", 1), (2, "q2", 0), (2, "q3", 0)]),
        ({"answer": "no", "agent": "solver"}, []),
        ({"answer": "4", "failed": True}, [(1, "q1", 2)]),
        ({"answer": "n", "step": 2, "order": "newest", "limit": 1}, [(2, "q3", 0)]),
        ({"answer": "%"}, []),
        ({"order": "best", "agent": "solver", "limit": 2}, [(1, "q1", 1), (2, "q3", 0)]),
        ({"order": "worst", "agent": "solver", "limit": 1}, [(1, "q1", 0)]),
        ({"order": "newest", "limit": 2}, [(2, "q3", 0), (2, "q2", 0)]),
    ],
)
def test_filters(run: Path, filters: dict[str, Any], found: list[Key]) -> None:
    assert keys(run, **filters) == found


def test_a_trajectory_is_what_was_recorded(run: Path) -> None:
    with Samples(run) as samples:
        (found,) = samples.trajectories(step=2, evaluation=False)
    recorded = trajectory(2, 2, 0, 0.4)
    assert found._replace(turns=()) == recorded._replace(turns=())
    assert [turn._replace(logprobs=()) for turn in found.turns] == [
        turn._replace(logprobs=()) for turn in recorded.turns
    ]
    assert found.turns[0].logprobs == pytest.approx((-0.5, -0.01))


def test_turns_are_listed_without_texts(run: Path) -> None:
    with Samples(run) as samples:
        rows = samples.rows(agent="judge", reward=">0.5")
        assert [(row.step, row.query, row.trajectory, row.agent, row.reward) for row in rows] == [
            (1, "q1", 0, "judge", 0.9),
            (2, "q2", 0, "judge", 0.6),
        ]
        assert len(samples.rows()) == 9 and samples.rows(limit=4) == samples.rows()[-4:]
        recorded = samples.recorded()
    assert (recorded.trajectories, recorded.samples, recorded.dropped) == (5, 9, 0)
    assert (recorded.first_step, recorded.last_step, recorded.evaluations) == (1, 2, (2,))


def test_a_run_is_read_while_it_writes(tmp_path: Path) -> None:
    directory = recorded_run(tmp_path / "run", RECORDS)
    writer = SampleFile(directory.samples, 50, NO_LIMIT)
    with Samples(directory.path) as samples:
        before = samples.count()
        writer.add([record(trajectory(3, 1, 0))])
        assert samples.count() == before + 1
        writer._database.execute("BEGIN IMMEDIATE")  # a transaction under way delays no reader
        assert samples.count() == before + 1
        writer._database.execute("ROLLBACK")
    writer.close()


def test_records_that_are_replaced_or_removed_while_it_is_open_are_gone(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", [record(trajectory(1, 1, 0, 0.1), trajectory(1, 1, 1, 0.2))])
    with Samples(run.path) as samples:
        assert samples.recorded().samples == 4
        file = SampleFile(run.samples, 2, NO_LIMIT)
        file.add([record(trajectory(1, 1, 0, 0.7))])
        assert [one.rewards["solver"] for one in samples.trajectories()] == [0.7]
        assert (samples.recorded().trajectories, samples.recorded().samples) == (1, 2)
        file.add([record(trajectory(3, 2, 0))])
        assert [one.step for one in samples.rows(agent="solver")] == [3] and samples.count() == 1
        file.close()


def test_a_run_of_another_user_is_read_without_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = recorded_run(tmp_path / "run", RECORDS)
    real: Callable[..., sqlite3.Connection] = sqlite3.connect

    def connect(name: str, **options: Any) -> sqlite3.Connection:
        if "mode=ro" in name:
            refusal = sqlite3.OperationalError("unable to open database file")
            refusal.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
            raise refusal
        return real(name, **options)

    monkeypatch.setattr(sqlite3, "connect", connect)
    with Samples(directory.path) as samples:
        assert samples.count() == 5


def test_a_locked_file_is_not_read_without_locks(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, connect = [], sqlite3.connect

    def locked(name: str, **options: Any) -> Any:
        opened.append(name)
        return connect(name, **options | {"timeout": 0.0})

    file = RunDirectory(run).samples
    with closing(connect(file, isolation_level=None)) as holder:
        holder.execute("PRAGMA locking_mode = EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr(sqlite3, "connect", locked)
        with pytest.raises(SamplesUnreadable, match="locked"):
            Samples(run)
    assert len(opened) == 1 and "mode=ro" in opened[0]


def test_a_run_whose_checkpoints_were_deleted_is_read(tmp_path: Path) -> None:
    directory = recorded_run(tmp_path / "run", RECORDS)
    directory.checkpoints.rmdir()
    with Samples(directory.path) as samples:
        assert samples.count() == 5


def test_a_missing_file_has_a_reason(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "off", "samples: {steps: 0}")
    RunDirectory.create(tmp_path / "new", "{}")
    with pytest.raises(SamplesUnreadable, match=r"samples\.steps=0 in its config"):
        Samples(tmp_path / "off")
    with pytest.raises(SamplesUnreadable, match="no trajectory is recorded yet"):
        Samples(tmp_path / "new")
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        Samples(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    directory = recorded_run(tmp_path / "run", RECORDS)
    directory.samples.write_bytes(b"x" * 5000)
    with pytest.raises(SamplesUnreadable, match=r"samples\.sqlite: can't be read: file is not a database"):
        Samples(directory.path)
    cut = recorded_run(tmp_path / "cut", RECORDS)
    content = cut.samples.read_bytes()
    cut.samples.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with (
        pytest.raises(SamplesUnreadable, match=r"cut.samples\.sqlite: can't be read"),
        Samples(cut.path) as samples,
    ):
        samples.trajectories()


def test_rows_that_are_damaged_are_named_too(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", RECORDS)
    with closing(sqlite3.connect(run.samples)) as database, database:
        database.execute("UPDATE records SET rows = x'00'")
    with Samples(run.path) as samples:
        for _ in range(2):
            with pytest.raises(SamplesUnreadable, match="rows are damaged"):
                samples.count()


def test_content_that_is_damaged_is_named_too(tmp_path: Path) -> None:
    directory = recorded_run(tmp_path / "run", RECORDS)
    with sqlite3.connect(directory.samples) as database:
        database.execute("UPDATE records SET content = x'00'")
    database.close()
    with Samples(directory.path) as samples:
        assert len(samples.rows()) == 9
        with pytest.raises(SamplesUnreadable, match="content is damaged"):
            samples.trajectories()
        with pytest.raises(SamplesUnreadable):
            samples.listed(answer="4")


def test_a_search_in_answers_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    directory = recorded_run(tmp_path / "run", RECORDS)
    with Samples(directory.path, answer_s=-1.0) as samples:
        with pytest.raises(
            InvalidCondition, match="took more than -1 s: give a step, an agent or a query too"
        ):
            samples.listed(answer="4")
        assert samples.count() and samples.listed(answer="4", step=99) == [], "the others are as they were"


@pytest.mark.parametrize(
    ("text", "sql", "values"),
    [
        ("12", "= ?", (12.0,)),
        ("<0.2", "< ?", (0.2,)),
        (" >= -.5 ", ">= ?", (-0.5,)),
        ("10-20", "BETWEEN ? AND ?", (10.0, 20.0)),
        ("-1 .. -0.5", "BETWEEN ? AND ?", (-1.0, -0.5)),
        (3, "= ?", (3,)),
    ],
)
def test_conditions(text: str | float, sql: str, values: tuple[float, ...]) -> None:
    assert Condition.of(text) == Condition(sql, values)


@pytest.mark.parametrize("text", ["", "x", "<", "1; DROP TABLE samples", "1 2", "<0.2>"])
def test_other_conditions_are_refused(run: Path, text: str) -> None:
    with pytest.raises(InvalidCondition, match="is not a condition"), Samples(run) as samples:
        samples.trajectories(reward=text)
