"""The store actor: one table per agent."""

from itertools import groupby
from operator import attrgetter

from ...core.actor import Actor, endpoint
from ...core.errors import StoreError
from ..messages import MicroBatch, Sample, TableStatistics
from .table import Table


class Store(Actor):
    """Fulfils ``StoreApi``."""

    def __init__(self, agents: list[str]) -> None:
        self._tables = {agent: Table(agent) for agent in agents}

    @endpoint
    async def put(self, samples: list[Sample]) -> None:
        by_agent = attrgetter("agent")
        parts = {a: list(rows) for a, rows in groupby(sorted(samples, key=by_agent), key=by_agent)}
        for agent, rows in parts.items():
            self._table(agent).check(rows)
        for agent, rows in parts.items():
            self._table(agent).put(rows)

    @endpoint
    async def lease(self, agent: str, policy_version: int, count: int) -> MicroBatch:
        return self._table(agent).lease(policy_version, count)

    @endpoint
    async def commit(self, agent: str, tokens: list[int]) -> int:
        return self._table(agent).commit(tokens)

    @endpoint
    async def table_statistics(self) -> dict[str, TableStatistics]:
        return {agent: table.statistics() for agent, table in self._tables.items()}

    def _table(self, agent: str) -> Table:
        if agent not in self._tables:
            raise StoreError(f"there is no table for agent {agent!r}; there are: {', '.join(self._tables)}")
        return self._tables[agent]
