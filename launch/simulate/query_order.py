"""The order of queries of which only some are played at once: first come, first served."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class QueryOrder:
    """Trajectories of at most ``limit`` queries are played at the same time, and those of one query together."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}
        """Trajectories that are not over, by query, in the order in which the queries came."""
        self._may_play: dict[str, asyncio.Event] = {}

    @asynccontextmanager
    async def place(self, query: str, limit: int | None) -> AsyncIterator[None]:
        """A place of a trajectory. It waits for the trajectories of earlier queries, which have deadlines."""
        self._begun[query] = self._begun.get(query, 0) + 1
        may_play = self._may_play.setdefault(query, asyncio.Event())
        try:
            self._open(limit)
            await may_play.wait()
            yield
        finally:
            self._begun[query] -= 1
            if not self._begun[query]:
                del self._begun[query], self._may_play[query]
                self._open(limit)

    def _open(self, limit: int | None) -> None:
        for query in list(self._begun)[:limit]:
            self._may_play[query].set()
