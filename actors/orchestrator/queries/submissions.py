"""Queries that programs outside of the run have submitted.

    submit ──> wait ──> take: in a step ──> closed: answered with their rewards
                 │                     └──> waits: answered without them, if the program wants that
                 └─ refuse: no further step begins

``notify`` is called when queries wait: under ``async`` they begin at once.

They take the place of queries that a step would draw from the training data: no position of the data is skipped or
repeated. Under ``async`` the step that trains one need not be the step that leaves it the place: when many are
submitted at once steps are larger, and smaller if some leave no sample. They are not part of a checkpoint: a run that
continues from one has forgotten them, and the program, whose call fails then, submits them again. Their failed
trajectories do not count for the run's ``max_failed_share``: a program that submits can't end the run.

A query keeps the id that the program gave it: it names the answer, the samples and ``query.id`` in the workflow. So two
queries with the same id can't be under way at once.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from ...errors import QueriesRefused
from ...messages import GroupClosed, GroupWaiting, Query, QueryAnswer
from ...names import Step

_MOST_WAITING: Final = 10_000


@dataclass(slots=True)
class _Submission:
    """``judged``: the program waits for rewards from outside too."""

    query: Query
    judged: bool
    answer: asyncio.Future[QueryAnswer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Submissions:
    def __init__(self) -> None:
        self.notify: Callable[[], None] = lambda: None
        self._waiting: deque[_Submission] = deque()
        self._open: dict[tuple[Step, str], _Submission] = {}
        """Those that a step has taken, by step and id."""
        self._refusal = ""

    async def submit(self, queries: Sequence[Query], *, judged: bool = True) -> list[QueryAnswer]:
        """Waits until all have been rolled out; if not ``judged``, without their rewards from outside. Those that wait
        are withdrawn if this is cancelled. Raises QueriesRefused."""
        if self._refusal:
            raise QueriesRefused(self._refusal)
        if (waiting := self.waiting) + len(queries) > _MOST_WAITING:
            raise QueriesRefused(
                f"{waiting} queries wait for a step already, and at most {_MOST_WAITING} may: submit fewer at a time"
            )
        self._check_ids(queries)
        submissions = [_Submission(query, judged) for query in queries]
        self._waiting.extend(submissions)
        self.notify()
        return await asyncio.gather(*(submission.answer for submission in submissions))

    def _check_ids(self, queries: Sequence[Query]) -> None:
        under_way = {waiting.query.id for waiting in self._waiting} | {name for _, name in self._open}
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
        self._waiting = deque(waiting for waiting in self._waiting if not waiting.answer.done())
        return len(self._waiting)

    def take(self, step: Step, used: Collection[str], most: int | None = None) -> list[Query]:
        """The queries that have waited longest, for ``step``: at most ``most``, and none whose id is ``used`` there."""
        queries: list[Query] = []
        stay: deque[_Submission] = deque()
        for _ in range(self.waiting):
            submission = self._waiting.popleft()
            if submission.query.id in used or (most is not None and len(queries) >= most):
                stay.append(submission)
            else:
                self._open[step, submission.query.id] = submission
                queries.append(submission.query)
        self._waiting = stay
        return queries

    def waits(self, group: GroupWaiting) -> None:
        """A group lacks nothing but rewards from outside: answers a program that does not wait for those. The query is
        under way all the same."""
        submission = self._open.get((group.step, group.query))
        if submission is not None and not submission.judged and not submission.answer.done():
            submission.answer.set_result(
                QueryAnswer(group.query, group.step, group.trajectories, group.failures, "")
            )

    def closed(self, group: GroupClosed) -> None:
        """Answers the query, unless it was answered before: a group may begin again."""
        submission = self._open.pop((group.step, group.query), None)
        if submission is not None and not submission.answer.done():
            submission.answer.set_result(
                QueryAnswer(group.query, group.step, group.trajectories, len(group.failures), group.dropped)
            )

    def refuse(self, reason: str) -> None:
        """Refuses those that wait, and all that are submitted from now on. Those of a step are still answered."""
        self._refusal = self._refusal or reason
        for submission in self._waiting:
            if not submission.answer.done():
                submission.answer.set_exception(QueriesRefused(reason))
        self._waiting.clear()

    def end(self, reason: str) -> None:
        """Refuses all that are not answered yet: the run has ended."""
        self.refuse(reason)
        for submission in self._open.values():
            if not submission.answer.done():
                submission.answer.set_exception(QueriesRefused(reason))
        self._open.clear()
