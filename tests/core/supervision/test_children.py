"""An actor on a node whose answers are late: what the actor reports itself arrives before them."""

import asyncio
from pathlib import Path

import pytest

from flexmarl.core.errors import ActorFailed
from flexmarl.core.supervision.node import Launch
from flexmarl.core.supervision.restart_policy import Intensity, Strategy
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.testing.memory_node import MemoryNode, MemoryProcess
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
            Supervisor(
                system, node, strategy=Strategy.ONE_FOR_ONE, intensity=Intensity(1, 60.0)
            ) as supervisor,
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
