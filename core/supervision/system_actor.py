"""The actor named ``system`` in every system: what may be asked of the process itself."""

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ..actor import Actor, DeadActor, endpoint
from ..ref import ActorRef
from ..telemetry import LoopLag, ProcessStatistics, process_statistics

FOR_EVER = math.inf


class SystemActor(Actor):
    def __init__(self) -> None:
        self.stop_asked = asyncio.Event()
        self._lag = LoopLag()

    @endpoint
    async def stop(self) -> None:
        """Asks the process to end in good order; it replies before it does."""
        self.stop_asked.set()

    @endpoint
    async def statistics(self) -> ProcessStatistics:
        return process_statistics(self._lag)

    @endpoint
    async def allow(self, public_key: str) -> None:
        """See ``ActorSystem.allow``."""
        await self.system.allow(public_key)

    @endpoint
    async def lookup(self, name: str, asked: tuple[str, ...] = ()) -> ActorRef[Any] | None:
        """The actor of that name, here or where this system knows to ask; see ``ActorSystem.find``."""
        return await self.system.find(name, asked)

    @endpoint
    async def deaths(self, name: str) -> AsyncGenerator[DeadActor]:
        """The death of the actor ``name``, as soon as it has died; nothing else comes."""
        async with aclosing(self.system.fates.deaths(name)) as deaths:
            async for dead in deaths:
                yield dead

    @endpoint
    async def bind_fate(self, name: str, to: ActorRef[Any]) -> None:
        """When the actor behind ``to`` dies, ``name`` fails."""
        self.system.fail_with(name, to)

    async def on_stop(self) -> None:
        self._lag.close()
