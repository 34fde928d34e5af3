"""The processors of simulated rollout workers."""

import asyncio
from typing import Final
from weakref import WeakKeyDictionary

from ...core.pacing import Pacing, pacing
from ...core.testing.link_clock import LinkClock

_PROCESSOR: Final = "processor"


class WorkerTime:
    """The turns of a worker share its processor: those that come together are served together. An event loop takes a
    part of each of its tasks in turn, so that none of many turns is through long before the last."""

    def __init__(self) -> None:
        # All workers of a simulation share a module of the recipe; each process has links of its own.
        self._clocks: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Pacing | None, LinkClock]]
        self._clocks = WeakKeyDictionary()

    async def take(self, seconds: float) -> None:
        """Returns when the processor of the calling worker has worked so long for this turn."""
        if seconds > 0.0:
            workers = self._clocks.setdefault(asyncio.get_running_loop(), {})
            clock = workers.setdefault(pacing.get(), LinkClock({_PROCESSOR: 1.0}))
            await clock.transfer(seconds, {_PROCESSOR: 1.0})
