"""The files and the screen of a run."""

import errno
import json
from collections.abc import Awaitable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as Terminal

from flexmarl.actors.names import AgentName, PolicyName, Step
from flexmarl.actors.run_events import (
    ActorSilent,
    CheckpointSaving,
    ColumnsAwaited,
    Evaluated,
    RunContinued,
    RunEvent,
    RunStalled,
    StoreBlocked,
)
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.core.delivery.mailbox import MailboxStatistics
from flexmarl.core.supervision.process_statistics import PeerTotals, ProcessStatistics
from flexmarl.core.system import ActorSystem
from flexmarl.launch.hosts.nvidia import DeviceUse
from flexmarl.launch.monitoring.console.progress import Progress
from flexmarl.launch.monitoring.console.run_console import RunConsole
from flexmarl.launch.run_folder.line_writer import LineWriter
from flexmarl.launch.run_folder.run_directory import RunDirectory

AGENTS = {AgentName("a"): PolicyName("a")}


class Watched:
    """A console with a string as its screen."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory.create(folder / "run", "seed: 0\n")
        self.screen = StringIO()
        progress = Progress(
            Terminal(file=self.screen), run_name="run", mode="strict", total_steps=9, agents=AGENTS
        )
        self.progress = progress.__enter__()
        self.console = RunConsole(self.run, self.progress)

    def text(self) -> str:
        self.progress.__exit__(None, None, None)
        return " ".join(self.screen.getvalue().split())

    def lines(self, path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
async def watched(system: ActorSystem, tmp_path: Path) -> Watched:
    watched = Watched(tmp_path)
    await system.add(watched.console, "console")
    return watched


def metrics(step: int, tokens: int) -> StepMetrics:
    return StepMetrics(Step(step), 1.0 * step, 1.0, 0.5, tokens, 1.0 * tokens)


async def test_a_step_that_generates_nothing_is_said_once(watched: Watched) -> None:
    for step in (1, 2, 3):
        await watched.console.step(metrics(step, tokens=0))
    assert watched.text().count("no agent generated anything") == 1
    assert [line["step"] for line in watched.lines(watched.run.metrics)] == [1, 2, 3]


async def test_statistics_of_processes_and_actors_are_in_the_metrics(watched: Watched) -> None:
    mailboxes = MailboxStatistics(waiting=1, running=2, served=30, failed=0, cancelled=0)
    peers = PeerTotals(open_calls=4, sent_requests=50)
    actors = {"store": {"rows_ready": 5.0, "share": 0.123456789}}
    store = ProcessStatistics(17, 0.5, 100.0, 3.0, mailboxes, peers, actors)
    watched.console.refresh({"store": store})
    await watched.console.step(metrics(1, tokens=3))
    (line,) = watched.lines(watched.run.metrics)
    of_store = {key.removesuffix("/store"): value for key, value in line.items() if key.endswith("/store")}
    assert of_store == {
        "loop_lag_ms": 0.5, "rss_mib": 100.0, "cpu_s": 3.0, "mailbox_waiting": 1, "mailbox_running": 2,
        "mailbox_served": 30, "open_calls": 4, "sent_requests": 50, "actor.rows_ready": 5, "actor.share": 0.123457,
    }  # fmt: skip


async def test_the_load_of_devices_is_of_the_time_since_the_step_before(watched: Watched) -> None:
    for used, busy in ((10 << 20, 20), (30 << 20, 90), (20 << 20, None)):
        watched.console.devices_read({"GPU-1": DeviceUse(used, busy)})
    await watched.console.step(metrics(1, tokens=3))
    await watched.console.step(metrics(2, tokens=3))
    first, second = watched.lines(watched.run.metrics)
    assert (first["device_busy_percent/GPU-1"], first["device_used_mib/GPU-1"]) == (55.0, 30.0)
    assert second["device_used_mib/GPU-1"] == 20.0 and "device_busy_percent/GPU-1" not in second


async def test_an_evaluation_shows_all_its_metrics(watched: Watched) -> None:
    await watched.console.event(Evaluated(Step(0), 3.0, {"accuracy": 0.25}))
    await watched.console.event(Evaluated(Step(2), 3.0, {"accuracy": 0.5, "pass@4": 0.75}))
    text = watched.text()
    assert "before training: accuracy 0.250" in text and "after step 2: accuracy 0.500, pass@4 0.750" in text
    event, _ = watched.lines(watched.run.events)
    assert (event["event"], event["step"], event["accuracy"]) == ("evaluated", 0, 0.25)


async def test_a_step_that_can_not_be_written_ends_no_run_and_is_named(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "seed: 0\n")
    run.metrics = Path("/dev/full")
    screen = StringIO()
    progress = Progress(Terminal(file=screen), run_name="run", mode="strict", total_steps=9, agents=AGENTS)
    console = RunConsole(run, progress)
    with progress:
        await console.step(metrics(1, tokens=1))
        await console.on_stop()
    text = screen.getvalue().replace("\n", " ")
    assert "can't be written (No space left on device)" in text and "lacks step 1" in text
    assert console.ended_with.cancelled()


@pytest.mark.parametrize(("actor", "hint"), [("rollout-0", True), ("trainer", False)])
async def test_a_silent_actor_is_named(watched: Watched, actor: str, hint: bool) -> None:
    await watched.console.event(ActorSilent(actor, 12.0))
    text = watched.text()
    assert f"{actor} has not answered for 12 s" in text
    assert ("does the workflow block its event loop?" in text) == hint


async def test_a_wait_for_an_external_writer_is_shown(watched: Watched) -> None:
    await watched.console.event(ColumnsAwaited(AgentName("solver"), 3, "judged"))
    assert "3 samples of solver wait for judged, to be written by an external writer" in watched.text()


async def test_a_full_disk_is_shown_on_the_screen_though_not_in_the_file(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LineWriter, "_append", no_room)
    await watched.console.event(StoreBlocked("no room for 9 bytes"))
    assert "the store waits for space: no room for 9 bytes" in watched.text()


async def test_a_standstill_is_shown_with_all_its_causes_and_its_end(watched: Watched) -> None:
    causes = (
        "rollout-0: 1 trajectory (4:q_0) at workflow.py:3, for 31 s; x=600 ends it",
        "store: room for samples",
    )
    await watched.console.event(RunStalled(Step(3), 31.0, causes))
    await watched.console.event(RunContinued(Step(3), 75.0))
    text = watched.text()
    assert "nothing has ended for 31 s, step 4 waits for:" in text
    assert all(cause in text for cause in causes)
    assert text.index(causes[0]) < text.index(causes[1]) < text.index("the run continues after 75 s")
    stalled, continued = watched.lines(watched.run.events)
    assert (stalled["event"], stalled["step"], stalled["seconds"]) == ("run_stalled", 3, 31.0)
    assert stalled["causes"] == [*causes] and continued["event"] == "run_continued"


async def test_steps_ended_work_and_parts_of_phases_are_progress_and_warnings_are_none(
    watched: Watched,
) -> None:
    console = watched.console
    seen = [console.progress()]

    async def after(call: Awaitable[None]) -> bool:
        await call
        seen.append(console.progress())
        return seen[-1] > seen[-2]

    assert await after(console.step(metrics(1, tokens=3)))
    assert await after(console.phase("loading", 0, 3))
    assert not await after(console.phase("loading", 0, 3)), "it is repeated"
    assert await after(console.phase("loading", 1, 3))
    assert not await after(console.phase("evaluating 3 queries", None, None)), "it begins"
    assert await after(console.event(Evaluated(Step(0), 3.0, {"accuracy": 0.25})))
    assert await after(console.event(CheckpointSaving(Step(1))))
    warnings: list[RunEvent] = [
        ActorSilent("trainer", 12.0),
        StoreBlocked("full"),
        RunStalled(Step(1), 31.0, ()),
    ]
    for event in warnings:
        assert not await after(console.event(event))


async def test_the_progress_of_each_process_is_kept_by_its_id(watched: Watched) -> None:
    """After a restart the process has another id, so its smaller number counts too."""
    for pid, progress in ((17, 5), (18, 2), (18, 3)):
        watched.console.process_heard("store", ProcessStatistics(pid, 0.5, 100.0, 3.0, progress=progress))
    assert watched.console.progresses == {"store, process 17": 5, "store, process 18": 3}
