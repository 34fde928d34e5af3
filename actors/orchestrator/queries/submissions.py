"""Queries that programs outside of the run have submitted.

    submit ──> wait ──> next: of the next step that begins ──> closed: answered with their rewards
                 └─ refuse: no further step begins

They take the place of queries that the step would draw from the training data, so that it is as large as ever, and no
position of the data is skipped or repeated. They are not part of a checkpoint: a run that continues from one has
forgotten them, and the program, whose call fails then, submits them again. Their failed trajectories do not count for
the run's ``max_failed_share``: a program that submits can't end the run.

A query keeps the id that the program gave it: it names the answer, the samples and ``query.id`` in the workflow. So two
queries with the same id can't be under way at once.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from ...errors import QueriesRefused
from ...messages import GroupClosed, Query, QueryAnswer
from ...names import Step

_MOST_WAITING: Final = 10_000


class Submissions:
    def __init__(self) -> None:
        self._waiting: deque[tuple[Query, asyncio.Future[QueryAnswer]]] = deque()
        self._open: dict[tuple[Step, str], asyncio.Future[QueryAnswer]] = {}
        """The answers to queries that a step has taken, by step and id."""
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
        self._check_ids(queries)
        answers: list[asyncio.Future[QueryAnswer]] = [
            asyncio.get_running_loop().create_future() for _ in queries
        ]
        self._waiting.extend(zip(queries, answers, strict=True))
        return await asyncio.gather(*answers)

    def _check_ids(self, queries: Sequence[Query]) -> None:
        under_way = {query.id for query, _ in self._waiting} | {name for _, name in self._open}
        for query in queries:
            if query.id in under_way:
                raise QueriesRefused(
                    f"another submitted query with the id {query.id!r} is under way: choose another id, or wait for "
                    "its answer"
                )
            under_way.add(query.id)

    @property
    def waiting(self) -> int:
        """Number of the queries that the next steps take."""
        # Those that were withdrawn are dropped here, not at the withdrawal: a deque would have to be searched.
        self._waiting = deque(entry for entry in self._waiting if not entry[1].done())
        return len(self._waiting)

    def next(self, step: Step) -> Query:
        """The query that has waited longest, for ``step``. Raises IndexError if none waits."""
        query, answer = self._waiting.popleft()
        self._open[step, query.id] = answer
        return query

    def closed(self, group: GroupClosed) -> None:
        """Answers the query, unless it was answered before: a group may begin again."""
        answer = self._open.pop((group.step, group.query), None)
        if answer is not None and not answer.done():
            answer.set_result(
                QueryAnswer(group.query, group.step, group.trajectories, len(group.failures), group.dropped)
            )

    def refuse(self, reason: str) -> None:
        """Refuses those that wait, and all that are submitted from now on. Those of a step are still answered."""
        self._refusal = self._refusal or reason
        for _, answer in self._waiting:
            if not answer.done():
                answer.set_exception(QueriesRefused(reason))
        self._waiting.clear()
