"""The figures of many processes, which are asked at the same time."""

import asyncio
from collections.abc import Mapping

from ..errors import ActorDead, ActorFailed, CallTimeout
from ..ref import ActorRef
from .process_statistics import ProcessStatistics
from .system_api import SystemApi

STATISTICS_TIMEOUT_S = 10.0


async def statistics_of(systems: Mapping[str, ActorRef[SystemApi]]) -> dict[str, ProcessStatistics]:
    """The figures of the processes that answer within 10 s, by name."""
    figures = await asyncio.gather(*map(_asked, systems.values()))
    return {name: figure for name, figure in zip(systems, figures, strict=True) if figure is not None}


async def _asked(ref: ActorRef[SystemApi]) -> ProcessStatistics | None:
    """None if the process is gone, or too busy or too stuck to answer."""
    try:
        return await ref.within(STATISTICS_TIMEOUT_S).process_statistics()
    except (ActorDead, ActorFailed, CallTimeout):
        return None
