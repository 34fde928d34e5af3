"""An actor on a node whose answers are late: what the actor reports itself arrives before them."""

import asyncio
from pathlib import Path

import pytest

from flexmarl.core.errors import ActorFailed
from flexmarl.core.supervision.node import Launch
from flexmarl.core.supervision.restart_policy import Intensity
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.testing.memory_node import MemoryNode, MemoryProcess
from flexmarl.core.waits import Wait
from flexmarl.core.wire.memory import MemoryNetwork

from ..echo import RefusesToStart, Worker


class LateNode(MemoryNode):
    """Answers 1 s after it has started an actor, as over a slow link."""

    async def launch(self, launch: Launch) -> MemoryProcess:
        made = await super().launch(launch)
        await asyncio.sleep(1.0)
        return made


def test_an_actor_that_is_ready_before_its_node_has_answered_is_ready(private: Path) -> None:
    """At its first start and after a restart."""
    diary = private / "diary"
    diary.touch()

    async def main() -> list[float]:
        network, clock = MemoryNetwork(), asyncio.get_running_loop().time
        node = LateNode(network, private)
        async with (
            ActorSystem("tests", private, wire=network.wire("tests")) as system,
            Supervisor(system, node, intensity=Intensity(1, 60.0)) as supervisor,
        ):
            await supervisor.spawn(Worker, "worker", {"diary": str(diary)})
            started_s = clock()
            node.kill("worker")
            while supervisor.running:
                await asyncio.sleep(0.01)
            while not supervisor.running:
                await asyncio.sleep(0.01)
            return [started_s, clock() - started_s]

    assert all(seconds < 2.0 for seconds in virtual_time.run(main()))


def test_the_error_of_an_actor_that_fails_before_its_node_has_answered_is_known(private: Path) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        node = LateNode(network, private)
        async with (
            ActorSystem("tests", private, wire=network.wire("tests")) as system,
            Supervisor(system, node) as supervisor,
        ):
            with pytest.raises(ActorFailed, match="nothing to serve"):
                await supervisor.spawn(RefusesToStart, "worker")

    virtual_time.run(main())


class Loading(Worker):
    """Takes 3 s to start."""

    async def on_start(self) -> None:
        await asyncio.sleep(3.0)
        await super().on_start()


@pytest.mark.parametrize("after_s", [0.5, 2.0])
@pytest.mark.parametrize("older", [0, 1])
def test_an_incarnation_that_is_lost_before_its_start_is_known_is_replaced(
    private: Path, after_s: float, older: int
) -> None:
    """Before its node has answered, and before its own report is here. An older one is not it."""

    async def main() -> int:
        network = MemoryNetwork()
        node = LateNode(network, private)
        async with (
            ActorSystem("tests", private, wire=network.wire("tests")) as system,
            Supervisor(system, node, intensity=Intensity(2, 60.0)) as supervisor,
        ):
            (private / "diary").touch()
            worker = await supervisor.spawn(Loading, "worker", {"diary": str(private / "diary")})
            first: int = await worker.api.incarnation()
            node.kill("worker")
            while supervisor.running:
                await asyncio.sleep(0.01)
            await asyncio.sleep(after_s)
            await supervisor.ref.api.lost("worker", first + 1 - older, "silent")
            while not supervisor.running:
                await asyncio.sleep(0.01)
            incarnation: int = await worker.api.incarnation()
            return incarnation - first

    assert virtual_time.run(main()) == 2 - older


def test_the_waits_of_a_supervisor_are_the_starts_of_its_actors(private: Path) -> None:
    """First for a process, from the node, then for the actor's start; each time from the beginning of that life."""

    async def main() -> list[list[Wait]]:
        network = MemoryNetwork()
        node = LateNode(network, private)
        async with (
            ActorSystem("tests", private, wire=network.wire("tests")) as system,
            Supervisor(system, node, intensity=Intensity(1, 60.0)) as supervisor,
        ):
            diary = private / "diary"
            diary.touch()
            waits = [supervisor.waits()]
            start = asyncio.create_task(supervisor.spawn(Loading, "worker", {"diary": str(diary)}))
            await asyncio.sleep(0.5)
            waits.append(supervisor.waits())
            await asyncio.sleep(1.5)
            waits.append(supervisor.waits())
            await start
            waits.append(supervisor.waits())
            node.kill("worker")
            while not supervisor.waits():
                await asyncio.sleep(0.01)
            waits.append(supervisor.waits())
            while not supervisor.running:
                await asyncio.sleep(0.01)
            return [*waits, supervisor.waits()]

    before, process, loading, ready, again, ready_again = virtual_time.run(main())
    assert before == ready == ready_again == []
    ((process_wait,), (loading_wait,), (again_wait,)) = process, loading, again
    assert process_wait.text.startswith("a process for worker, from node ") and process_wait.seconds == 0.5
    assert loading_wait.text.startswith("the start of worker (") and 1.9 < loading_wait.seconds < 2.1
    assert loading_wait.actor == "worker", "the actor itself may say more"
    assert again_wait.text == process_wait.text and again_wait.seconds < 1.0
