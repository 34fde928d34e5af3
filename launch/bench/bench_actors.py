"""The actors that ``flexmarl bench calls`` measures. They import no numpy, because their memory is measured too."""

import asyncio
import os

from ...core.actor import Actor, endpoint
from ...core.ref import ActorRef
from .measure import calls_in_flight


class Echo(Actor):
    """Does nothing, so that only the call itself takes time."""

    def __init__(self) -> None:
        self._heard = 0

    @endpoint
    async def empty(self) -> None: ...

    @endpoint
    async def echo_dict(self, value: dict[str, str]) -> dict[str, str]:
        return value

    @endpoint
    async def hear(self, number: int) -> None:
        self._heard += 1

    @endpoint
    async def heard(self) -> int:
        """The number of calls of ``hear``."""
        return self._heard

    @endpoint
    async def wait(self) -> None:
        """Never returns."""
        await asyncio.Event().wait()

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


class Caller(Actor):
    """One of several callers of the same actor."""

    @endpoint
    async def run(self, target: ActorRef[Echo], seconds: float, in_flight: int) -> int:
        """Calls ``target`` for ``seconds``, ``in_flight`` calls at a time; returns the number of completed calls."""
        count, _ = await calls_in_flight(lambda: target.api.empty(), seconds, in_flight)
        return count
