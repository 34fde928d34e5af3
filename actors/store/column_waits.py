"""Waits for what external writers write: of leases, and as the console is notified of them."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from ...core.waits import OpenWaits, Wait
from ..columns.declared_columns import REWARD_COLUMN
from ..names import AgentName
from ..run_events import ColumnsAwaited, RunEvent
from .policy_queue import PolicyQueue

# The console is notified of a wait after this time, once for each agent.
_REPORT_AFTER_S: Final = 10.0


class ColumnWaits:
    def __init__(self, notify: Callable[[RunEvent], None]) -> None:
        self._notify = notify
        self._moved = asyncio.Event()
        self._reported: set[str] = set()
        self._open = OpenWaits()

    def current(self) -> list[Wait]:
        """See ``Actor.waits``."""
        return self._open.current()

    def rows_moved(self) -> None:
        """Rows came, were given back, or have further columns."""
        self._moved.set()

    async def until_written(
        self, queue: PolicyQueue, policy_version: int, count: int, staleness: int
    ) -> None:
        """Returns when the rows that a lease needs have their external columns. Raises StoreError when the columns'
        ``timeout_s`` is over."""
        if not queue.awaited(policy_version, count, staleness):
            return
        timeout_s, began = queue.external_timeout_s, asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(timeout_s):
                while missing := queue.awaited(policy_version, count, staleness):
                    agent, _, lacking = queue.first_awaited(policy_version, staleness)
                    self._moved.clear()
                    what = f"{', '.join(lacking)} of samples of {agent}, from a program outside the run"
                    limit = f"agents.{agent}.columns.{lacking[0]}.timeout_s={timeout_s:g} ends it"
                    try:
                        with self._open.open(what, limit, since=began):
                            async with asyncio.timeout(_REPORT_AFTER_S):
                                await self._moved.wait()
                    except TimeoutError:
                        self.report(agent, missing, lacking)
        except TimeoutError:
            if not (missing := queue.awaited(policy_version, count, staleness)):
                return  # in the last moment
            raise queue.not_complete(policy_version, count, staleness, missing) from None

    def report_unjudged(self, waiting: Mapping[str, int]) -> None:
        """``waiting``: by agent, the samples that have long waited for their rewards."""
        for agent, samples in waiting.items():
            self.report(agent, samples, [REWARD_COLUMN])

    def report(self, agent: str, missing: int, lacking: list[str]) -> None:
        """Notifies the console, once for each agent."""
        if agent not in self._reported:
            self._reported.add(agent)
            self._notify(ColumnsAwaited(AgentName(agent), missing, ", ".join(lacking)))
