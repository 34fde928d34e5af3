"""The watch over a run's progress, with a console and a supervision of the test, in virtual time."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from flexmarl.actors.rollout.block_watch import report_file
from flexmarl.actors.run_events import RunContinued, RunEvent, RunStalled
from flexmarl.core.testing import virtual_time
from flexmarl.core.waits import ProcessWaits, Wait
from flexmarl.launch.config.config_sections import SupervisionConfig
from flexmarl.launch.monitoring.console.run_console import RunConsole
from flexmarl.launch.run.run_supervision import RunSupervision
from flexmarl.launch.run.stalls.watch import StallWatch, blocking_line
from flexmarl.launch.run_folder.run_directory import RunDirectory


class FakeCluster:
    """A console and a supervision. ``counts``: by process. ``reports``: of the waits, asked ``asked`` times."""

    def __init__(self, folder: Path) -> None:
        self.directory = RunDirectory(folder)
        for place in (self.directory.logs, self.directory.checkpoints):
            place.mkdir(parents=True, exist_ok=True)
        self.progresses = {"rollout-0, process 7": 1}
        self.reports: dict[str, ProcessWaits] = {}
        self.asked = 0
        self.answer_s = 0.0
        self.events: list[RunEvent] = []
        self.step = 4
        self.system = self
        config = SupervisionConfig(stall_s=30.0, silence_s=300.0)
        self.watch = StallWatch(cast(RunConsole, self), config, self.directory, lambda: self.step)

    def progress(self) -> int:
        return 0

    async def event(self, event: RunEvent) -> None:
        self.events.append(event)

    async def run_blocking(self, function: Callable[..., Any], *arguments: Any, abandon: bool) -> Any:
        return function(*arguments)

    async def process_waits(self, timeout_s: float) -> dict[str, ProcessWaits]:
        self.asked += 1
        await asyncio.sleep(min(timeout_s, self.answer_s))
        return self.reports

    def causes(self) -> list[str]:
        return [*self.watch.causes]

    def is_still(self) -> bool:
        return self.watch.standstill.is_still

    def stands(self) -> None:
        waits = {"rollout-0": [Wait("1 trajectory (5:q_0) at workflow.py:3", 30.0, "x=600 ends it")]}
        self.reports = {"rollout-0": ProcessWaits("process 7", waits)}


@pytest.fixture
def in_cluster(tmp_path: Path) -> Callable[[Callable[[FakeCluster], Any]], None]:
    def run(body: Callable[[FakeCluster], Any]) -> None:
        async def main() -> None:
            cluster = FakeCluster(tmp_path)
            async with asyncio.TaskGroup() as tasks:  # a watch that fails ends the body too
                tasks.create_task(cluster.watch.run(cast(RunSupervision, cluster)))
                await body(cluster)
                cluster.watch.close()

        virtual_time.run(main())

    return run


CAUSE = "rollout-0: 1 trajectory (5:q_0) at workflow.py:3, for 30 s; x=600 ends it"


def test_causes_are_asked_for_in_a_standstill_alone_and_forgotten_after_it(in_cluster: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        cluster.stands()
        await asyncio.sleep(25.5)
        assert cluster.events == [] and not cluster.causes()
        await asyncio.sleep(10.0)
        assert cluster.causes() == [CAUSE] and cluster.is_still()
        cluster.progresses = {"rollout-0, process 7": 2}
        await asyncio.sleep(2.0)
        assert not cluster.causes() and not cluster.is_still()
        stalled, continued = cluster.events
        assert isinstance(stalled, RunStalled) and (stalled.step, stalled.causes) == (4, (CAUSE,))
        assert 30.0 <= stalled.seconds < 32.0
        assert isinstance(continued, RunContinued) and continued.seconds > stalled.seconds
        assert cluster.asked == 1

    in_cluster(body)


def test_readers_see_the_waits_of_a_run_that_moves_and_ask_the_actors_once_a_second(in_cluster: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        assert await cluster.watch.waits() == (), "the actors are being started"
        cluster.stands()
        await asyncio.sleep(0.5)
        cluster.answer_s = 0.1
        answers = await asyncio.gather(*(cluster.watch.waits() for _ in range(50)))
        assert set(answers) == {(CAUSE,)} and cluster.asked == 1
        cluster.reports = {}
        await asyncio.sleep(1.5)
        assert await cluster.watch.waits() == () and cluster.asked == 2
        assert not cluster.causes() and cluster.events == []

    in_cluster(body)


def test_a_run_that_is_about_to_end_gets_no_notice(in_cluster: Any) -> None:
    """Its actors are being killed while they are asked."""

    async def body(cluster: FakeCluster) -> None:
        cluster.answer_s = 3.0
        while not cluster.asked:
            await asyncio.sleep(0.1)
        cluster.watch.close()
        await asyncio.sleep(10.0)
        assert cluster.events == [] and not cluster.causes()

    in_cluster(body)


def test_a_checkpoint_that_grows_is_progress(in_cluster: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        folder = cluster.directory.checkpoints / "step_000005.partial" / "solver"
        folder.mkdir(parents=True)
        for size in range(1, 60):
            (folder / "model.safetensors").write_bytes(b"x" * size)
            await asyncio.sleep(2.0)
        assert cluster.events == []
        await asyncio.sleep(40.0)
        assert [type(event) for event in cluster.events] == [RunStalled], "it does not grow any more"

    in_cluster(body)


def test_each_look_beats(in_cluster: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        for _ in range(3):
            await cluster.watch.observed.next.wait()
        assert cluster.watch.standstill.idle_s == 2.0

    in_cluster(body)


def test_the_line_that_blocks_a_silent_worker_is_named(in_cluster: Any) -> None:
    async def body(cluster: FakeCluster) -> None:
        cluster.reports = {
            "rollout-0": ProcessWaits("process 7", None),
            "trainer": ProcessWaits("process 8", None),
        }
        line = "workflow.py:3, in workflow: time.sleep(9)"
        report_file(cluster.directory.logs, "rollout-0").write_text(json.dumps({"line": line, "lasts": True}))
        first, second = await cluster.watch.ask(cast(RunSupervision, cluster))
        assert f"the workflow blocks its event loop: {line}" in first
        assert second == "trainer (process 8) does not answer; a fifth of supervision.silence_s=300 ends it"

    in_cluster(body)


def test_a_line_that_blocked_earlier_blocks_nothing_now(tmp_path: Path) -> None:
    report = report_file(tmp_path, "rollout-0")
    assert blocking_line(report) == ""
    report.write_text(json.dumps({"line": "workflow.py:3", "lasts": False}))
    assert blocking_line(report) == ""
    report.write_text(json.dumps({"line": "workflow.py:3", "lasts": True}))
    assert blocking_line(report) == "workflow.py:3"
