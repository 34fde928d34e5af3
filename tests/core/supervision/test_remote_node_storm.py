"""Nodes on hosts that are cut off, frozen and lost at random: a successor is never heard beside its predecessor."""

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.errors import FlexmarlError, is_loss
from flexmarl.core.protocol.session import Settings
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.node import Node
from flexmarl.core.supervision.remote_node import NodeActor, NodeApi, RemoteNode
from flexmarl.core.supervision.restart_policy import Intensity
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.testing.memory_node import MemoryNode
from flexmarl.core.wire.faults import Faults
from flexmarl.core.wire.memory import MemoryNetwork

SETTINGS = Settings(heartbeat_s=1.0)
HOSTS = ("there-0", "there-1", "there-2")
ACTORS = 6
LASTS_S = 60.0


class Tally(Actor):
    """Notes the incarnations of each caller, in the order of their calls."""

    def __init__(self) -> None:
        self.heard: dict[str, list[int]] = {}

    @endpoint
    async def note(self, name: str, incarnation: int) -> None:
        self.heard.setdefault(name, []).append(incarnation)


class Caller(Actor):
    """Calls the tally, again and again."""

    def __init__(self, tally: ActorRef[Tally]) -> None:
        self._tally = tally

    async def on_start(self) -> None:
        self.background(self._call(), "calls")

    async def _call(self) -> None:
        while True:
            try:
                await self._tally.within(30.0).note(self.ref.name, self.system.incarnation)
            except FlexmarlError as error:
                if not is_loss(error):
                    raise
            await asyncio.sleep(0.1)

    @endpoint
    async def incarnation(self) -> int:
        return self.system.incarnation


class Storm:
    def __init__(self, seed: int, directory: Path, exits: AsyncExitStack) -> None:
        self.draw = random.Random(seed)
        self.network = MemoryNetwork(seed, Faults(delay_s=(0.0, 0.01)), keep_log=False)
        self.directory = directory
        self.exits = exits
        self.tally = Tally()
        self.inner: list[MemoryNode] = []
        self.remote: list[RemoteNode] = []
        self.moves = 0

    async def start(self) -> tuple[Supervisor, dict[str, ActorRef[Caller]]]:
        enter = self.exits.enter_async_context
        for host in HOSTS:
            system = await enter(self._system("node", host))
            self.inner.append(MemoryNode(self.network, self.directory, name=host, settings=SETTINGS))
            await system.add(NodeActor(self.inner[-1]), "node")
        head = await enter(self._system("head", "here"))
        tally = await head.add(self.tally, "tally")
        here = MemoryNode(self.network, self.directory, name="here", settings=SETTINGS)
        self.inner.append(here)
        supervisor = await enter(Supervisor(head, here, intensity=Intensity(1000, 600.0)))
        for host in HOSTS:
            node = RemoteNode(host, head.ref("node", f"memory://{host}/node", NodeApi))
            self.exits.callback(asyncio.create_task(node.watch(), name=f"watch {host}").cancel)
            self.remote.append(node)

        def another(name: str, lost: FlexmarlError) -> tuple[Node, dict[str, str]]:
            self.moves += 1
            return self.draw.choice([node for node in self.remote if node.lost is None] or [here]), {}

        supervisor.another_node = another
        return supervisor, {
            name: await self._spawn(supervisor, name, tally, self.remote[number % len(HOSTS)])
            for number, name in enumerate(f"caller-{n}" for n in range(ACTORS))
        }

    def _system(self, name: str, host: str) -> ActorSystem:
        wire = self.network.wire(f"{host}/{name}")
        return ActorSystem(name, self.directory, wire=wire, settings=SETTINGS)

    async def _spawn(
        self, supervisor: Supervisor, name: str, tally: ActorRef[Tally], node: RemoteNode
    ) -> ActorRef[Caller]:
        path = f"{Caller.__module__}:{Caller.__name__}"
        return await supervisor.spawn(path, name, {"tally": tally}, node=node)

    async def blow(self) -> None:
        """Cuts hosts off, freezes them and kills actors, for a minute; in the end all is well again."""
        while asyncio.get_running_loop().time() < LASTS_S:
            await asyncio.sleep(self.draw.expovariate(0.2))
            host = self.draw.choice(HOSTS)
            match self.draw.randrange(4):
                case 0:
                    self.network.cut("here", host)
                case 1:
                    self.network.pause_host(host)
                case 2:
                    victims = [(node, actor) for node in self.inner for actor in node.running]
                    node, actor = self.draw.choice(victims)
                    node.kill(actor)
                case _:
                    self.calm(host)
        for host in HOSTS:
            self.calm(host)

    def calm(self, host: str) -> None:
        self.network.mend("here", host)
        self.network.resume_host(host)


async def storm(seed: int, directory: Path) -> int:
    """The number of moves."""
    async with AsyncExitStack() as exits:
        made = Storm(seed, directory, exits)
        supervisor, callers = await made.start()
        await made.blow()
        before = {name: len(heard) for name, heard in made.tally.heard.items()}
        async with asyncio.timeout(600.0):
            while any(
                name not in supervisor.running or len(made.tally.heard[name]) == before.get(name, 0)
                for name in callers
            ):
                await asyncio.sleep(0.5)
        for heard in made.tally.heard.values():
            assert heard == sorted(heard)
    return made.moves


def test_all_actors_run_again_and_no_predecessor_is_heard_after_its_successor(private: Path) -> None:
    moves = 0
    for seed in range(10):
        directory = private / str(seed)  # a killed system leaves its answers, for its successor
        directory.mkdir(mode=0o700)
        moves += virtual_time.run(storm(seed, directory))
    assert moves > 10
