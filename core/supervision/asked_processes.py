"""Reports of many processes, which are asked at the same time."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeVar

from ..errors import ActorDead, ActorFailed, CallTimeout
from ..ref import ActorRef
from .system_api import SystemApi

Report = TypeVar("Report")

STATISTICS_TIMEOUT_S: Final = 10.0


async def ask_processes(
    systems: Mapping[str, ActorRef[SystemApi]],
    ask: Callable[[SystemApi], Awaitable[Report]],
    timeout_s: float = STATISTICS_TIMEOUT_S,
    reported: Callable[[str, Report], None] = lambda name, report: None,
) -> dict[str, Report]:
    """The reports of the processes that answer within ``timeout_s``, by name. ``reported``: is called with each as it
    comes: one process that is silent delays the others' reports here."""
    reports: dict[str, Report] = {}

    async def asked(name: str, ref: ActorRef[SystemApi]) -> None:
        # A process that is gone, or too busy or too stuck to answer, has no report.
        with contextlib.suppress(ActorDead, ActorFailed, CallTimeout):
            reports[name] = await ask(ref.within(timeout_s))
            reported(name, reports[name])

    await asyncio.gather(*(asked(name, ref) for name, ref in systems.items()))
    return {name: reports[name] for name in systems if name in reports}
