"""A cluster of three nodes that call each other while a script drawn from the seed harms them and their network.

``python cluster_storm.py SEED`` prints all that happened: the network's log, and how each request ended.
"""

import asyncio
import itertools
import sys
from collections import Counter
from dataclasses import dataclass, field

import structlog

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.errors import ActorDead, CallTimeout, RemoteError, SystemClosed
from flexmarl.core.protocol.session import Settings
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.wire.faults import Faults
from flexmarl.core.wire.memory import MemoryNetwork

NAMES = ("a", "b", "c")
SETTINGS = Settings(heartbeat_s=1.0, connect_timeout_s=2.0)
TIMEOUT_S = 8.0
CALM = Faults(delay_s=(0.001, 0.01))
ROUGH = Faults(delay_s=(0.0, 0.2), drop=0.05, duplicate=0.1, reorder=0.1)


@dataclass
class Books:
    """The calls of all nodes. ``begun``: (sender, receiver) to the numbers in the order in which they began."""

    executed: Counter[str] = field(default_factory=Counter)
    begun: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)


class Worker(Actor):
    def __init__(self, label: str, books: Books) -> None:
        self.label = label
        self.books = books

    def begin(self, sender: str, number: int) -> None:
        self.books.executed[f"{sender} {number}"] += 1
        self.books.begun.setdefault((sender, self.label), []).append(number)

    @endpoint
    async def note(self, sender: str, number: int) -> None:
        self.begin(sender, number)

    @endpoint
    async def work(self, sender: str, number: int, takes_s: float) -> int:
        self.begin(sender, number)
        await asyncio.sleep(takes_s)
        return number


class Storm:
    def __init__(self, seed: int) -> None:
        self.network = MemoryNetwork(seed, ROUGH)
        self.random = self.network.random
        self.books = Books()
        self.running: dict[str, ActorSystem] = {}
        self.numbers = itertools.count(1)
        self.incarnations = itertools.count(1)

    async def main(self, lasts_s: float = 60.0) -> None:
        async with asyncio.TaskGroup() as group:
            nodes = [group.create_task(self.node(name)) for name in NAMES]
            await self.harm(lasts_s)
            for node in nodes:
                node.cancel()

    async def node(self, name: str) -> None:
        """Runs the node, and a new incarnation of it after each crash."""
        while True:
            label = f"{name}.{next(self.incarnations)}"
            async with ActorSystem(name, wire=self.network.wire(name), settings=SETTINGS) as system:
                await system.add(Worker(label, self.books), "worker")
                self.running[name] = system
                try:
                    async with asyncio.TaskGroup() as group:
                        callers = [group.create_task(self.calls(system, label)) for _ in range(3)]
                        await system.failure
                        for caller in callers:
                            caller.cancel()
                finally:
                    self.running.pop(name, None)
            await asyncio.sleep(self.random.uniform(0.0, 3.0))

    async def calls(self, system: ActorSystem, label: str) -> None:
        while True:
            await asyncio.sleep(self.random.uniform(0.0, 1.0))
            to = self.random.choice([name for name in NAMES if name != system.name])
            kind = self.random.choice(["note", "work", "work"])
            number = next(self.numbers)
            end = "cancelled"
            began_s = asyncio.get_running_loop().time()
            try:
                end = await self.request(system, label, to, kind, number)
            except (ActorDead, CallTimeout, RemoteError, SystemClosed) as error:
                end = type(error).__name__
            finally:
                took_s = asyncio.get_running_loop().time() - began_s
                assert took_s <= TIMEOUT_S + 1e-9, f"{kind} {number} to {to} took {took_s} s"
                self.books.ends[end] += 1
                self.books.lines.append(f"{label} {kind} {number} to {to}: {end} after {took_s!r} s")

    async def request(self, system: ActorSystem, label: str, to: str, kind: str, number: int) -> str:
        ref = system.ref("worker", f"memory://{to}", Worker)
        takes_s = self.random.choice([0.0, 0.0, 0.1, 3.0])
        match kind:
            case "note":
                await ref.tell("note", label, number)
            case _:
                assert await ref.within(TIMEOUT_S).work(label, number, takes_s) == number
        return "done"

    async def harm(self, lasts_s: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < lasts_s:
            await asyncio.sleep(self.random.uniform(0.0, 4.0))
            name = self.random.choice(NAMES)
            match self.random.choice(["calm", "rough", "partition", "heal", "crash", "pause"]):
                case "calm":
                    self.network.faults = CALM
                case "rough":
                    self.network.faults = ROUGH
                case "partition":
                    self.network.partition({name}, {other for other in NAMES if other != name})
                case "heal":
                    self.network.heal()
                case "crash" if name in self.running:
                    del self.running[name]
                    self.network.crash(name, silently=self.random.random() < 0.3)
                case "pause" if name in self.running:
                    self.network.pause(name)
                    await asyncio.sleep(self.random.uniform(0.0, 6.0))
                    self.network.resume(name)


def weather(seed: int) -> Storm:
    """A storm that is over."""
    storms: list[Storm] = []

    async def main() -> None:
        storms.append(Storm(seed))
        await storms[0].main()

    virtual_time.run(main())
    return storms[0]


if __name__ == "__main__":
    with structlog.testing.capture_logs():  # they are printed with the real time
        storm = weather(int(sys.argv[1]))
    sys.stdout.write("\n".join([*storm.network.log, *storm.books.lines]) + "\n")
