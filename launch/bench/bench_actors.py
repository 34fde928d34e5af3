"""The actors that ``flexmarl bench calls`` measures. No numpy here: an idle actor's memory is measured too."""

import asyncio
import os

from ...core.actor import Actor, endpoint
from ...core.ref import ActorRef
from .measure import calls_in_flight


class Echo(Actor):
    """Does nothing, so that what a call costs is the call itself."""

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
        """How many times ``hear`` has run."""
        return self._heard

    @endpoint
    async def wait(self) -> None:
        """Until the process ends."""
        await asyncio.Event().wait()

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


class Caller(Actor):
    """One of several that call the same actor at once."""

    @endpoint
    async def run(self, target: ActorRef[Echo], seconds: float, in_flight: int) -> int:
        """How many calls of ``target`` ended; ``in_flight`` of them are under way for ``seconds``."""
        count, _ = await calls_in_flight(lambda: target.api.empty(), seconds, in_flight)
        return count
