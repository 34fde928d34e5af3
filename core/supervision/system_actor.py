"""The actor named ``system``: control of a process by other processes, and its answers to searches for names."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from ..actor import Actor, DeadActor, endpoint
from ..ref import ActorRef
from ..spans import SpanBatch
from ..telemetry import LoopLag
from ..waits import Wait
from .local_actors import LocalActors
from .process_statistics import ProcessStatistics
from .system_api import SystemApi


class Directory:
    """Actors by name: of this process, of the processes it has started, and of the systems it is connected to."""

    def __init__(self, local: LocalActors) -> None:
        self._local = local
        self._upstream: list[ActorRef[SystemApi]] = []

    def add_upstream(self, address: str) -> None:
        """Adds ``address`` to the systems that are asked for names, without contacting it."""
        ref = self._local.system_actor(address)
        if ref not in self._upstream:
            self._upstream.append(ref)

    async def find(self, name: str, searched: Iterable[str] = ()) -> ActorRef[Any] | None:
        """The actor ``name``. ``searched``: the addresses of systems that take part in the search already, so that
        none is asked twice. Raises what a call to another system raises."""
        local = self._local
        if local.address in searched:
            return None
        if local.has_actor(name):
            return local.ref(name, local.address)
        for supervisor in local.supervisors:
            if (child := supervisor.find(name)) is not None:
                return child
        for upstream in self._upstream:
            if (ref := await upstream.api.lookup(name, (*searched, local.address))) is not None:
                return ref
        return None


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
    async def process_spans(self, share: float, received: int) -> SpanBatch:
        return self._local.spans.take(share, received)

    @endpoint
    async def allow(self, public_key: str, calls: tuple[str, ...]) -> None:
        await self.system.allow(public_key, calls)

    @endpoint
    async def lookup(self, name: str, searched: tuple[str, ...] = ()) -> ActorRef[Any] | None:
        return await self._directory.find(name, searched)

    @endpoint
    async def exits(self, name: str) -> AsyncGenerator[DeadActor]:
        async with aclosing(self._local.monitors.exits(name)) as exits:
            async for dead in exits:
                yield dead

    async def on_stop(self) -> None:
        self._lag.close()
