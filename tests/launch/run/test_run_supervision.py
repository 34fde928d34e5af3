"""The two supervisors of a run: actors that are restarted alone, and those whose loss ends the run."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flexmarl.core.errors import ActorDead, ActorFailed, FlexmarlError, TooManyRestarts, is_loss
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.process_node import ProcessNode
from flexmarl.core.supervision.restart_policy import Intensity
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.testing.memory_node import MemoryNode
from flexmarl.core.wire.memory import MemoryNetwork
from flexmarl.launch.run.actor_specs import ActorSpec
from flexmarl.launch.run.run_supervision import RunSupervision

from ...core.echo import Worker
from ...core.supervision.workers import ENVIRONMENT, WORKER, eventually, pid_of
from ...patience import PATIENCE_S

IN_MEMORY = f"{Worker.__module__}:{Worker.__name__}"


class Bench:
    """A supervision with the actors ``ending`` and ``restarted``, the second with one restart."""

    def __init__(self, system: ActorSystem, supervision: RunSupervision, diary: Path) -> None:
        self.system, self.supervision, self.diary = system, supervision, diary

    async def start(self, name: str, *, restarted: bool) -> ActorRef[Worker]:
        ref = await self.supervision.spawn(name, ActorSpec(WORKER, {"diary": str(self.diary)}, restarted))
        return self.system.ref(name, ref.address, Worker)

    async def failure(self) -> FlexmarlError:
        with pytest.raises(FlexmarlError) as at:
            await asyncio.wait_for(self.supervision.wait_failed(), PATIENCE_S)
        return at.value

    def written(self) -> list[str]:
        return self.diary.read_text().splitlines()


@asynccontextmanager
async def bench(private: Path, logs: Path) -> AsyncIterator[Bench]:
    diary = logs / "diary"
    diary.touch()
    async with (
        ActorSystem("tests", private) as system,
        RunSupervision(
            system, ProcessNode(system, private, logs, ENVIRONMENT), Intensity(1, 60)
        ) as supervision,
    ):
        yield Bench(system, supervision, diary)
    assert len(asyncio.all_tasks()) == 1, "a task outlived its system"


async def test_one_is_restarted_alone_until_that_happens_too_often(private: Path, tmp_path: Path) -> None:
    async with bench(private, tmp_path) as made:
        ending = await made.start("ending", restarted=False)
        restarted = await made.start("restarted", restarted=True)
        first = await restarted.api.pid()
        os.kill(first, signal.SIGKILL)
        second = await eventually(lambda: pid_of(restarted), lambda pid: pid not in (0, first))
        # It answers a moment before the supervisor knows that it has started.
        reported: dict[str, object] = {}
        figures = await eventually(
            lambda: made.supervision.process_statistics(reported.__setitem__),
            lambda found: "restarted" in found,
        )
        assert reported.keys() == figures.keys()
        assert set(figures) == {"tests", "ending", "restarted"}
        assert sorted(made.supervision.running) == ["ending", "restarted"]
        os.kill(second, signal.SIGKILL)
        failure = await made.failure()
        assert isinstance(failure, TooManyRestarts) and is_loss(failure)
        assert await ending.api.pid()
    assert made.written().count("start restarted") == 2 and made.written()[-1] == "stop ending"


async def test_another_ends_the_run_at_its_first_loss(private: Path, tmp_path: Path) -> None:
    async with bench(private, tmp_path) as made:
        ending = await made.start("ending", restarted=False)
        await made.start("restarted", restarted=True)
        os.kill(await ending.api.pid(), signal.SIGKILL)
        failure = await made.failure()
        assert isinstance(failure, ActorDead) and failure.actor == "ending"
        assert made.supervision.running == ["restarted"]
    assert made.written()[-1] == "stop restarted"


def test_each_actor_runs_on_its_node(tmp_path: Path) -> None:
    """Before and after a restart; the nodes are closed at the end."""
    directories = [tmp_path / name for name in ("head", "other")]
    diary = tmp_path / "diary"
    for directory in directories:
        directory.mkdir(mode=0o700)
    closed: list[str] = []

    class Node(MemoryNode):
        def close(self) -> None:
            closed.append(self.name)

    async def main() -> list[Path]:
        network = MemoryNetwork()
        head, other = (Node(network, directory, name=directory.name) for directory in directories)
        async with (
            ActorSystem("tests", directories[0], wire=network.wire("tests")) as system,
            RunSupervision(system, head, Intensity(1, 60), placed={"a": other}) as supervision,
        ):
            a, c = await supervision.reserve("a", Worker), await supervision.reserve("c", Worker)
            for name in ("a", "c"):
                await supervision.spawn(
                    name, ActorSpec(IN_MEMORY, {"diary": str(diary)}, restarted=name == "a")
                )
            first = [Path(await worker.api.directory()) for worker in (a, c)]
            other.kill("a")
            while diary.read_text().count("start a") < 2:
                await asyncio.sleep(0.1)
            return [*first, Path(await a.api.directory())]

    head, other = directories
    assert virtual_time.run(main()) == [other, head, other]
    assert sorted(closed) == ["head", "other"]


async def test_a_defect_of_one_that_is_restarted_ends_the_run(private: Path, tmp_path: Path) -> None:
    async with bench(private, tmp_path) as made:
        restarted = await made.start("restarted", restarted=True)
        await restarted.api.crash()
        failure = await made.failure()
        assert isinstance(failure, ActorFailed) and failure.kind == "RuntimeError"


@pytest.mark.parametrize("name", ["ending", "restarted"])
async def test_one_that_is_silent_is_ended(private: Path, tmp_path: Path, name: str) -> None:
    async with bench(private, tmp_path) as made:
        worker = await made.start(name, restarted=name == "restarted")
        pid = await worker.api.pid()
        os.kill(pid, signal.SIGSTOP)
        made.supervision.end_silent(ActorDead(name, "silent"))
        if name == "restarted":
            await eventually(lambda: pid_of(worker), lambda new: new not in (0, pid))
        else:
            assert str(await made.failure()) == "actor ending died: silent"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_all_are_killed_at_once(private: Path, tmp_path: Path) -> None:
    async with bench(private, tmp_path) as made:
        refs = [await made.start(f"worker-{n}", restarted=bool(n)) for n in range(2)]
        pids = [await ref.api.pid() for ref in refs]
        await made.supervision.kill_all()
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    assert "stop" not in " ".join(made.written())


async def test_restarts_are_counted_by_actor_and_waits_are_of_all_processes(
    private: Path, tmp_path: Path
) -> None:
    async with bench(private, tmp_path) as made:
        reports: list[str] = []
        made.supervision.report_restarts(lambda actor, _: reports.append(actor))
        await made.start("ending", restarted=False)
        restarted = await made.start("restarted", restarted=True)
        assert made.supervision.restarts == {}
        first = await restarted.api.pid()
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: pid_of(restarted), lambda pid: pid not in (0, first))
        assert made.supervision.restarts == {"restarted": 1} and reports == ["restarted"]
        waits = await made.supervision.process_waits(PATIENCE_S)
        assert waits.keys() == {"tests", "ending", "restarted"}
        assert waits["tests"].label == "this process"
        assert waits["ending"].waits == {} and waits["ending"].label.startswith("process ")
