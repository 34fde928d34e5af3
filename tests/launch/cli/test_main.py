"""The command line, as far as it gets without starting a process."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flexmarl.actors.messages import RunResult
from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.orchestrator import checkpoint
from flexmarl.actors.orchestrator.checkpoint import RunState
from flexmarl.launch.cli import registry as commands
from flexmarl.launch.cli.main import main
from flexmarl.launch.config.config_reading import check, resolve, to_yaml
from flexmarl.launch.errors import Interrupted
from flexmarl.launch.run import prepared_run
from flexmarl.launch.run.run import Run
from flexmarl.launch.run_folder.line_writer import LineWriter
from flexmarl.launch.run_folder.run_directory import RunDirectory

from ..conftest import SOURCES, TINY


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a run was started")

    monkeypatch.setattr(Run, "_until_the_end", refuse)
    # tests/launch/run/preflight/ has the checks: each takes a second
    monkeypatch.setattr(prepared_run, "check_before_start", lambda *_: {})
    monkeypatch.chdir(tmp_path)


class Result:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


Flexmarl = Callable[..., Result]


@pytest.fixture
def flexmarl(capsys: pytest.CaptureFixture[str]) -> Flexmarl:
    def run(*words: str) -> Result:
        status = main(list(words))
        return Result(status, *capsys.readouterr())

    return run


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["train", "--help"], ["report", "-h"], ["--version"]])
def test_help_and_version(flexmarl: Flexmarl, words: list[str]) -> None:
    result = flexmarl(*words)
    assert result.status == 0 and "flexmarl" in result.out and not result.err


@pytest.mark.parametrize("words", [["train", "--nonsense"], ["nonsense"], ["report"], []])
def test_wrong_usage_is_refused(flexmarl: Flexmarl, words: list[str]) -> None:
    result = flexmarl(*words)
    assert result.status == 2 and "Usage: flexmarl" in result.err + result.out


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestDryRun:
    def test_shows_a_config_that_resolves_to_itself_and_writes_nothing(
        self, flexmarl: Flexmarl, tmp_path: Path
    ) -> None:
        before = files(tmp_path), files(TINY)
        result = flexmarl("train", str(TINY), "--name", "dry", "--dry-run", "training.steps=3")
        assert result.status == 0, result.err
        *config_lines, last = result.out.splitlines()
        assert last == "# checked; nothing was started or written"
        config = check(yaml.safe_load("\n".join(config_lines)), "printed")
        assert config == resolve(str(TINY), ["training.steps=3"])
        assert (files(tmp_path), files(TINY)) == before and list(tmp_path.iterdir()) == []


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["nowhere"], "no recipe 'nowhere'"),
            ([str(TINY), "other"], "one recipe at a time"),
            ([str(TINY), "training.steps=-1"], "training.steps=-1"),
            ([str(TINY), "nonsense"], "one recipe at a time"),
            ([str(TINY), "--name", "a/b"], "--name 'a/b': a run's name is the name of one folder"),
            ([str(TINY), "--name", ".."], "--name '..'"),
            ([str(TINY), "--name", ""], "--name ''"),
            ([str(TINY), "--name", "/tmp/x"], "--name '/tmp/x'"),
            ([str(TINY), "--name", "a\nb"], "--name"),
            ([str(TINY), "--name", "a\x1b[2J"], r"--name 'a\x1b[2J'"),
            ([str(TINY), "--name", "a\u202eb"], r"--name 'a\u202eb'"),
            ([str(TINY), "--name", " a"], "--name ' a': a run's name is the name of one folder"),
            ([str(TINY), "--name", "x" * 300], "can't be made: File name too long"),
            ([str(TINY), "--runs", "/dev/null"], "can't be made: Not a directory"),
            ([str(TINY), "--runs", "/proc/self"], "can't be made"),
            (["--resume", "nowhere"], "nowhere is not a run directory: it has no config.yaml"),
            (["--resume", str(TINY)], "is not a run directory: it has no checkpoints"),
            (["--resume", "x", "other"], "--resume takes no recipe"),
            (
                ["--resume", "x", "--on", "2x8x80GiB"],
                "--on 2x8x80GiB is for a new run: --resume trains a run",
            ),
            (["--accept", "data"], "--accept is for --resume"),
        ],
    )
    def test_leave_nothing_behind(self, flexmarl: Flexmarl, words: list[str], message: str) -> None:
        result = flexmarl("train", *words)
        assert result.status == 2
        assert message in result.err and result.err.startswith("flexmarl: ") and not result.out
        assert list(Path().glob("runs/*")) == []

    def test_a_run_that_exists_is_left_alone(self, flexmarl: Flexmarl) -> None:
        RunDirectory.create(Path("runs/twice"), to_yaml(resolve(str(TINY), [])))
        before = Path("runs/twice/config.yaml").read_bytes()
        assert flexmarl("train", str(TINY), "--name", "twice", "--dry-run").status == 2
        result = flexmarl("train", str(TINY), "--name", "twice", "seed=5")
        assert result.status == 2 and "exists already: choose another --name" in result.err
        assert Path("runs/twice/config.yaml").read_bytes() == before

    @pytest.mark.parametrize("option", [("--on", "1x1x80GiB"), ("--dry-run",)])
    def test_a_plan_for_a_run_that_has_begun_trains_nothing(
        self, flexmarl: Flexmarl, option: tuple[str, ...]
    ) -> None:
        directory = RunDirectory.create(Path("runs/begun"), to_yaml(resolve(str(TINY), [])))
        before = files(directory.path)
        result = flexmarl("train", str(TINY), "--name", "begun", "--continue", *option)
        assert result.status == 2 and not result.out
        assert (
            f"{' '.join(option)} is for a new run: runs/begun has begun, and --continue trains it"
            in result.err
        )
        assert files(directory.path) == before

    def test_a_plan_for_absent_cards_has_the_warnings_of_its_config(self, flexmarl: Flexmarl) -> None:
        settings = ["agent_defaults.model.device=cuda", "agent_defaults.model.dtype=float32"]
        result = flexmarl("train", str(TINY), "--on", "1x8x80GiB", *settings)
        assert result.status == 0 and "# warning: policy " in result.out
        assert "model.dtype=float32 on a GPU is several times slower" in result.out

    def test_report_of_what_is_no_run(self, flexmarl: Flexmarl, tmp_path: Path) -> None:
        result = flexmarl("report", str(tmp_path))
        assert result.status == 2 and "is not a run directory" in result.err
        assert list(tmp_path.iterdir()) == []


class TestEndings:
    """The output and the files of a run after every kind of ending."""

    @staticmethod
    def ends_with(monkeypatch: pytest.MonkeyPatch, ending: BaseException | RunResult) -> None:
        async def train(run: Run) -> RunResult:
            for n in range(20):
                run._broadcast.warn(f"warning {n}", at_once=True)
            if isinstance(ending, BaseException):
                raise ending
            return ending

        monkeypatch.setattr(Run, "_until_the_end", train)

    @staticmethod
    def last_event() -> dict[str, Any]:
        events = Path("runs/run/events.jsonl").read_text().splitlines()
        last: dict[str, Any] = json.loads(events[-1])
        return last

    FULL = OSError(errno.ENOSPC, "No space left on device")

    @pytest.mark.parametrize(
        ("error", "status", "words"),
        [
            (FULL, 1, "The run failed: [Errno 28] No space left on device"),
            (KeyboardInterrupt(), 130, "The run was stopped by SIGINT"),
        ],
    )
    def test_are_shown_and_logged(
        self,
        flexmarl: Flexmarl,
        monkeypatch: pytest.MonkeyPatch,
        error: BaseException,
        status: int,
        words: str,
    ) -> None:
        self.ends_with(monkeypatch, error)
        result = flexmarl("train", str(TINY), "--name", "run")
        assert result.status == status and words in result.out and not result.err
        last = self.last_event()
        assert (last["event"], last["stopped"]) == ("run_ended", status == 130)
        assert last["error"] in words

    def test_are_shown_though_they_can_not_be_logged(
        self, flexmarl: Flexmarl, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.ends_with(monkeypatch, self.FULL)
        append = LineWriter._append

        def append_but_the_end(lines: LineWriter, data: bytes) -> None:
            if b"run_ended" in data:
                raise self.FULL
            append(lines, data)

        monkeypatch.setattr(LineWriter, "_append", append_but_the_end)
        result = flexmarl("train", str(TINY), "--name", "run")
        assert result.status == 1 and "The run failed: [Errno 28]" in result.out and not result.err
        assert "events.jsonl lacks 1 event: run_ended: No space left on device" in " ".join(
            result.out.split()
        )

    def test_come_as_usual_without_a_reader_of_the_output(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """``flexmarl train | head -1``, and ``flexmarl train >&-``"""
        self.ends_with(monkeypatch, RunResult(6, False, {}, ""))
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w") as output:
            monkeypatch.setattr(sys, "stdout", output)
            assert main(["train", str(TINY), "--name", "run"]) == 0
        assert self.last_event()["event"] == "run_ended" and Path("runs/run/report.html").exists()
        monkeypatch.setattr(sys, "stdout", None)
        assert main(["train", str(TINY), "--name", "silent"]) == 0

    def test_under_json_each_line_is_an_object_and_the_last_one_is_the_end(
        self, flexmarl: Flexmarl, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        endings: dict[str, BaseException | RunResult] = {
            "done": RunResult(6, False, {0: {"accuracy": 0.5}}, "step_6"),
            "failed": self.FULL,
        }
        for name, ending in endings.items():
            self.ends_with(monkeypatch, ending)
            result = flexmarl("train", str(TINY), "--name", name, "--json")
            lines = [json.loads(line) for line in result.out.splitlines()]
            assert [lines[0]["event"], lines[-1]["event"]] == ["run_started", "run_ended"]
            assert lines[0]["folder"] == f"runs/{name}" and lines[-1]["wall_s"] >= 0
            assert [line["text"] for line in lines if line["event"] == "warning"][-1] == "warning 19"
            assert not result.err
        assert lines[-1]["error"] == str(self.FULL)

    def test_quiet_shows_warnings_and_the_result(
        self, flexmarl: Flexmarl, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.ends_with(monkeypatch, RunResult(6, False, {0: {"accuracy": 0.5}}, "step_6"))
        result = flexmarl("train", str(TINY), "--name", "run", "-q")
        shown = result.out.splitlines()
        assert shown[:20] == [f"warning: warning {n}" for n in range(20)]
        assert shown[20].startswith("Trained 6 steps in") and len(shown) == 24

    def test_the_level_of_the_logs_reaches_the_actors(
        self, flexmarl: Flexmarl, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: list[object] = []

        async def train(run: Run) -> RunResult:
            given.append(run._log_level)
            return RunResult(6, False, {}, "")

        monkeypatch.setattr(Run, "_until_the_end", train)
        flexmarl("train", str(TINY), "--name", "plain")
        flexmarl("train", str(TINY), "--name", "debug", "--log-level", "debug")
        assert given == ["info", "debug"]
        assert flexmarl("train", str(TINY), "--log-level", "loud").status == 2

    def test_a_report_that_can_not_be_written_is_no_traceback(
        self, flexmarl: Flexmarl, stopped_run: RunDirectory
    ) -> None:
        (stopped_run.path / "report.html").mkdir()
        result = flexmarl("report", str(stopped_run.path))
        assert result.status == 1 and "report.html" in result.err and result.err.startswith("flexmarl: ")


class TestCtrlC:
    def test_before_anything_was_started(self, flexmarl: Flexmarl, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(_: object) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr(commands, "run", interrupted)
        result = flexmarl("train")
        assert (result.status, result.out, result.err) == (130, "", "flexmarl: stopped\n")

    def test_while_modules_are_imported(self) -> None:
        """The first that is imported, other than Python's own small ones, is interrupted."""
        program = (
            "import sys\n"
            "class Interrupts:\n"
            "    def find_spec(self, name, *_):\n"
            "        if name.split('.')[0] in ('asyncio', 'click') or name == 'flexmarl.launch.cli.registry':\n"
            "            raise KeyboardInterrupt\n"
            "sys.meta_path.insert(0, Interrupts())\n"
            "from flexmarl.launch.cli.main import main\n"
            "sys.exit(main(['train']))\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(SOURCES)},
            capture_output=True,
            text=True,
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "flexmarl: stopped\n")


def state_after(step: int) -> RunState:
    versions = {PolicyName(name): Version(step) for name in ("solver", "checker")}
    return RunState(Step(step), versions, {})


@pytest.fixture
def stopped_run(tmp_path: Path) -> RunDirectory:
    """A run that was stopped after step 4, with checkpoints of steps 2 and 4."""
    run = RunDirectory.create(tmp_path / "run", to_yaml(resolve(str(TINY), [])))
    run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 6)))
    for step in (2, 4):
        for agent in ("solver", "checker"):
            folder = checkpoint.partial_folder(run.checkpoints, Step(step)) / agent
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_bytes(bytes(range(256)))
        checkpoint.commit(run.checkpoints, state_after(step), keep=2)
    return run


class TestResumingWhatIsDamaged:
    NEWEST = Path("checkpoints/step_000004")

    def refused(self, flexmarl: Flexmarl, run: RunDirectory) -> str:
        before = run.metrics.read_bytes()
        result = flexmarl("train", "--resume", str(run.path))
        assert result.status == 2 and not result.out
        assert run.metrics.read_bytes() == before, "nothing is forgotten for a run that can't continue"
        return result.err

    @pytest.mark.parametrize(
        "file", ["metrics.jsonl", "lock", "samples.sqlite", "made_with.tmp", "logs/store.log", "checkpoints"]
    )
    def test_a_link(self, flexmarl: Flexmarl, stopped_run: RunDirectory, tmp_path: Path, file: str) -> None:
        path, other = stopped_run.path / file, tmp_path / "other"
        if path.exists():
            path.rename(other)
        path.symlink_to(other)
        before = other.exists()
        assert f"{path} is a link to {other}" in self.refused(flexmarl, stopped_run)
        assert other.exists() == before and path.is_symlink()

    @pytest.mark.parametrize("file", ["solver/model.safetensors", "run.json", "manifest.json"])
    def test_a_lost_file(self, flexmarl: Flexmarl, stopped_run: RunDirectory, file: str) -> None:
        (stopped_run.path / self.NEWEST / file).unlink()
        error = self.refused(flexmarl, stopped_run)
        assert str(self.NEWEST / file) in error and "is missing" in error

    @pytest.mark.parametrize("file", ["solver/model.safetensors", "run.json", "manifest.json"])
    def test_a_file_cut_short(self, flexmarl: Flexmarl, stopped_run: RunDirectory, file: str) -> None:
        path = stopped_run.path / self.NEWEST / file
        path.write_bytes(path.read_bytes()[:-3])
        assert str(self.NEWEST / file) in self.refused(flexmarl, stopped_run)

    @pytest.mark.parametrize("file", ["checker/model.safetensors", "run.json"])
    def test_a_flipped_bit(self, flexmarl: Flexmarl, stopped_run: RunDirectory, file: str) -> None:
        path = stopped_run.path / self.NEWEST / file
        content = bytearray(path.read_bytes())
        content[40] ^= 1
        path.write_bytes(content)
        error = self.refused(flexmarl, stopped_run)
        assert str(self.NEWEST / file) in error and "is damaged" in error

    def test_an_older_checkpoint_is_offered(self, flexmarl: Flexmarl, stopped_run: RunDirectory) -> None:
        (stopped_run.path / self.NEWEST / "run.json").unlink()
        error = self.refused(flexmarl, stopped_run)
        assert f"remove {stopped_run.path / self.NEWEST} to continue from step_000002" in error

    def test_a_run_locked_by_another_process(self, flexmarl: Flexmarl, stopped_run: RunDirectory) -> None:
        with stopped_run.locked():
            assert "another process is working on this run" in self.refused(flexmarl, stopped_run)

    def test_a_config_that_was_changed_by_hand(self, flexmarl: Flexmarl, stopped_run: RunDirectory) -> None:
        stopped_run.config.write_text(stopped_run.config.read_text().replace("seed: 7", "seed: x"))
        assert "seed='x': Input should be a valid integer" in self.refused(flexmarl, stopped_run)


def test_a_checkpoint_that_was_never_completed_is_cleared_and_not_used(
    stopped_run: RunDirectory, monkeypatch: pytest.MonkeyPatch, flexmarl: Flexmarl
) -> None:
    started: list[object] = []

    async def train(run: Run) -> None:
        started.append(run._prepared.start.checkpoint)
        raise Interrupted("enough seen")

    monkeypatch.setattr(Run, "_until_the_end", train)
    partial = checkpoint.partial_folder(stopped_run.checkpoints, Step(6))
    shutil.copytree(stopped_run.checkpoints / "step_000004", partial)
    result = flexmarl("train", "--resume", str(stopped_run.path))
    assert result.status == 130 and result.out.startswith("continuing after step 4\n")
    folder = stopped_run.checkpoints / "step_000004"
    assert started == [(folder, state_after(4))]
    assert not partial.exists()
    assert [line[:10] for line in stopped_run.metrics.read_text().splitlines()] == [
        f'{{"step": {n}' for n in range(1, 5)
    ]

    shutil.rmtree(stopped_run.checkpoints / "step_000002")
    folder.rename(partial)
    result = flexmarl("train", "--resume", str(stopped_run.path))
    assert result.status == 130 and result.out.startswith("no checkpoint yet: starting again\n")
    assert started[1] is None, "without any checkpoint it begins again"
    assert stopped_run.metrics.read_text() == ""


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--runs", ""),
        ("train", "--resume", ""),
        ("simulate", "merchant-assistant", "--runs", ""),
        ("report", ""),
        ("runs", "list", "--runs", ""),
        ("runs", "compare", "runs/first", ""),
        ("calibrate", ""),
        ("new", ""),
    ],
)
def test_an_empty_path_is_refused_it_would_be_the_working_directory(
    flexmarl: Flexmarl, words: tuple[str, ...]
) -> None:
    done = flexmarl(*words)
    assert done.status == 2 and "the path is empty: write `.` for the working directory" in done.err
    assert not any(Path().iterdir())
