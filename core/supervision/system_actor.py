"""The actor named ``system``: control of a process by other processes."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ..actor import Actor, DeadActor, endpoint
from ..ref import ActorRef
from ..telemetry import LoopLag
from ..waits import Wait
from .directory import Directory
from .local_actors import LocalActors
from .process_statistics import ProcessStatistics
from .system_api import SystemApi


class SystemActor(Actor, SystemApi):
    """``stop_requested``: set by ``stop``."""

    def __init__(self, local: LocalActors, directory: Directory) -> None:
        self.stop_requested = asyncio.Event()
        self._local = local
        self._directory = directory
        self._lag = LoopLag()

    @endpoint
    async def stop(self) -> None:
        self.stop_requested.set()

    @endpoint
    async def process_statistics(self) -> ProcessStatistics:
        return self._local.process_statistics(self._lag)

    @endpoint
    async def process_waits(self) -> dict[str, list[Wait]]:
        return self._local.waits()

    @endpoint
    async def allow(self, public_key: str, calls: tuple[str, ...]) -> None:
        await self.system.allow(public_key, calls)

    @endpoint
    async def lookup(self, name: str, asked: tuple[str, ...] = ()) -> ActorRef[Any] | None:
        return await self._directory.find(name, asked)

    @endpoint
    async def exits(self, name: str) -> AsyncGenerator[DeadActor]:
        async with aclosing(self._local.monitors.exits(name)) as exits:
            async for dead in exits:
                yield dead

    async def on_stop(self) -> None:
        self._lag.close()
