"""Clusters for the contract of the runtime: systems of one process that reach each other by one kind of wire."""

import asyncio
import functools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from flexmarl.core.protocol.session import Settings
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.wire.curve import Keys
from flexmarl.core.wire.memory import MemoryNetwork
from flexmarl.core.wire.wire import Listener, Wire
from flexmarl.core.wire.zeromq import Tcp, ZmqWire

from ..patience import PATIENCE_S

# For calls to an address without a listener.
QUICK = Settings(connect_timeout_s=0.2)


class Cluster:
    """Systems that reach each other by the same kind of wire."""

    def __init__(self, transport: "Transport", stack: AsyncExitStack) -> None:
        self.transport = transport
        self._stack = stack
        self._keys = Keys.make() if transport.name == "tcp+curve" else None
        self._network = MemoryNetwork(seed=1)
        self._directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))

    async def start(self, name: str, settings: Settings | None = None) -> ActorSystem:
        """A system that is closed with the cluster."""
        return await self._stack.enter_async_context(self.system(name, settings))

    def system(self, name: str, settings: Settings | None = None, *, again_at: str = "") -> ActorSystem:
        """``again_at``: the address of an earlier system of that name, which has ended."""
        settings = settings or Settings()
        match self.transport.name:
            case "ipc":
                return ActorSystem(name, self._directory, settings=settings)
            case "tcp+curve":
                port = int(again_at.rpartition(":")[2] or 0)
                return ActorSystem(name, tcp=Tcp(port=port, keys=self._keys), settings=settings)
            case _:
                return ActorSystem(name, wire=self._network.wire(name), settings=settings)

    @asynccontextmanager
    async def stranger(
        self, header: bytes, listener: Listener, name: str = "stranger"
    ) -> AsyncIterator[Wire]:
        """A bare wire of the cluster's kind, on which anything may be sent."""
        wire: Wire
        with tempfile.TemporaryDirectory() as directory:
            match self.transport.name:
                case "ipc":
                    wire = ZmqWire(f"ipc://{directory}/stranger.sock")
                case "tcp+curve":
                    wire = ZmqWire(Tcp(keys=self._keys), self._keys)
                case _:
                    wire = self._network.wire(name)
            wire.start(header, listener)
            try:
                yield wire
            finally:
                wire.close()

    def nowhere(self) -> str:
        """An address without a listener."""
        return {
            "ipc": "ipc:///tmp/flexmarl-nobody.sock",
            "tcp+curve": "tcp://127.0.0.1:1",
        }.get(self.transport.name, "memory://nobody")


@dataclass(frozen=True)
class Transport:
    name: str
    run: Callable[[Coroutine[Any, Any, None]], None]

    @asynccontextmanager
    async def cluster(self) -> AsyncIterator[Cluster]:
        async with AsyncExitStack() as stack:
            yield Cluster(self, stack)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task outlived its system"


TRANSPORTS = [
    Transport("ipc", asyncio.run),
    Transport("tcp+curve", asyncio.run),
    Transport("memory", asyncio.run),
    Transport("memory in virtual time", virtual_time.run),
]


def over_every_transport(case: Callable[[Any, Cluster], Awaitable[None]]) -> Callable[[Any, Transport], None]:
    """Makes a test of a test class's method ``case``: over each transport, on a loop of its own."""

    async def main(tests: Any, transport: Transport) -> None:
        async with asyncio.timeout(PATIENCE_S), transport.cluster() as cluster:
            await case(tests, cluster)

    @pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda transport: transport.name)
    def test(self: Any, transport: Transport) -> None:
        transport.run(main(self, transport))

    functools.update_wrapper(test, case)
    del test.__wrapped__  # pytest would look for the parameters of ``case``
    return cast(Callable[[Any, Transport], None], test)


async def until(condition: Callable[[], object]) -> None:
    """Waits until ``condition()`` holds: for conditions without an event."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)
