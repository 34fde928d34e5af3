"""The actor named ``system`` in every system: what may be asked of the process itself."""

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, Protocol

from ..actor import Actor, DeadActor, endpoint
from ..ref import ActorRef
from ..telemetry import LoopLag, ProcessStatistics, process_statistics

FOR_EVER = math.inf


class ControlledSystem(Protocol):
    """The part of a system that its ``SystemActor`` offers to other processes."""

    async def allow(self, public_key: str) -> None: ...

    async def find(self, name: str, asked: Iterable[str] = ()) -> ActorRef[Any] | None: ...

    def deaths(self, name: str) -> AsyncGenerator[DeadActor]: ...

    def fail_with(self, name: str, ref: ActorRef[Any]) -> None: ...


class SystemActor(Actor):
    def __init__(self, controlled: ControlledSystem) -> None:
        self._controlled = controlled
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
        await self._controlled.allow(public_key)

    @endpoint
    async def lookup(self, name: str, asked: tuple[str, ...] = ()) -> ActorRef[Any] | None:
        """The actor of that name, here or where this system knows to ask; see ``ActorSystem.find``."""
        return await self._controlled.find(name, asked)

    @endpoint
    async def deaths(self, name: str) -> AsyncGenerator[DeadActor]:
        """The death of the actor ``name``, as soon as it has died; nothing else comes."""
        async with aclosing(self._controlled.deaths(name)) as deaths:
            async for dead in deaths:
                yield dead

    @endpoint
    async def bind_fate(self, name: str, to: ActorRef[Any]) -> None:
        """When the actor behind ``to`` dies, ``name`` fails."""
        self._controlled.fail_with(name, to)

    async def on_stop(self) -> None:
        self._lag.close()
