"""A node in memory, beyond the contract of all nodes (``contracts/test_node.py``)."""

import asyncio
from pathlib import Path

import pytest

from flexmarl.core.errors import ActorDead, FlexmarlError
from flexmarl.core.protocol.session import Settings
from flexmarl.core.supervision.restart_policy import Intensity
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.testing.memory_node import MemoryNode
from flexmarl.core.wire.memory import MemoryNetwork

from ..echo import Worker

SETTINGS = Settings(heartbeat_s=1.0)


def test_a_loss_of_power_ends_all_actors_and_their_peers_notice_only_the_silence(private: Path) -> None:
    diary = private / "diary"
    diary.touch()

    async def main() -> None:
        network = MemoryNetwork(seed=1)
        node = MemoryNode(network, private, name="there", settings=SETTINGS)
        async with (
            ActorSystem("tests", private, wire=network.wire("here/tests"), settings=SETTINGS) as system,
            ActorSystem("peer", private, wire=network.wire("here/peer"), settings=SETTINGS) as peer,
            Supervisor(system, node, intensity=Intensity(20, 600.0)) as supervisor,
        ):
            restarts: list[FlexmarlError] = []
            supervisor.on_restart = lambda name, reason: restarts.append(reason)
            worker = await supervisor.spawn(Worker, "worker", {"diary": str(diary)})
            first = await worker.api.incarnation()
            asked = asyncio.ensure_future(peer.ref("worker", worker.address, Worker).within(60.0).hang())
            await asyncio.sleep(0.1)
            node.power_off()
            assert node.running == [] and not asked.done()
            while not restarts:
                await asyncio.sleep(0.01)
            assert "killed by signal 9" in str(restarts[0])
            while diary.read_text().count("start worker") < 2:
                await asyncio.sleep(0.01)
            assert await worker.api.incarnation() == first + 1
            with pytest.raises(ActorDead):
                await asked
        node.close()
        await node.wait_closed()
        assert network.running == []

    virtual_time.run(main())


def test_an_actor_that_is_spawned_again_is_a_later_incarnation_on_any_node(private: Path) -> None:
    """Without a draw, so that a run in virtual time repeats its epochs."""
    diary = private / "diary"
    diary.touch()

    async def main() -> list[int]:
        network = MemoryNetwork(seed=1)
        nodes = [MemoryNode(network, private, name=name) for name in ("one", "other")]
        async with (
            ActorSystem("tests", private, wire=network.wire("tests")) as system,
            Supervisor(system, nodes[0]) as supervisor,
        ):
            epochs = []
            for node in nodes:
                path = f"{Worker.__module__}:{Worker.__name__}"
                worker = await supervisor.spawn(path, "worker", {"diary": str(diary)}, node=node)
                epochs.append(await worker.ask("incarnation"))
                await supervisor.stop("worker")
            return epochs

    first = virtual_time.run(main())
    assert first[1] == first[0] + 1
    assert virtual_time.run(main()) == first
