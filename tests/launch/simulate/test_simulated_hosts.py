"""Hosts in memory join a head by the real messages; they are killed, switched off, cut off, and join again."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flexmarl.core.errors import ActorDead
from flexmarl.core.protocol.session import Settings
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.remote_node import RemoteNode
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.testing.memory_node import MemoryNode
from flexmarl.core.wire.memory import MemoryNetwork
from flexmarl.launch.hosts.nodes.head import Nodes
from flexmarl.launch.hosts.nodes.joining import NAME, Dismissal, Head, Offer
from flexmarl.launch.simulate.simulated_hosts import SimulatedHost, describe

from ...core.echo import Worker

SETTINGS = Settings(heartbeat_s=1.0, missed_heartbeats=2)


@dataclass
class FakeCluster:
    """The head ``here`` and the host ``there``, which has joined; ``lost``: the reasons of its losses."""

    network: MemoryNetwork
    nodes: Nodes
    host: SimulatedHost
    supervisor: Supervisor
    diary: Path
    lost: list[str] = field(default_factory=list)

    async def joined(self) -> RemoteNode:
        while "there" not in self.nodes.joined:
            await asyncio.sleep(0.1)
        return self.nodes.joined["there"].node

    async def worker(self, name: str) -> ActorRef[Worker]:
        path = f"{Worker.__module__}:{Worker.__name__}"
        diary = {"diary": str(self.diary)}
        return await self.supervisor.spawn(path, name, diary, node=await self.joined())


def in_cluster(private: Path, case: Callable[[FakeCluster], Awaitable[None]]) -> None:
    diary = private / "diary"
    diary.touch()

    async def main() -> None:
        network = MemoryNetwork(seed=1)
        here, there = (
            MemoryNode(network, private, name=name, settings=SETTINGS) for name in ("here", "there")
        )
        async with ActorSystem("head", private, wire=network.wire("here/head"), settings=SETTINGS) as system:
            head = Head(describe("here"), Offer("", "", SETTINGS, {}), {}, system.address)
            await system.add(nodes := Nodes(head), NAME)
            host = SimulatedHost(network, there, SETTINGS, system.address)
            living = asyncio.create_task(host.run())
            async with Supervisor(system, here) as supervisor:
                cluster = FakeCluster(network, nodes, host, supervisor, diary)
                nodes.on_lost = lambda joined, reason: cluster.lost.append(reason.reason)
                await case(cluster)
                await nodes.dismiss(Dismissal("the run has ended"))
                await living
        await there.wait_closed()
        assert network.running == []

    virtual_time.run(main(), limit_s=3600.0)


def test_the_actors_of_a_dismissed_node_have_ended(private: Path) -> None:
    async def case(cluster: FakeCluster) -> None:
        worker = await cluster.worker("worker")
        assert "there/worker" in cluster.network.running and await worker.ask("incarnation")
        assert not cluster.lost

    in_cluster(private, case)


def test_a_node_that_is_killed_is_noticed_at_once_and_joins_again(private: Path) -> None:
    async def case(cluster: FakeCluster) -> None:
        worker = await cluster.worker("worker")
        clock = asyncio.get_running_loop().time
        before, first = clock(), await cluster.joined()
        cluster.host.kill()
        with pytest.raises(ActorDead):
            await cluster.supervisor.wait_failed()
        assert clock() - before < 0.1 and first.lost is not None
        with pytest.raises(ActorDead):
            await worker.ask("incarnation")
        assert await cluster.joined() is not first
        assert await (await cluster.worker("another")).ask("incarnation")

    in_cluster(private, case)


def test_a_node_without_power_is_lost_by_its_silence_and_comes_back_when_it_is_switched_on(
    private: Path,
) -> None:
    async def case(cluster: FakeCluster) -> None:
        first, clock = await cluster.joined(), asyncio.get_running_loop().time
        before = clock()
        cluster.host.power_off()
        while not cluster.lost:
            await asyncio.sleep(0.1)
        assert 1.0 < clock() - before < 5.0 and "silent" in cluster.lost[0]
        await asyncio.sleep(60.0)
        assert not cluster.nodes.joined
        cluster.host.power_on()
        assert await cluster.joined() is not first

    in_cluster(private, case)


def test_a_node_that_is_cut_off_ends_its_actors_itself(private: Path) -> None:
    async def case(cluster: FakeCluster) -> None:
        await cluster.worker("worker")
        cluster.network.cut("here", "there")
        while not cluster.lost:
            await asyncio.sleep(0.1)
        await asyncio.sleep(5.0)
        assert "there/worker" not in cluster.network.running
        cluster.network.mend("here", "there")
        assert (await cluster.joined()).lost is None

    in_cluster(private, case)
