"""Systems on a network in memory, under virtual time."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.protocol.session import Settings
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.wire.memory import MemoryNetwork

HEARTBEAT = Settings(heartbeat_s=10.0)


class Worker(Actor):
    def __init__(self) -> None:
        self.heard: list[int] = []
        self.ends: list[str] = []

    async def on_start(self) -> None:
        self.background(self.idle(), "idle")

    async def idle(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ends.append("background")

    async def on_stop(self) -> None:
        self.ends.append("on_stop")

    @endpoint
    async def hear(self, number: int) -> None:
        self.heard.append(number)

    @endpoint
    async def all_heard(self) -> list[int]:
        return self.heard

    @endpoint
    async def hang(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ends.append("hang")

    @endpoint
    async def count(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield number
            await asyncio.sleep(0.1)


class World:
    def __init__(self, stack: AsyncExitStack, network: MemoryNetwork | None = None) -> None:
        self.network = network or MemoryNetwork(seed=1)
        self.systems: dict[str, ActorSystem] = {}
        self.workers: dict[str, Worker] = {}
        self._stack = stack

    async def start(self, name: str, settings: Settings = HEARTBEAT) -> ActorSystem:
        system = ActorSystem(name.partition("/")[2] or name, wire=self.network.wire(name), settings=settings)
        await self._stack.enter_async_context(system)
        self.systems[name], self.workers[name] = system, Worker()
        await system.add(self.workers[name], "worker")
        return system

    async def two(self, settings: Settings = HEARTBEAT) -> ActorRef[Worker]:
        """Starts a and b; a's reference to b's worker, connected."""
        a = await self.start("a", settings)
        await self.start("b", settings)
        ref = a.ref("worker", "memory://b", Worker)
        await ref.api.all_heard()
        return ref


def in_virtual_time(case: Callable[[World], Awaitable[None]]) -> Callable[[], None]:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            await case(World(stack))

    @functools.wraps(case)
    def test() -> None:
        virtual_time.run(main())

    del test.__wrapped__  # pytest would look for the parameters of ``case``
    return test


def now_s() -> float:
    return asyncio.get_running_loop().time()
