"""The files of a run: made once, locked, and cut back to the step that a resumed run continues from."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.launch.errors import RunDirectoryError
from flexmarl.launch.run_folder.line_writer import LineWriter
from flexmarl.launch.run_folder.run_directory import RunDirectory

from ..conftest import SIMULATED, TINY, Launched, json_lines


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "seed: 1\n")


class TestMaking:
    def test_it_holds_the_config_and_is_found_again(self, run: RunDirectory) -> None:
        assert RunDirectory.existing(run.path).config.read_text() == "seed: 1\n"
        assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "config.yaml", "logs"]

    def test_one_that_exists_is_left_alone(self, run: RunDirectory) -> None:
        with pytest.raises(RunDirectoryError, match=r"exists already: choose another --name, or .* --resume"):
            RunDirectory.create(run.path, "seed: 2\n")
        assert run.config.read_text() == "seed: 1\n"

    def test_where_none_can_be_made_the_reason_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for path, reason in (
            (tmp_path / "file" / "run", "Not a directory"),
            (tmp_path / ("x" * 300), "too long"),
        ):
            with pytest.raises(RunDirectoryError, match=f"can't be made: .*{reason}, in .*; --runs names"):
                RunDirectory.create(path, "")

    @pytest.mark.parametrize("missing", ["config.yaml", "checkpoints", "logs"])
    def test_a_folder_that_is_none_is_named_and_left_alone(self, run: RunDirectory, missing: str) -> None:
        (run.path / missing).rename(run.path / "elsewhere")
        before = sorted(run.path.iterdir())
        with pytest.raises(RunDirectoryError, match=f"is not a run directory: it has no {missing}"):
            RunDirectory.existing(run.path)
        assert sorted(run.path.iterdir()) == before


def test_all_of_a_run_is_this_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    settings = ("training.steps=1", "checkpoint.every=1", *SIMULATED)
    (tmp_path / "runs").mkdir()
    launched = Launched(
        tmp_path / "runs" / "run", "train", str(TINY), "--runs", str(tmp_path / "runs"), "--name", "run", *settings,
        prelude="import os; os.umask(0)",
    )  # fmt: skip
    try:
        assert launched.wait() == 0, launched.text
        found = [launched.directory, *launched.directory.rglob("*")]
        open_to_others = [path for path in found if path.stat().st_mode & 0o077]
        assert not open_to_others and {"trainer.log", "samples.sqlite", "run.json"} <= {
            path.name for path in found
        }
    finally:
        launched.close()


class TestLinks:
    @pytest.mark.parametrize(
        "name",
        ["config.yaml", "made_with.json", "metrics.jsonl", "events.jsonl", "samples.sqlite", "samples.sqlite-wal",
         "lock", "report.html", "address", "config.tmp", "logs/launcher.log", "logs/trainer.log", "logs", "checkpoints",
         "checkpoints/step_000001.partial", "store", "store/samples.journal", "opponents", "opponents/solver.json",
         "suspended/state", "sinks/wandb.json"],
    )  # fmt: skip
    def test_each_is_named(self, run: RunDirectory, tmp_path: Path, name: str) -> None:
        run.check_no_links()
        path, other = run.path / name, tmp_path / "other"
        path.parent.mkdir(exist_ok=True)
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.symlink_to(other)
        with pytest.raises(
            RunDirectoryError, match=f"{path} is a link to {other}, and a run writes into its own"
        ):
            run.check_no_links()

    def test_those_of_libraries_are_theirs(self, run: RunDirectory) -> None:
        (run.path / "wandb").mkdir()
        (run.path / "wandb" / "latest-run").symlink_to("run-1")
        run.check_no_links()

    def test_the_lock_is_no_way_to_another_file(self, run: RunDirectory, tmp_path: Path) -> None:
        other = tmp_path / "other"
        other.write_text("another's")
        run.lock.symlink_to(other)
        with pytest.raises(RunDirectoryError, match="is a link"), run.locked():
            pass
        assert other.read_text() == "another's"


def test_one_process_at_a_time(run: RunDirectory) -> None:
    refusal = pytest.raises(RunDirectoryError, match="another process is working on this run")
    with run.locked(), refusal, run.locked():
        pass
    with run.locked():
        pass


class TestForgetting:
    @given(steps=st.integers(0, 8), resumed=st.integers(0, 10), data=st.data())
    def test_keeps_the_whole_lines_up_to_the_checkpoint(
        self, tmp_path_factory: pytest.TempPathFactory, steps: int, resumed: int, data: st.DataObject
    ) -> None:
        """After a cut at any byte."""
        run = RunDirectory.create(tmp_path_factory.mktemp("runs") / "run", "")
        lines = [json.dumps({"step": step, "note": "é\u2028"}) + "\n" for step in range(1, steps + 1)]
        text = "".join(lines).encode()
        kept_bytes = data.draw(st.integers(0, len(text)))
        run.metrics.write_bytes(text[:kept_bytes])
        run.forget_after(resumed)
        ends = [len("".join(lines[: n + 1]).encode()) for n in range(steps)]
        whole = sum(end - 1 <= kept_bytes for end in ends)  # a line without its line break is whole too
        assert [line["step"] for line in json_lines(run.metrics)] == list(range(1, min(whole, resumed) + 1))
        assert run.metrics.read_bytes() in (b"", run.metrics.read_bytes().rstrip(b"\n") + b"\n")

    def test_keeps_every_whole_event(self, run: RunDirectory) -> None:
        run.events.write_text('{"event": "a"}\n{"event": "b"}\n{"eve')
        run.forget_after(0)
        events = LineWriter(run.events, pytest.fail)
        events.write({"event": "c", "step": 1})
        events.close()
        assert [event["event"] for event in json_lines(run.events)] == ["a", "b", "c"]

    def test_needs_no_files(self, run: RunDirectory) -> None:
        run.forget_after(3)
        assert not run.metrics.exists()


class TestWarningsOfAResumedRun:
    def test_a_line_that_was_cut_off_is_named_with_its_step(self, run: RunDirectory) -> None:
        run.metrics.write_text('{"step": 1, "time_s": 1.0}\n{"step": 2, "time_s": 2.0}\n{"step": 3, "ti')
        assert run.forget_after(2) == [
            f"{run.metrics}: the last line of step 3, which is trained again, was cut off by a crash, and was removed: "
            '\'{"step": 3, "ti\''
        ]
        run.events.write_text('{"time": 1.5, "event": "a"}\n{"time": 2.5, "eve')
        (warning,) = run.forget_after(2)
        assert warning.startswith(f"{run.events}: the last line was cut off by a crash")

    def test_missing_steps_are_named(self, run: RunDirectory) -> None:
        run.metrics.write_text('{"step": 1}\n{"step": 4}\n{"step": 5, ')
        cut, lacking = run.forget_after(5)
        assert "the last line of step 5 was cut off" in cut
        assert lacking == f"{run.metrics} lacks steps 2-3 and 5: not written, or lost"

    def test_each_step_stays_once(self, run: RunDirectory) -> None:
        run.metrics.write_text('{"step": 1}\n{"step": 2, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3}\n')
        assert run.forget_after(2) == []
        assert json_lines(run.metrics) == [{"step": 1}, {"step": 2, "a": 2}]

    @pytest.mark.parametrize("seed", range(20))
    def test_after_a_cut_anywhere_and_a_resume_each_step_is_there_once(
        self, run: RunDirectory, seed: int
    ) -> None:
        chance = random.Random(seed)
        saved = chance.randrange(1, 5)
        lines = [json.dumps({"step": step, "note": "x" * 9_000}) + "\n" for step in range(1, 8)]
        run.metrics.write_text("".join(lines)[: chance.randrange(len("".join(lines[:saved])), 63_000)])
        run.forget_after(saved)
        writer = LineWriter(run.metrics, pytest.fail)
        for step in range(saved + 1, 9):
            writer.write({"step": step})
        writer.close()
        assert [line["step"] for line in json_lines(run.metrics)] == list(range(1, 9))
