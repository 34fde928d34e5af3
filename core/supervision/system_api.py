"""The endpoints of the actor named ``system``, which every actor system has."""

import math
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from ..actor import DeadActor, endpoint
from ..ref import ActorRef
from ..waits import Wait
from .process_statistics import ProcessStatistics

FOR_EVER = math.inf


class SystemApi(Protocol):
    @endpoint
    async def stop(self) -> None:
        """Asks the process to end in good order; it replies first."""

    @endpoint
    async def process_statistics(self) -> ProcessStatistics:
        """The figures of this process."""

    @endpoint
    async def process_waits(self) -> dict[str, list[Wait]]:
        """The waits of each actor of this process (``Actor.waits``), by the actor's name; also of actors that are being
        started."""

    @endpoint
    async def allow(self, public_key: str, calls: tuple[str, ...]) -> None:
        """See ``ActorSystem.allow``."""

    @endpoint
    async def lookup(self, name: str, asked: tuple[str, ...] = ()) -> ActorRef[Any] | None:
        """The actor ``name``, here or in a system that this one asks; see ``Directory.find``."""

    @endpoint
    def exits(self, name: str) -> AsyncGenerator[DeadActor]:
        """The exit of the actor ``name`` as soon as it has ended: one item."""
