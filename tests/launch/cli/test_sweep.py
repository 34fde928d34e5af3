"""``flexmarl sweep``: its runs are real ones, each a process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from flexmarl.launch.cli import sweep
from flexmarl.launch.cli.main import main
from flexmarl.launch.run_folder.stored_run import read_run

from ...patience import PATIENCE_S
from ...warm_process import TEMPLATE, WarmProcess
from ..conftest import SIMULATED, SOURCES, TINY, UNCHECKED, wait_until

SETTINGS = (str(TINY), *SIMULATED, "checks.trajectory=false")
COMMAND = f"{UNCHECKED}\nimport sys; from flexmarl.launch.cli.main import main; sys.exit(main())"


@contextmanager
def _warm_run(command: Sequence[str]) -> Iterator[WarmProcess | subprocess.Popen[bytes]]:
    """In place of ``subprocess.Popen``, as the sweep calls it."""
    words = command[len(sweep._COMMAND) :]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    yield TEMPLATE.start(COMMAND, words, environment, 1) or subprocess.Popen(command)


@pytest.fixture
def warm_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs are forks of a process that has imported the package, without the checks before a start."""
    monkeypatch.setattr(sweep, "subprocess", SimpleNamespace(Popen=_warm_run, run=subprocess.run))


def run_names(runs: Path) -> list[str]:
    return sorted(path.name for path in runs.iterdir()) if runs.exists() else []


def states(runs: Path) -> dict[str, str]:
    return {name: read_run(runs / name).state for name in run_names(runs)}


@pytest.mark.usefixtures("warm_runs")
def test_runs_are_trained_compared_and_not_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [*SETTINGS, "training.steps=1", "seed=0,1", "--name", "s", "--runs", str(tmp_path)]
    assert main(["sweep", *words]) == 0
    assert states(tmp_path) == {"s-seed=0": "done", "s-seed=1": "done"}
    shown, told = capfd.readouterr()
    assert "run 2 of 2: s-seed=1" in told
    assert "s-seed=0 and 1 more seed" in shown and "│ seed " in shown
    assert main(["sweep", *words]) == 0
    shown, _ = capfd.readouterr()
    assert "run 1 of 2: s-seed=0 is complete" in shown and "run 2 of 2: s-seed=1 is complete" in shown


@pytest.mark.usefixtures("warm_runs")
def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    faults = ("rollout.max_failed_share=0", "data.faults=[raise],[null]")
    words = [*SETTINGS, "training.steps=1", *faults, "--name", "s", "--runs", str(tmp_path)]
    assert main(["sweep", *words]) == 1
    assert states(tmp_path) == {"s-faults=raise": "failed", "s-faults=null": "done"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_run_under_way_with_a_checkpoint_and_the_sweep(
    tmp_path: Path, number: int
) -> None:
    words = [*SETTINGS, "training.steps=100000", "seed=0,1", "--name", "s", "--runs", str(tmp_path)]
    program = [sys.executable, "-P", "-m", "flexmarl.launch.cli.main", "sweep", *words]
    environment = os.environ | {"PYTHONPATH": str(SOURCES)}
    with subprocess.Popen(program, start_new_session=True, stderr=subprocess.PIPE, env=environment) as sweep:
        metrics = tmp_path / "s-seed=0" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, "two steps")
        if number == signal.SIGINT:
            os.killpg(sweep.pid, number)  # as a terminal does it
        else:
            sweep.send_signal(number)
        _, told = sweep.communicate(timeout=PATIENCE_S)
    assert sweep.returncode == 130, told.decode()
    assert states(tmp_path) == {"s-seed=0": "stopped"}
    assert read_run(tmp_path / "s-seed=0").checkpoints
    assert b"the same command with --name continues it" in told


def test_nothing_begins_if_one_config_is_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["sort-digits", "training.steps=10,-1", "--name", "s", "--runs", str(tmp_path)]
    assert main(["sweep", *words]) == 2
    assert "training.steps" in capfd.readouterr().err
    assert not run_names(tmp_path)


def test_a_dry_run_prints_the_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["sweep", "sort-digits", "seed=0,1", "--name", "s", "--runs", str(tmp_path), "--dry-run"]) == 0
    )
    assert capfd.readouterr().out.splitlines()[:2] == [f"{tmp_path}/s-seed=0", "  seed=0"]
    assert not run_names(tmp_path)


def test_jobs_are_submitted_by_the_command_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    commands, calls = tmp_path / "bin", tmp_path / "calls"
    commands.mkdir()
    sbatch = commands / "sbatch"
    sbatch.write_text(f'#!/bin/sh\necho "$2" >> {calls}\necho 7\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    runs = tmp_path / "runs"
    words = ["sort-digits", "seed=0,1", "--name", "s", "--runs", str(runs), "--slurm=--nodes 1 --time 90"]
    assert main(["sweep", *words]) == 0
    scripts = [runs / f"s-seed={seed}.sbatch" for seed in (0, 1)]
    assert calls.read_text().split() == [str(script) for script in scripts]
    assert all("--time=90" in script.read_text() for script in scripts)
    assert capfd.readouterr().out.count("job 7") == 2
    assert "seed=1" in scripts[1].read_text()
