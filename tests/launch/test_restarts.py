"""``--restarts`` and the loss of an actor in any way; stops and continuations of whole processes."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flexmarl.actors.errors import SamplesLost
from flexmarl.actors.messages import LeasedBatch
from flexmarl.actors.store import lost_bytes
from flexmarl.actors.store.policy_queue import PolicyQueue
from flexmarl.actors.store.writers import Writers

from ..patience import PATIENCE_S
from .conftest import SIMULATED, Launched, Launcher, wait_until
from .in_process import Finished, RunsHere
from .run_files import trained_by_version

# A call notices a silent actor within 4 s: more than a busy machine keeps a process waiting.
SHORT_HEARTBEATS = ("supervision={heartbeat_s: 1.0, missed_heartbeats: 4, silence_s: 4.0}",)
LONGER_THAN_THE_HEARTBEATS_S = 6.0
STEPS = 4
SMALL = (
    *SIMULATED,
    f"training={{steps: {STEPS}, queries_per_step: 1, trajectories_per_query: 4, micro_batch: 4}}",
    "checkpoint.every=1",
)


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """The file that holds back the trajectories of the second step and of later ones."""
    hold = tmp_path / "hold"
    hold.write_text("1")
    return hold


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.fixture
def held(launcher: Launcher, tmp_path: Path, hold: Path, trace: Path) -> Iterator[Launched]:
    """A run that restarts once, after its first step."""
    data = (f"data.hold={hold}", f"data.trace={trace}")
    run = launcher.train(f"held-{tmp_path.name}", *SMALL, *SHORT_HEARTBEATS, *data, "--restarts", "1")
    run.wait_for_output("checkpoints/step_000001")
    yield run
    run.close()


def assert_every_sample_is_trained_once(run: Launched | Finished, steps: int = STEPS) -> None:
    assert [line["step"] for line in run.metrics] == [*range(1, steps + 1)]
    assert {version: Counter(ids) for version, ids in trained_by_version(run.directory).items()} == {
        str(step - 1): Counter(f"{step}:q{step - 1:03d}_0_{n}" for n in range(4))
        for step in range(1, steps + 1)
    }


def continued(run: Launched) -> str:
    """The error of the life before, after which the run has come to its end."""
    assert run.wait() == 0, run.text
    assert "continuing after step 1" in run.text
    assert_every_sample_is_trained_once(run)
    run.assert_nothing_is_left()
    ended = [event for event in run.events if event["event"] == "run_ended"]
    assert len(ended) == 2
    return str(ended[0]["error"])


@pytest.mark.parametrize("actor", ["router", "trainer"])
def test_one_that_is_stopped_for_longer_than_the_heartbeats(held: Launched, hold: Path, actor: str) -> None:
    """Another actor fails because of it, or only the launcher notices."""
    frozen = held.actors()[actor]
    frozen.suspend()
    hold.unlink()
    error = continued(held)
    assert "silent for over" in error or "has not answered for" in error, error
    assert not frozen.is_running(), "it can't be continued later"


def test_one_that_is_continued_after_it_was_given_up_harms_nothing(held: Launched, hold: Path) -> None:
    frozen = held.actors()["trainer"]
    frozen.suspend()
    hold.unlink()
    wait_until(lambda: "silent for over" in _logs(held), "the loss noticed")
    with contextlib.suppress(psutil.NoSuchProcess):  # unless it has been ended already
        frozen.resume()
    assert "silent for over" in continued(held)


def _logs(run: Launched) -> str:
    return "".join(path.read_text() for path in (run.directory / "logs").iterdir())


def test_one_that_exits(launcher: Launcher, tmp_path: Path) -> None:
    """The workflow ends its process once, in the second step."""
    data = ("data.faults=[null, exit]", f"data.once={tmp_path / 'once'}")
    run = launcher.train(f"exit-{tmp_path.name}", *SMALL, "training.steps=2", *data)
    assert run.wait() == 0, run.text
    assert "rollout-0 is restarted: actor rollout-0 died" in run.text and "exit status 3" in run.text
    assert "continuing" not in run.text, "only the worker was restarted"
    assert_every_sample_is_trained_once(run, 2)


def test_a_failure_for_another_reason_is_not_repeated(runs_here: RunsHere) -> None:
    faults = ("data.faults=[raise]", "data.faulty=4", "--restarts", "3")
    run = runs_here.train("defect", *SMALL, *faults)
    assert run.status == 1
    assert run.text.count("The run failed") == 1 and "continuing" not in run.text


@pytest.mark.parametrize(("losses", "status"), [(1, 0), (2, 1)])
def test_after_the_loss_of_samples_of_part_trained_groups_a_run_continues_by_itself(
    runs_here: RunsHere, monkeypatch: pytest.MonkeyPatch, losses: int, status: int
) -> None:
    """Without ``--restarts``: the samples that are gone were on a host that is given up. Not for ever: this run has no
    other host."""
    left = losses

    def lost(writers: Writers, queue: PolicyQueue, batch: LeasedBatch) -> None:
        """The first time in step 2, the second time before any newer checkpoint."""
        nonlocal left
        if left and (left < losses or 1 in batch.columns["policy_version"]):
            left -= 1
            raise SamplesLost("the memory of the host of rollout-0 is lost")

    monkeypatch.setattr(lost_bytes, "check", lost)
    run = runs_here.train(f"samples-lost-{losses}", *SMALL)
    assert run.status == status, run.text
    ends = [event.get("error") for event in run.events if event["event"] == "run_ended"]
    assert len(ends) == 2 and all("the memory of the host" in str(end) for end in ends[:losses])
    # The checkpoint of step 1 may not have been complete yet.
    assert "continuing after step 1" in run.text or "no checkpoint yet: starting again" in run.text
    if not status:
        assert_every_sample_is_trained_once(run)


def test_a_run_that_is_being_stopped_is_not_restarted(held: Launched) -> None:
    held.signal(signal.SIGTERM)
    held.wait_for_output("once more stops at once")
    held.actors()["trainer"].kill()
    assert held.wait() == 130
    assert "stopped by SIGTERM, before its last checkpoint was saved: actor trainer died" in held.text
    assert "continuing" not in held.text
    held.assert_nothing_is_left()


# --------------------------------------------------------------------------- the launcher is stopped


@pytest.mark.parametrize(("number", "of_the_group"), [(signal.SIGSTOP, False), (signal.SIGTSTP, True)])
def test_a_launcher_that_is_stopped_and_continued_ends_nothing(
    held: Launched, hold: Path, trace: Path, number: signal.Signals, of_the_group: bool
) -> None:
    """The actors work on up to their next checkpoint, which the launcher logs first."""
    send = os.killpg if of_the_group else os.kill
    send(held.process.pid, number)
    hold.unlink()
    wait_until(lambda: "q001" in trace.read_text(), "the second step, while the launcher is stopped")
    time.sleep(LONGER_THAN_THE_HEARTBEATS_S)  # the time in which it could be taken for dead
    send(held.process.pid, signal.SIGCONT)
    assert held.wait() == 0, held.text
    assert "continuing" not in held.text
    assert_every_sample_is_trained_once(held)
    assert "actor_silent" not in [event["event"] for event in held.events]
    held.assert_nothing_is_left()
    held.assert_logs_are_clean()


def test_all_processes_may_be_stopped_at_once(held: Launched, hold: Path) -> None:
    """As a frozen container."""
    everything = [held.process.pid, *(actor.pid for actor in held.actors().values())]
    hold.unlink()
    for pid in everything:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(LONGER_THAN_THE_HEARTBEATS_S)
    for pid in everything:
        os.kill(pid, signal.SIGCONT)
    assert held.wait() == 0, held.text
    assert "continuing" not in held.text
    assert_every_sample_is_trained_once(held)
    assert "actor_silent" not in [event["event"] for event in held.events]


def test_a_launcher_that_is_stopped_while_its_actors_start(
    launcher: Launcher, tmp_path: Path, hold: Path
) -> None:
    run = launcher.train(f"early-{tmp_path.name}", *SMALL, *SHORT_HEARTBEATS, f"data.hold={hold}")
    run.wait_for_output("starting actors")
    wait_until(lambda: len(run.actors()) == 6, "six processes")
    run.signal(signal.SIGSTOP)
    time.sleep(2 * LONGER_THAN_THE_HEARTBEATS_S)  # the time in which actors would give up
    run.signal(signal.SIGCONT)
    hold.unlink()
    assert run.wait() == 0, run.text
    assert_every_sample_is_trained_once(run)
    run.assert_logs_are_clean()


# --------------------------------------------------------------------------- SIGHUP


def test_a_hangup_stops_as_sigterm_does_also_if_it_comes_twice(held: Launched, hold: Path) -> None:
    held.signal(signal.SIGHUP)
    held.wait_for_output("SIGHUP: stopping after the steps under way")
    held.signal(signal.SIGHUP)  # from the shell, and from the kernel
    hold.unlink()
    assert held.wait() == 130, held.text
    assert "Stopped after step 2. Continue with" in held.text
    assert (held.directory / "checkpoints" / "step_000002").exists()
    held.assert_nothing_is_left()
    held.assert_logs_are_clean()


class Terminal:
    """A terminal that a run is shown on, until it is closed."""

    def __init__(self) -> None:
        self._controller, self.device = pty.openpty()
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while not self._closing.is_set():
            if select.select([self._controller], [], [], 0.05)[0]:
                os.read(self._controller, 4096)

    def close(self) -> None:
        """As when its window is closed, or the connection to it is lost."""
        self._closing.set()
        self._reader.join()
        os.close(self._controller)


def test_a_terminal_that_is_closed_stops_the_run_with_a_checkpoint(
    launcher: Launcher, tmp_path: Path, hold: Path
) -> None:
    terminal = Terminal()
    # So many steps that it can't come to its end before it has noticed.
    settings = (*SMALL, "training.steps=500", f"data.hold={hold}")
    run = launcher.train(f"window-{tmp_path.name}", *settings, terminal=terminal.device)
    os.close(terminal.device)
    run.wait_for_step(1)
    terminal.close()
    hold.unlink()
    assert run.wait() == 130
    ended = run.events[-1]
    assert ended["event"] == "run_ended" and ended["stopped"] and ended["step"] >= 2
    assert (run.directory / "checkpoints" / f"step_{ended['step']:06d}").exists()
    run.assert_nothing_is_left()


def test_a_hangup_is_ignored_under_nohup(tmp_path: Path) -> None:
    """The handlers of a run, in a process of their own that ignores SIGHUP from the start, as ``nohup`` has it."""
    code = (
        "import asyncio, os, signal\n"
        "from types import SimpleNamespace\n"
        "from flexmarl.launch.cli.signals import StopSignals\n"
        "async def main():\n"
        "    asked = asyncio.get_running_loop().create_future()\n"
        "    run = SimpleNamespace(request_stop=asked.set_result)\n"
        "    with StopSignals(run, SimpleNamespace(warn=print)):\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        print(await asked)\n"
        "asyncio.run(main())\n"
    )
    sources = str(Path(__file__).parents[2] / "scripts" / "src")
    found = subprocess.run(
        ["nohup", sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": sources},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert found.stdout == "SIGTERM\n"
