"""``flexmarl status``, ``stop`` and ``logs``, on a real run whose engines and trainer are simulated."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from flexmarl.core.wire.curve import Keys
from flexmarl.launch.cli.main import main
from flexmarl.launch.cli.status import words_of
from flexmarl.launch.config.config_reading import resolve, to_yaml
from flexmarl.launch.run.run_control import ProcessStatus, RunStatus
from flexmarl.launch.run_folder.run_directory import RunDirectory

from ..conftest import SIMULATED, TINY, Launcher

Flexmarl = Callable[..., tuple[int, str, str]]


@pytest.fixture
def flexmarl(capsys: pytest.CaptureFixture[str]) -> Flexmarl:
    """Status, standard output, standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        return (main(list(words)), *capsys.readouterr())

    return run


def test_a_run_is_shown_and_stopped_with_a_checkpoint(launcher: Launcher, flexmarl: Flexmarl) -> None:
    run = launcher.train("endless", *SIMULATED, "training.steps=100000")
    run.wait_for_step(2)
    folder = str(run.directory)
    assert (run.directory / "address").stat().st_mode & 0o777 == 0o600
    status, out, _ = flexmarl("status", folder, "--json")
    shown = json.loads(out)
    assert status == 0 and shown["state"] == "running" and 2 <= shown["step"] < shown["steps"] == 100000
    assert shown["instances"] == {"solver": 1}
    pids = {name: process["pid"] for name, process in shown["processes"].items()}
    assert pids == {"launcher": run.process.pid, **{name: one.pid for name, one in run.actors().items()}}
    assert all(process["rss_mib"] > 0 for process in shown["processes"].values())
    assert "policies   solver x1" in flexmarl("status", folder)[1]
    assert flexmarl("stop", folder) == (
        0,
        f"{folder} stops after the steps under way, with a checkpoint\n",
        "",
    )
    assert run.wait() == 130
    assert run.events[-1]["stopped"] and Path(run.events[-1]["checkpoint"]).exists()
    assert flexmarl("status", folder)[1].startswith(f"{folder}: stopped, step ")
    status, _, err = flexmarl("stop", folder)
    assert status == 2 and "endless is not running" in err
    status, _, err = flexmarl("logs", folder, "nothing")
    assert status == 2 and "has no log of 'nothing'; there are: fork-server, launcher, " in err
    assert flexmarl("logs", folder, "store")[:2] == (0, (run.directory / "logs" / "store.log").read_text())


def test_now_stops_it_though_a_step_waits(launcher: Launcher, flexmarl: Flexmarl) -> None:
    hold = launcher.runs / "hold"
    hold.write_text("2")
    run = launcher.train("held", *SIMULATED, f"data.hold={hold}")
    run.wait_for_step(1)
    assert flexmarl("stop", str(run.directory))[0] == 0
    assert json.loads(flexmarl("stop", str(run.directory), "--now", "--json")[1]) == {"checkpoint": False}
    assert run.wait() == 130
    assert run.events[-1]["error"] == "stopped by flexmarl stop"
    assert flexmarl("status", str(run.directory))[1].endswith("\nstopped by flexmarl stop\n")
    run.assert_nothing_is_left()


def test_other_folders_are_refused_by_name(tmp_path: Path, flexmarl: Flexmarl) -> None:
    for command in ("status", "stop", "logs"):
        status, _, err = flexmarl(command, str(tmp_path / "none"))
        assert status == 2 and "none is not a run directory" in err
    RunDirectory.create(tmp_path / "new", to_yaml(resolve(str(TINY), [])))
    assert "not started" in flexmarl("status", str(tmp_path / "new"))[1]
    (tmp_path / "new" / "address").write_text("ipc:///nowhere")  # a killed run leaves it behind
    assert "new is not running" in flexmarl("stop", str(tmp_path / "new"))[2]


def test_a_run_over_tcp_is_asked_with_its_keys(launcher: Launcher, flexmarl: Flexmarl) -> None:
    run = launcher.train("tcp", *SIMULATED, "training.steps=100000", "network.listen=127.0.0.1")
    run.wait_for_step(2)
    folder, address = str(run.directory), run.directory / "address"
    assert address.stat().st_mode & 0o777 == 0o600 and address.read_text().startswith("tcp://127.0.0.1:")
    listening = {found.laddr.port for found in psutil.Process(run.process.pid).net_connections("tcp4")}
    assert len(listening) >= len(run.actors()), "the launcher listens for its actors"
    assert json.loads(flexmarl("status", folder, "--json")[1])["state"] == "running"
    assert "samples" in flexmarl("store", folder)[1]
    stranger = address.read_text().splitlines()[0]
    content = address.read_text()
    address.write_text(f"{stranger}\n{Keys.make().to_json()}")
    assert "does not answer" in flexmarl("status", folder)[2]
    address.write_text(content)
    assert flexmarl("stop", folder)[0] == 0 and run.wait() == 130
    assert not address.exists()
    run.assert_nothing_is_left()
    run.assert_logs_are_clean()


def test_a_run_that_stands_still_is_shown_with_its_causes() -> None:
    moving = RunStatus(3, 9, "training", 60.0, {"solver": 1}, {})
    assert words_of(Path("runs/first"), moving).splitlines() == [
        "runs/first: running for 60 s, step 3/9",
        "phase      training",
        "policies   solver x1",
    ]
    placed = replace(moving, processes={"solver-0": ProcessStatus(7, 12.0, "gpu1")})
    (line,) = words_of(Path("runs/first"), placed).splitlines()[3:]
    assert line.split() == ["solver-0", "pid", "7", "12.0", "MiB", "gpu1"]
    still = replace(
        moving, idle_s=45.0, causes=("store: room for samples, for 45 s", "trainer does not answer")
    )
    assert words_of(Path("runs/first"), still).splitlines()[3:] == [
        "nothing has ended for 45 s; the run waits for",
        "  store: room for samples, for 45 s",
        "  trainer does not answer",
    ]
