"""Queries that programs outside of the run have submitted.

    submit ──> wait ──> next: of the next step that begins ──> closed: answered with their rewards
                 └─ refuse: no further step begins

They take the place of queries that the step would draw from the training data, so that it is as large as ever, and no
position of the data is skipped or repeated. They are not part of a checkpoint: a run that continues from one has
forgotten them, and the program, whose call fails then, submits them again. Their failed trajectories do not count for
the run's ``max_failed_share``: a program that submits can't end the run.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from ...errors import QueriesRefused
from ...messages import Query, QueryAnswer
from ...recipe.query_source import GroupEnd, QuerySource

SUBMITTED: Final = 0
"""The number of a draw that stands in the samples of a query that was not drawn; their ids show it."""

_MOST_WAITING: Final = 10_000


class Submissions(QuerySource):
    def __init__(self) -> None:
        self._waiting: deque[tuple[Query, asyncio.Future[QueryAnswer]]] = deque()
        self._open: dict[str, tuple[str, asyncio.Future[QueryAnswer]]] = {}
        """The ids that the program has given, and the answers, by the ids in the run."""
        self._taken_count = 0
        self._refusal = ""

    async def submit(self, queries: Sequence[Query]) -> list[QueryAnswer]:
        """Waits until all have been rolled out. Those that wait are withdrawn if this is cancelled. Raises
        QueriesRefused."""
        if self._refusal:
            raise QueriesRefused(self._refusal)
        if (waiting := self.waiting) + len(queries) > _MOST_WAITING:
            raise QueriesRefused(
                f"{waiting} queries wait for a step already, and at most {_MOST_WAITING} may: submit fewer at a time"
            )
        answers: list[asyncio.Future[QueryAnswer]] = [
            asyncio.get_running_loop().create_future() for _ in queries
        ]
        self._waiting.extend(zip(queries, answers, strict=True))
        return await asyncio.gather(*answers)

    @property
    def waiting(self) -> int:
        """Number of the queries that the next steps take."""
        # Those that were withdrawn are dropped here, not at the withdrawal: a deque would have to be searched.
        self._waiting = deque(entry for entry in self._waiting if not entry[1].done())
        return len(self._waiting)

    def next(self, step: int) -> Query:
        """The query that has waited longest, with an id that is its own in every step. Raises IndexError if none
        waits."""
        query, answer = self._waiting.popleft()
        named = replace(query, id=f"submitted#{self._taken_count}")
        self._taken_count += 1
        self._open[named.id] = query.id, answer
        return named

    def closed(self, group: GroupEnd) -> None:
        """Answers the query, unless it was answered before: a group may begin again."""
        query, answer = self._open.pop(group.query.id, ("", None))
        if answer is not None and not answer.done():
            rewards = {agent: [*values] for agent, values in group.rewards.items()}
            answer.set_result(QueryAnswer(query, group.step, rewards, group.failures, group.dropped))

    def state(self) -> dict[str, Any]:
        """Nothing: see above."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Does nothing: see above."""

    def refuse(self, reason: str) -> None:
        """Refuses those that wait, and all that are submitted from now on. Those of a step are still answered."""
        self._refusal = self._refusal or reason
        for _, answer in self._waiting:
            if not answer.done():
                answer.set_exception(QueriesRefused(reason))
        self._waiting.clear()
