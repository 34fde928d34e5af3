"""The figures of a process: sums over mailboxes and peers, and those of its actors."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.errors import CallTimeout
from flexmarl.core.supervision.process_statistics import PeerTotals
from flexmarl.core.system import ActorSystem


class Counter(Actor):
    def __init__(self) -> None:
        self.added = 0

    def statistics(self) -> Mapping[str, float]:
        return {"added": self.added, "half": self.added / 2}

    @endpoint
    async def add(self, count: int) -> None:
        self.added += count

    @endpoint
    async def fail(self) -> None:
        raise ValueError("on purpose")

    @endpoint
    async def hang(self) -> None:
        await asyncio.Event().wait()


class Broken(Actor):
    def statistics(self) -> Mapping[str, float]:
        raise ValueError("on purpose")


class Wordy(Actor):
    def statistics(self) -> Mapping[str, float]:
        return {"state": "fine"}  # type: ignore[dict-item]


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    async with ActorSystem("counting") as system:
        yield system


async def test_mailboxes_peers_and_actors_are_counted(system: ActorSystem) -> None:
    counter = await system.add(Counter(), "counter")
    await system.add(Broken(), "broken")
    await system.add(Wordy(), "wordy")
    await counter.api.add(3)
    with pytest.raises(Exception, match="on purpose"):
        await counter.api.fail()
    with pytest.raises(CallTimeout):
        await counter.within(0.01).hang()
    hanging = asyncio.ensure_future(counter.api.hang())
    await counter.api.add(2)
    figures = (await system.process_statistics())["counting"]
    assert figures.pid > 0 and figures.rss_mib > 1 and figures.cpu_s > 0
    assert figures.actors == {"counter": {"added": 5.0, "half": 2.5}}, "and none of an actor that can't say"
    mailboxes, peers = figures.mailboxes, figures.peers
    assert (mailboxes.waiting, mailboxes.running, mailboxes.served) == (0, 1, 2)
    assert (mailboxes.failed, mailboxes.cancelled) == (1, 1)
    # to itself; one end of the connection asks, the other serves
    assert peers == PeerTotals(peers=2, open_calls=2, sent_requests=6, expired_calls=1), (
        "hang, and the question itself"
    )
    hanging.cancel()


async def test_the_figures_of_spawned_processes_come_by_name(system: ActorSystem, tmp_path: Path) -> None:
    path = f"{Counter.__module__}:Counter"
    counter = await system.spawn(path, "far", process=True)
    await counter.ask("add", 4)
    figures = await system.process_statistics()
    assert figures.keys() == {"counting", "far"} and figures["far"].pid != figures["counting"].pid
    assert figures["far"].actors == {"far": {"added": 4.0, "half": 2.0}}
    assert figures["far"].mailboxes.served >= 1
