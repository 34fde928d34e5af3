"""Runs as jobs of a real Slurm with two nodes, which are both this host."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from flexmarl.launch.hosts import env

from ...conftest import SIMULATED, SOURCES, TINY, json_lines, wait_until
from .two_nodes import missing, two_nodes

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no Slurm: {missing()}")


class Slurm:
    """``runs``: the folder of all runs."""

    def __init__(self, config: Path, runs: Path) -> None:
        self.runs = runs
        # Every process with this folder in its environment and every file in it belong to the jobs.
        self.runtime_base = Path(tempfile.mkdtemp(prefix="r", dir=env.runtime_base()))
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(config),
            "PYTHONPATH": str(SOURCES),
            "FLEXMARL_RUNTIME_BASE": str(self.runtime_base),
        }

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, name: str, *arguments: str) -> str:
        """The number of the job."""
        command = [sys.executable, "-P", "-m", "flexmarl.launch.cli.main", "slurm", str(TINY), *SIMULATED]
        command += ["network.listen=127.0.0.1", "--runs", str(self.runs), "--name", name, "--nodes", "2"]
        return self.run(*command, *arguments).split()[1].rstrip(":")

    def job(self, number: str) -> dict[str, str]:
        words = self.run("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, number: str, state: str) -> dict[str, str]:
        wait_until(lambda: self.job(number)["JobState"] == state, f"job {state}: {self.job(number)}")
        return self.job(number)

    def wait_for_step(self, name: str, number: str, step: int) -> None:
        def there() -> bool:
            state = self.job(number)["JobState"]
            assert state in ("PENDING", "RUNNING", "SIGNALING", "COMPLETING"), f"{state}\n{self.output(name)}"
            return any(metric["step"] >= step for metric in self.metrics(name))

        wait_until(there, f"step {step}")

    def output(self, name: str) -> str:
        return (self.runs / f"{name}.out").read_text(errors="replace")

    def metrics(self, name: str) -> list[dict[str, int]]:
        return json_lines(self.runs / name / "metrics.jsonl")

    def events(self, name: str, kind: str) -> list[dict[str, object]]:
        return [event for event in json_lines(self.runs / name / "events.jsonl") if event["event"] == kind]

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                own = process.environ().get("FLEXMARL_RUNTIME_BASE") == str(self.runtime_base)
                if own and process.status() != psutil.STATUS_ZOMBIE and process.name() != "slurmstepd":
                    found.append(process)
        return found

    def node(self) -> psutil.Process:
        """The process of ``flexmarl node``."""
        (found,) = [
            process
            for process in self.processes()
            if "--join" in process.cmdline() and "-P" in process.cmdline() and process.name() != "srun"
        ]
        return found

    def assert_nothing_is_left(self) -> None:
        wait_until(lambda: not self.processes(), "all processes gone")
        wait_until(lambda: not list(self.runtime_base.iterdir()), "all files of the runtime gone")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = Path(tempfile.mkdtemp(prefix="s"))
    try:
        with two_nodes(folder) as config:
            made = Slurm(config, tmp_path_factory.mktemp("runs"))
            try:
                yield made
            finally:
                made.run("scancel", "--user=root")
                wait_until(lambda: not made.processes(), "all processes gone")
                shutil.rmtree(made.runtime_base)
    finally:
        shutil.rmtree(folder)


def test_a_job_is_completed_although_a_node_was_killed(slurm: Slurm, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.write_text("4")  # the third step waits for the kill
    job = slurm.submit("killed", "agent_defaults.instances=3", "training.steps=150", f"data.hold={hold}")
    slurm.wait_for_step("killed", job, 2)
    assert "node n2 has joined the run" in slurm.output("killed")
    slurm.node().kill()
    hold.unlink()
    ended = slurm.wait_for_state(job, "COMPLETED")
    assert ended["ExitCode"] == "0:0"
    (lost,) = slurm.events("killed", "node_lost")
    assert lost["node"] == "n2"
    assert [metric["step"] for metric in slurm.metrics("killed")] == list(range(1, 151))
    slurm.assert_nothing_is_left()


def test_head_and_node_run_in_the_image_that_is_named(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, log = tmp_path / "flexmarl.sif", tmp_path / "log"
    stand_in = tmp_path / "apptainer"  # no machine of CI has the real one
    program = f"{sys.executable} -P -m flexmarl.launch.cli.main"
    stand_in.write_text(f'#!/bin/sh\necho "$1 $2 $3 $4" >> {log}\nshift 3\nexec {program} "$@"\n')
    stand_in.chmod(0o755)
    monkeypatch.setitem(slurm.environment, "PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = slurm.submit("image", "training.steps=3", "--apptainer", str(image))
    assert slurm.wait_for_state(job, "COMPLETED")["ExitCode"] == "0:0"
    assert "node n2 has joined the run" in slurm.output("image")
    assert sorted(log.read_text().splitlines()) == [
        f"exec {image} flexmarl {name}" for name in ("node", "train")
    ]
    slurm.assert_nothing_is_left()


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_scancel_saves_a_checkpoint_and_nothing_stays(slurm: Slurm, nodes: str) -> None:
    name = f"cancelled-{nodes}"
    endless = ("training.steps=1000000", "checkpoint.every=1000000", "agent_defaults.instances=3")
    job = slurm.submit(name, *endless, "--nodes", nodes)
    slurm.wait_for_step(name, job, 2)
    slurm.run("scancel", job)
    slurm.wait_for_state(job, "CANCELLED")
    slurm.assert_nothing_is_left()
    assert "SIGTERM: stopping after the steps under way" in slurm.output(name)
    (ended,) = slurm.events(name, "run_ended")
    (saved,) = slurm.events(name, "checkpoint_saved")
    assert ended["stopped"] and ended["step"] == saved["step"], slurm.output(name)


def test_a_job_whose_time_is_up_is_requeued_and_continues_its_run(slurm: Slurm) -> None:
    limit = ("--time", "2", "--warn-s", "70")
    job = slurm.submit("short", "training.steps=1000000", "checkpoint.every=1000000", *limit)
    slurm.wait_for_step("short", job, 2)
    wait_until(lambda: len(slurm.events("short", "run_resumed")) == 1, f"the job again\n{slurm.job(job)}")
    (resumed,) = slurm.events("short", "run_resumed")
    assert slurm.job(job)["Restarts"] == "1"
    assert isinstance(resumed["step"], int) and resumed["step"] >= 2
    slurm.run("scancel", "--signal=KILL", job)
    slurm.assert_nothing_is_left()
