"""The endpoints of the actor named ``system``, which every actor system has; and those of many processes at once."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Final, Protocol, TypeVar

from ..actor import DeadActor, endpoint
from ..errors import ActorDead, ActorFailed, CallTimeout
from ..ref import ActorRef
from ..spans import SpanBatch
from ..waits import Wait
from .process_statistics import ProcessStatistics

Report = TypeVar("Report")

# For streams that stay open as long as both sides live. A peer that is silent ends them by the heartbeats.
FOR_EVER: Final = math.inf
STATISTICS_TIMEOUT_S: Final = 10.0


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
    async def process_spans(self, share: float, received: int) -> SpanBatch:
        """The spans of this process since the batch ``received``; see ``SpanRecorder.take``."""

    @endpoint
    async def allow(self, public_key: str, calls: tuple[str, ...]) -> None:
        """See ``ActorSystem.allow``."""

    @endpoint
    async def lookup(self, name: str, searched: tuple[str, ...] = ()) -> ActorRef[Any] | None:
        """The actor ``name``, here or in a system that this one asks; see ``Directory.find``."""

    @endpoint
    def exits(self, name: str) -> AsyncGenerator[DeadActor]:
        """The exit of the actor ``name`` as soon as it has ended: one item."""


async def ask_processes(
    systems: Mapping[str, ActorRef[SystemApi]],
    ask: Callable[[str, SystemApi], Awaitable[Report]],
    timeout_s: float = STATISTICS_TIMEOUT_S,
    reported: Callable[[str, Report], None] = lambda name, report: None,
) -> dict[str, Report]:
    """The reports of the processes that answer within ``timeout_s``, by name. ``ask``: gets each name and process.
    ``reported``: is called with each report as it comes: one process that is silent delays the others' here."""
    reports: dict[str, Report] = {}

    async def add_report(name: str, ref: ActorRef[SystemApi]) -> None:
        # A process that is gone, or too busy or too stuck to answer, has no report.
        with contextlib.suppress(ActorDead, ActorFailed, CallTimeout):
            reports[name] = await ask(name, ref.within(timeout_s))
            reported(name, reports[name])

    await asyncio.gather(*(add_report(name, ref) for name, ref in systems.items()))
    return {name: reports[name] for name in systems if name in reports}
