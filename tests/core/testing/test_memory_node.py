"""A host in memory as its supervisor sees it: out of reach, given up, back again."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flexmarl.core.errors import ActorDead, FlexmarlError
from flexmarl.core.protocol.session import Settings
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.restart_policy import Intensity, Strategy
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.testing.memory_node import MemoryNode
from flexmarl.core.wire.memory import MemoryNetwork

from ..echo import Worker

SETTINGS = Settings(heartbeat_s=1.0)


@dataclass
class House:
    """A supervisor on the host ``here``, its actor ``worker`` on ``there``."""

    network: MemoryNetwork
    node: MemoryNode
    supervisor: Supervisor
    worker: ActorRef[Worker]
    diary: Path
    restarts: list[FlexmarlError]

    def starts(self) -> int:
        return self.diary.read_text().count("start worker")

    async def next_incarnation(self) -> int:
        while self.starts() < 2:
            await asyncio.sleep(0.1)
        return await self.worker.api.incarnation()

    def cut_off(self) -> None:
        self.network.cut("here", "there")
        self.node.lose_contact()


def in_house(tmp_path: Path, case: Callable[[House], Awaitable[None]]) -> None:
    tmp_path.chmod(0o700)
    diary = tmp_path / "diary"
    diary.touch()

    async def main() -> None:
        network = MemoryNetwork(seed=1)
        node = MemoryNode(network, tmp_path, name="there", settings=SETTINGS)
        wire = network.wire("here/tests")
        async with ActorSystem("tests", tmp_path, wire=wire, settings=SETTINGS) as system:
            async with Supervisor(
                system, node, strategy=Strategy.ONE_FOR_ONE, intensity=Intensity(20, 600.0)
            ) as supervisor:
                worker = await supervisor.spawn(Worker, "worker", {"diary": str(diary)})
                restarts: list[FlexmarlError] = []
                supervisor.on_restart = lambda name, reason: restarts.append(reason)
                async with asyncio.timeout(3600.0):
                    await case(House(network, node, supervisor, worker, diary, restarts))
            node.close()
            await node.wait_closed()
        assert network.running == []

    virtual_time.run(main())


def test_a_signal_arrives_when_the_host_can_be_reached_again(tmp_path: Path) -> None:
    async def case(house: House) -> None:
        first = await house.worker.api.incarnation()
        house.cut_off()
        await house.supervisor.ref.api.lost("worker", first, "silent")
        await asyncio.sleep(2.0)
        assert house.starts() == 1 and "there/worker" in house.network.running
        house.network.mend("here", "there")
        house.node.regain_contact()
        assert await house.next_incarnation() > first

    in_house(tmp_path, case)


def test_an_end_stays_unknown_until_the_host_can_be_reached(tmp_path: Path) -> None:
    async def case(house: House) -> None:
        house.cut_off()
        house.node.power_off()
        await asyncio.sleep(1.0)
        assert not house.restarts and "there/worker" not in house.network.running
        house.network.mend("here", "there")
        house.node.regain_contact()
        await house.next_incarnation()
        assert "signal 9" in str(house.restarts[0])

    in_house(tmp_path, case)


def test_actors_of_a_node_that_was_given_up_count_as_ended_and_run_on(tmp_path: Path) -> None:
    """Their successors start when the node has joined again; what they send meanwhile comes from a dead one."""

    async def case(house: House) -> None:
        first = await house.worker.api.incarnation()
        house.cut_off()
        house.node.give_up("silent")
        assert house.node.is_lost
        while not house.restarts:
            await asyncio.sleep(0.01)
        assert "is lost with node there" in str(house.restarts[0])
        await asyncio.sleep(10.0)
        assert house.starts() == 1 and "there/worker" in house.network.running
        house.network.mend("here", "there")
        house.node.rejoin()
        assert await house.next_incarnation() > first and not house.node.is_lost

    in_house(tmp_path, case)


def test_starts_on_a_node_that_does_not_come_back_fail(tmp_path: Path) -> None:
    async def case(house: House) -> None:
        house.cut_off()
        house.node.give_up("silent for 3 s")
        house.node.fail_starts()
        with pytest.raises(ActorDead, match=r"restarted 20 times.*node there is lost: silent for 3 s"):
            await house.supervisor.wait_failed()

    in_house(tmp_path, case)
