"""A source that gives queries again which no trajectory has solved."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

from ...config_base import Count, Share, Unit
from ...messages import Query
from ..query_source import GroupEnd, QuerySource
from .packed_query import pack_query, unpack_query
from .source_options import SourceOptions


def is_unsolved(group: GroupEnd) -> bool:
    """True if no trajectory has solved the query; without the metric of ``evaluation.success``, if all have failed, or
    each agent's rewards are equal."""
    if group.success is not None:
        return group.success == 0
    return all(len(set(rewards)) < 2 for rewards in group.rewards.values())


class ReplaySource(QuerySource):
    """Gives the queries of ``source``, and in between those again whose group was one to ``repeat``.

    A query that is given again has the text and the data that it had, and an id of its own: ``q7#3`` is ``q7``, and
    the third that was given again. So a step may have both it and another ``q7`` of ``source``.
    """

    def __init__(
        self,
        source: QuerySource,
        *,
        share: float = 0.25,
        limit: int = 256,
        times: int = 3,
        repeat: Callable[[GroupEnd], bool] = is_unsolved,
    ) -> None:
        """``share``: of the queries that are given, at most this many are given again. ``limit``: queries that wait
        for it; the one that has waited longest makes room for another. ``times``: that a query is given again, at most.

        Raises ValueError for a share that is not between 0 and 1, and for a limit or times below 1.
        """
        if not 0 <= share <= 1 or limit < 1 or times < 1:
            raise ValueError(f"share={share}, limit={limit}, times={times}: 0 to 1, at least 1, at least 1")
        self._source, self._share, self._times, self._repeat = source, share, times, repeat
        self._waiting: deque[tuple[Query, int]] = deque(maxlen=limit)
        """With the number of times that each was given again."""
        self._open: dict[str, tuple[Query, int]] = {}
        """Those that were given again and have not ended, by their new ids."""
        self._credit = 0.0
        self._repetitions = 0

    def next(self, step: int) -> Query:
        # At most one query is saved up, so that a step after many solved ones is not filled with old queries.
        self._credit = min(self._credit + self._share, max(1.0, self._share))
        if not self._waiting or self._credit < 1:
            return self._source.next(step)
        self._credit -= 1
        self._repetitions += 1
        query, times = self._waiting.popleft()
        repetition = replace(query, id=f"{query.id}#{self._repetitions}")
        self._open[repetition.id] = query, times + 1
        return repetition

    def closed(self, group: GroupEnd) -> None:
        if group.query.id in self._open:
            query, times = self._open.pop(group.query.id)
        else:
            query, times = group.query, 0
            self._source.closed(group)
        if times < self._times and self._repeat(group):
            self._waiting.append((query, times))

    def state(self) -> dict[str, Any]:
        return {
            "source": self._source.state(),
            "waiting": [[pack_query(query), times] for query, times in self._waiting],
            "open": {name: [pack_query(query), times] for name, (query, times) in self._open.items()},
            "credit": self._credit,
            "given_again": self._repetitions,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._source.restore(state["source"])
        self._waiting.extend((unpack_query(query), times) for query, times in state["waiting"])
        self._open = {name: (unpack_query(query), times) for name, (query, times) in state["open"].items()}
        self._credit, self._repetitions = state["credit"], state["given_again"]

    def figures(self) -> dict[str, float]:
        """Those of ``source``, with the queries of the run that were given again, and those that wait for it now."""
        return {**self._source.figures(), "given_again": self._repetitions, "waiting": len(self._waiting)}


class ReplayConfig(SourceOptions):
    """Unsolved queries again, between those of ``train_query``."""

    name: Literal["replay"] = "replay"
    share: Share = 0.25
    """Most queries that are given again, as a share of all."""
    limit: Annotated[Count, Unit("queries")] = 256
    """Most queries that wait for it. The one that has waited longest makes room for another."""
    times: Annotated[Count, Unit("times")] = 3
    """Most times that a query is given again."""

    def source(self, positions: QuerySource, seed: int) -> QuerySource:
        return ReplaySource(positions, share=self.share, limit=self.limit, times=self.times)
