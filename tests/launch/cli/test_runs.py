"""``flexmarl runs``, ``flexmarl export`` and ``flexmarl completion`` as people type them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from flexmarl.actors.names import Step
from flexmarl.actors.run_events import RunEnded, RunEvent, RunResumed
from flexmarl.launch.cli.main import main

from ..conftest import SOURCES
from .runs import DONE, files, make_run, save_checkpoint

POLICY = {
    "config.json": "{}",
    "tokenizer.json": "{}",
    "model.safetensors": "w",
    "training_state.json": "{}",
    "training_state.safetensors": "m",
    "reference.safetensors": "r",
    "critic.safetensors": "c",
}


class Result(NamedTuple):
    status: int
    out: str
    err: str


Flexmarl = Callable[..., Result]


@pytest.fixture
def flexmarl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Flexmarl:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Result:
        status = main(list(words))
        return Result(status, *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    "words", [("runs",), ("runs", "list"), ("runs", "compare"), ("runs", "rm"), ("export",), ("completion",)]
)
def test_each_has_help_with_examples(flexmarl: Flexmarl, words: tuple[str, ...]) -> None:
    result = flexmarl(*words, "--help")
    assert result.status == 0
    assert "Examples:" in result.out and f"flexmarl {' '.join(words)}" in result.out


# ----------------------------------------------------------------------- list


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ((), "killed"),
        ((DONE,), "done"),
        ((RunEnded(stopped=True, step=Step(3)),), "stopped"),
        ((RunEnded(stopped=False, error="the trainer died"),), "failed"),
        ((DONE, RunResumed(Step(3), "3.11", "linux", 2, 1)), "killed"),
    ],
)
def test_the_state_is_that_of_the_last_process(
    flexmarl: Flexmarl, tmp_path: Path, events: tuple[RunEvent, ...], state: str
) -> None:
    make_run(tmp_path / "runs" / "first", "training.steps=7", events=events)
    (run,) = json.loads(flexmarl("runs", "list", "--json").out)["runs"]
    assert (run["name"], run["recipe"], run["state"]) == ("first", "sort-digits", state)
    assert (run["step"], run["steps"], run["evaluated_step"]) == (3, 7, 3)
    assert run["evaluation"] == {"accuracy": 0.5, "reward/sorter": 0.25}
    assert run["age_s"] >= 0 and run["size_bytes"] > 500


def test_runs_are_listed_newest_first_and_other_folders_are_left_out(
    flexmarl: Flexmarl, tmp_path: Path
) -> None:
    for age_s, name in ((10, "second"), (50, "first")):
        make_run(tmp_path / "runs" / name, events=(DONE,), age_s=age_s)
    (tmp_path / "runs" / "notes").mkdir()
    result = flexmarl("runs", "list")
    lines = [line for line in result.out.splitlines() if "sort-digits" in line]
    assert result.status == 0
    assert ["first" in line for line in lines] == [False, True]
    assert all("done" in line and "3/120" in line and "accuracy 0.5 (step 3)" in line for line in lines)


def test_a_run_that_a_process_works_on_is_running_and_is_not_removed(
    flexmarl: Flexmarl, tmp_path: Path
) -> None:
    directory = make_run(tmp_path / "runs" / "first")
    other = make_run(tmp_path / "runs" / "other")
    with directory.locked():
        listed = json.loads(flexmarl("runs", "list", "--json").out)["runs"]
        assert {run["name"]: run["state"] for run in listed} == {"first": "running", "other": "killed"}
        refused = flexmarl("runs", "rm", "runs/other", "runs/first", "--yes")
    assert refused.status == 2 and "runs/first: a process works on this run" in refused.err
    assert directory.config.exists() and other.config.exists()


def test_a_folder_that_is_missing_or_empty(flexmarl: Flexmarl, tmp_path: Path) -> None:
    missing = flexmarl("runs", "list")
    assert missing.status == 2 and "there is no folder runs" in missing.err
    (tmp_path / "runs").mkdir()
    assert flexmarl("runs", "list").out == "there are no runs in runs\n"


# ----------------------------------------------------------------------- compare


def test_two_runs_side_by_side(flexmarl: Flexmarl, tmp_path: Path) -> None:
    make_run(tmp_path / "a", "seed=1", events=(DONE,))
    make_run(tmp_path / "b", "seed=2", "agents.sorter.optimizer.lr=0.5", steps=5)
    found = json.loads(flexmarl("runs", "compare", "a", "b", "--json").out)
    assert found["config"] == {"seed": [1, 2], "policies.sorter.optimizer.lr": [pytest.approx(0.001), 0.5]}
    figures = found["figures"]
    assert figures["state"] == ["done", "killed"]
    assert figures["steps"] == [3, 5] and figures["wall_s"] == [6.0, 10.0]
    assert figures["eval/accuracy"] == [0.5, 0.5]
    assert figures["reward/sorter"] == [pytest.approx(0.3), pytest.approx(0.5)]
    shown = flexmarl("runs", "compare", "a", "b").out
    assert "policies.sorter.optimizer.lr" in shown and "wall_s" in shown
    assert "training.steps" not in shown


def test_runs_that_differ_in_their_seeds_are_one_column(flexmarl: Flexmarl, tmp_path: Path) -> None:
    rate = "agents.sorter.optimizer.lr=0.5"
    make_run(tmp_path / "a", "seed=0", events=(DONE,))
    make_run(tmp_path / "b", "seed=1", steps=5)
    make_run(tmp_path / "c", "seed=0", rate, events=(DONE,))
    shown = flexmarl("runs", "compare", "a", "b", "c").out
    rows = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in _table_rows(shown)}
    assert rows[""] == ["a and 1 more seed", "c"]
    assert rows["seed"] == ["0, 1", "0"] and rows["policies.sorter.optimizer.lr"] == ["0.001", "0.5"]
    assert rows["state"] == ["1 done, 1 killed", "done"]
    assert rows["steps"] == ["4 (3 to 5, n=2)", "3 (n=1)"] and rows["eval/accuracy"] == ["0.5", "0.5 (n=1)"]
    (first, second) = json.loads(flexmarl("runs", "compare", "a", "b", "c", "--json").out)["seeds"]
    assert (first["runs"], first["seeds"], second["seeds"]) == (["a", "b"], [0, 1], [0])
    assert first["figures"]["steps"] == {"mean": 4.0, "least": 3, "greatest": 5, "count": 2}


def _table_rows(text: str) -> list[list[str]]:
    """The cells of all lines of tables."""
    lines = [line.replace("┃", "│") for line in text.splitlines()]
    return [line.strip("│").split("│") for line in lines if line.startswith("│")]


def test_one_run_is_not_compared(flexmarl: Flexmarl, tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    assert flexmarl("runs", "compare", "a").status == 2
    assert "b is not a run directory" in flexmarl("runs", "compare", "a", "b").err


# ----------------------------------------------------------------------- rm


@pytest.mark.parametrize(("answer", "removed"), [("y\n", True), ("n\n", False), ("", False)])
def test_removal_asks(tmp_path: Path, answer: str, removed: bool) -> None:
    make_run(tmp_path / "first")
    code = "import sys; from flexmarl.launch.cli.main import main; sys.exit(main(['runs', 'rm', 'first']))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        input=answer,
        text=True,
        capture_output=True,
    )
    assert (tmp_path / "first").exists() is not removed
    assert (done.returncode == 0) is removed
    assert "Remove these runs" in done.stdout and "first" in done.stdout


def test_removal_without_a_question(flexmarl: Flexmarl, tmp_path: Path) -> None:
    make_run(tmp_path / "first")
    make_run(tmp_path / "second")
    (tmp_path / "notes").mkdir()
    assert "notes is not a run directory" in flexmarl("runs", "rm", "first", "notes", "--yes").err
    assert (tmp_path / "first").exists()
    assert flexmarl("runs", "rm", "first", "second", "--yes").out == "removed first\nremoved second\n"
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


# ----------------------------------------------------------------------- export


def test_a_policy_is_exported_without_the_training_state(flexmarl: Flexmarl, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "first")
    for step in (2, 10):
        save_checkpoint(directory, step, {"sorter": files({**POLICY, "config.json": str(step)})})
    result = flexmarl("export", "first", "sorter", "models/newest")
    assert result.status == 0 and "step_000010" in result.out
    newest = tmp_path / "models" / "newest"
    assert sorted(p.name for p in newest.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (newest / "config.json").read_text() == "10"
    (tmp_path / "empty").mkdir()
    assert flexmarl("export", "first", "sorter", "empty", "--step", "2").status == 0
    assert (tmp_path / "empty" / "config.json").read_text() == "2"
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["newest"]


def test_an_export_that_can_not_be_is_refused(flexmarl: Flexmarl, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "first")

    def refusal(*words: str) -> str:
        result = flexmarl("export", "first", *words)
        assert result.status == 2
        return result.err

    assert "first has no checkpoint yet" in refusal("sorter", "out")
    folder = save_checkpoint(
        directory, 2, {"sorter": files(POLICY), "faked": files({"simulated_policy.json": "{}"})}
    )
    assert "has no checkpoint of step 3; there are: 2" in refusal("sorter", "out", "--step", "3")
    assert "has no policy 'sort'; there are: faked, sorter" in refusal("sort", "out")
    assert "policy faked of first has no weights: its model is simulated" in refusal("faked", "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    assert "full exists and is not an empty folder" in refusal("sorter", "full")
    assert (tmp_path / "full" / "notes").read_text() == "mine"
    (folder / "sorter" / "model.safetensors").write_text("v")
    assert "model.safetensors: is damaged" in refusal("sorter", "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "secret"])
def test_an_export_follows_no_link(flexmarl: Flexmarl, tmp_path: Path, name: str) -> None:
    folder = save_checkpoint(make_run(tmp_path / "first"), 2, {"sorter": files(POLICY)})
    (tmp_path / "elsewhere").write_text(POLICY.get(name, "a secret"))
    (folder / "sorter" / name).unlink(missing_ok=True)
    (folder / "sorter" / name).symlink_to(tmp_path / "elsewhere")
    result = flexmarl("export", "first", "sorter", "out")
    assert result.status == 2 and f"sorter/{name}: is a link to {tmp_path}/elsewhere" in result.err
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------- completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(flexmarl: Flexmarl, shell: str) -> None:
    result = flexmarl("completion", shell)
    assert result.status == 0
    assert f"_FLEXMARL_COMPLETE={shell}_complete" in result.out


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands(flexmarl: Flexmarl, tmp_path: Path) -> None:
    """The script is loaded into bash, as a person's shell does, and completes ``flexmarl runs c``."""
    program = tmp_path / "bin" / "flexmarl"
    program.parent.mkdir()
    code = "import sys; from flexmarl.launch.cli.main import main; sys.exit(main())"
    program.write_text(f"#!/bin/sh\nPYTHONPATH={SOURCES} exec {sys.executable} -c '{code}' \"$@\"\n")
    program.chmod(0o755)
    (tmp_path / "completion.sh").write_text(flexmarl("completion", "bash").out)
    done = subprocess.run(
        [
            "bash",
            "-c",
            "source completion.sh; COMP_WORDS=(flexmarl runs c); COMP_CWORD=2; "
            '_flexmarl_completion flexmarl; echo "${COMPREPLY[@]}"',
        ],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "compare\n", done.stderr
