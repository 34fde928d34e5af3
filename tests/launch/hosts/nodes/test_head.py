"""Nodes that join, stay, are dismissed and are lost: all in this process, over TCP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from flexmarl.core.errors import ActorDead
from flexmarl.core.protocol.session import Settings
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.process_node import ProcessNode
from flexmarl.core.supervision.remote_node import NodeActor, NodeApi, RemoteNode
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.wire.zeromq import Tcp
from flexmarl.launch.errors import TooFewNodes
from flexmarl.launch.hosts.nodes import membership
from flexmarl.launch.hosts.nodes.head import Joined, Nodes
from flexmarl.launch.hosts.nodes.joining import (
    Dismissal,
    Head,
    Joining,
    NameTaken,
    NodeRefused,
    NodesApi,
    Offer,
)

from ....patience import PATIENCE_S
from ..placement.hosts import host

SETTINGS = Settings(heartbeat_s=0.3)
ADDRESS = "tcp://10.0.0.1:4711"


class Hosts:
    def __init__(self, nodes: Nodes, system: ActorSystem, directory: Path) -> None:
        self.nodes, self.system, self.directory = nodes, system, directory

    @asynccontextmanager
    async def open(self, name: str) -> AsyncIterator[ActorRef[NodesApi]]:
        """Another host, which has joined."""
        directory = self.directory / name
        directory.mkdir(mode=0o700)
        tcp = Tcp(keys=self.system.keys)
        async with ActorSystem("node", directory, tcp=tcp, settings=SETTINGS) as system:
            node = await system.add(NodeActor(ProcessNode(system, directory, directory, {})), "node")
            head = system.ref("nodes", self.system.address, NodesApi)
            await head.api.join(Joining(host(name), {}, ADDRESS, ""), node)
            yield head


@asynccontextmanager
async def hosts(private: Path) -> AsyncIterator[Hosts]:
    offer = Offer("/runs/a", "/recipe", SETTINGS, {})
    nodes = Nodes(Head(host("head"), offer, {}, ADDRESS))
    async with (
        asyncio.timeout(PATIENCE_S),
        ActorSystem("head", private, tcp=Tcp(), settings=SETTINGS) as system,
    ):
        await system.add(nodes, "nodes")
        yield Hosts(nodes, system, private)


async def test_the_run_waits_until_all_have_joined_and_dismisses_them(private: Path) -> None:
    async with hosts(private) as made:
        seen: list[int] = []
        waiting = asyncio.create_task(made.nodes.wait_joined(2, PATIENCE_S, seen.append))
        async with AsyncExitStack() as exits:
            heads = [await exits.enter_async_context(made.open(name)) for name in "bc"]
            await waiting
            assert seen == [0, 1] and sorted(made.nodes.joined) == ["b", "c"]
            assert (await heads[0].api.offer()).folder == "/runs/a"
            stays = [
                asyncio.ensure_future(head.within(PATIENCE_S).stay(name))
                for head, name in zip(heads, "bc", strict=True)
            ]
            await heads[1].api.offer()
            dismissing = asyncio.create_task(made.nodes.dismiss(Dismissal("the run has ended")))
            assert await asyncio.gather(*stays) == [Dismissal("the run has ended")] * 2
        await dismissing
        assert not made.nodes.joined


async def test_too_few_are_named(private: Path) -> None:
    async with hosts(private) as made:
        with pytest.raises(TooFewNodes, match=r"2 nodes had to join within 0 s \(--wait-s\): there is none"):
            await made.nodes.wait_joined(2, 0.0, lambda _: None)
        async with made.open("b"):
            with pytest.raises(TooFewNodes, match="there are b"):
                await made.nodes.wait_joined(2, 0.0, lambda _: None)


async def test_a_refused_one_gets_all_reasons_and_a_name_is_free_again_after_a_loss(private: Path) -> None:
    async with hosts(private) as made:
        lost = asyncio.get_running_loop().create_future()
        made.nodes.on_lost = lambda joined, reason: lost.set_result((joined.node.name, reason))
        reported: list[tuple[str, str]] = []
        made.nodes.on_refused = lambda name, address, problems: reported.append((name, problems[0]))
        async with made.open("b") as head:
            node = made.nodes.joined["b"].node._actor
            other = replace(host("b"), python="3.12.0")
            with pytest.raises(NodeRefused) as refused:
                await head.api.join(Joining(other, {}, "", ""), node)
            assert len(refused.value.problems) == 2
            with pytest.raises(NameTaken, match="there is a node of the name b already.* --name"):
                await head.api.join(Joining(host("b"), {}, ADDRESS, ""), node)
            with pytest.raises(NameTaken):  # reported once, although the node tries again
                await head.api.join(Joining(host("b"), {}, ADDRESS, ""), node)
            assert [name for name, _ in reported] == ["b", "b"] and "the name b already" in reported[1][1]
        name, reason = await lost
        assert name == "b" and isinstance(reason, ActorDead) and "node b is lost" in reason.reason
        (private / "b").rename(private / "before")
        async with made.open("b"):
            assert list(made.nodes.joined) == ["b"]


async def test_one_that_joins_as_the_run_ends_is_dismissed_too(private: Path) -> None:
    async with hosts(private) as made:
        async with made.open("b") as head:
            dismissing = asyncio.create_task(made.nodes.dismiss(Dismissal("the run has ended")))
            stays = [await head.within(PATIENCE_S).stay("b")]
            made.nodes.on_joined = lambda joined: pytest.fail(f"{joined} came too late")
            async with made.open("late") as late:
                stays.append(await asyncio.wait_for(late.within(PATIENCE_S).stay("late"), PATIENCE_S))
                assert not dismissing.done(), "it waits for them"
        assert stays == [Dismissal("the run has ended")] * 2
        await dismissing
        assert not made.nodes.joined


async def test_with_again_a_node_waits_until_its_earlier_life_is_given_up(private: Path) -> None:
    async with hosts(private) as made:
        joining, tries = Joining(host("b"), {}, ADDRESS, ""), asyncio.Event()
        async with made.open("b") as head:
            node = ActorRef[NodeApi]("node", made.system.address)
            with pytest.raises(NameTaken):
                await membership.join(head, joining, node, 0.0)
            old = made.nodes.joined["b"]
            made.nodes.on_lost = lambda joined, reason: tries.set()
            head = made.system.ref("nodes", made.system.address, NodesApi)
            again = asyncio.create_task(membership.join(head, joining, node, PATIENCE_S))
            await head.api.offer()
            assert not again.done()
        await tries.wait()
        made.nodes.on_joined = lambda joined: tries.clear()
        await again
        assert not tries.is_set(), "it has joined"
        assert old.dismissed.done()


def test_the_wait_for_a_taken_name_is_bounded_by_the_heartbeats() -> None:
    assert membership.given_up_within(Settings(heartbeat_s=2.0, missed_heartbeats=3)) == 12.0


class Comings:
    """Nodes that come and go in virtual time. ``enough``: the fewest that the run fits."""

    def __init__(self, enough: int) -> None:
        self.nodes = Nodes(Head(host("head"), Offer("", "", SETTINGS, {}), {}, ADDRESS))
        self._enough = enough

    def come(self, name: str) -> None:
        ref = ActorRef[NodeApi]("node", f"tcp://{name}:1")
        dismissed = asyncio.get_running_loop().create_future()
        self.nodes.joined[name] = Joined(RemoteNode(name, ref), host(name), dismissed)
        self.nodes._changed.set()

    async def fits(self) -> bool:
        return len(self.nodes.joined) >= self._enough

    async def settled(self, *comings: tuple[float, str]) -> float:
        """The second at which three nodes, or as many as there are, are enough."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for at_s, name in comings:
            loop.call_at(began + at_s, self.come, name)
        await self.nodes.wait_settled(3, 5.0, 60.0, self.fits)
        return loop.time() - began


@pytest.mark.parametrize(
    ("enough", "comings", "settled_s"),
    [
        (0, [(1.0, "b"), (2.0, "c"), (3.0, "d")], 3.0),
        (0, [(1.0, "b"), (2.0, "c")], 7.0),
        (0, [], 5.0),
        (1, [(20.0, "b")], 25.0),
        (1, [], 60.0),
    ],
    ids=["all", "two", "none", "waits until it fits", "never fits: the placement has the numbers"],
)
def test_a_restart_takes_the_nodes_that_are_there(
    enough: int, comings: list[tuple[float, str]], settled_s: float
) -> None:
    async def settled() -> float:
        return await Comings(enough).settled(*comings)

    assert virtual_time.run(settled()) == pytest.approx(settled_s)
