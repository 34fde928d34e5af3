"""Queries that programs outside of the run have submitted.

    submit ──> wait ──> take: in a step ──> closed: answered with their rewards
                 │                     └──> waits: answered without them, if the program wants that
                 └─ refuse: no further step begins

``notify`` is called when queries wait: under ``async`` they begin at once.

Trajectories that ended before (``submit_logged``) are groups like those of queries. If the run has generated them, they
age: under ``async`` they begin at once. Answers of another policy wait in a line of their own, and begin with a step in
every mode: all of them are there at once, and a step that takes them all would have many times its size. A checkpoint
has the names of those that are trained: a program that lost its connection submits all of them again, and none is
trained twice.

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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from ...errors import QueriesRefused
from ...messages import GroupClosed, GroupWaiting, LoggedGroup, LoggedTrajectory, Query, QueryAnswer
from ...names import Step

_MOST_WAITING: Final = 10_000


@dataclass(slots=True)
class _Submission:
    """``judged``: the program waits for rewards from outside too. ``logged``: its trajectories, if they ended
    before. ``is_session``: the program plays it itself. ``is_replay``: the run has given it again."""

    query: Query
    judged: bool
    logged: list[LoggedTrajectory] = field(default_factory=list)
    is_session: bool = False
    is_replay: bool = False
    answer: asyncio.Future[QueryAnswer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Submissions:
    def __init__(self, trained: Mapping[str, Step] = MappingProxyType({})) -> None:
        """``trained``: as in ``QueriesState.logged``."""
        self._trained = dict(trained)
        self.notify: Callable[[], None] = lambda: None
        self._waiting: deque[_Submission] = deque()
        self._lines: deque[_Submission] = deque()
        """Those of logs, whose answers another policy gave."""
        self._open: dict[tuple[Step, str], _Submission] = {}
        """Those that a step has taken, by step and id."""
        self._refusal = ""

    async def submit(
        self, queries: Sequence[Query], *, judged: bool = True, sessions: bool = False
    ) -> list[QueryAnswer]:
        """Waits until all have been rolled out; if not ``judged``, without their rewards from outside. Those that wait
        are withdrawn if this is cancelled. ``sessions``: see ``is_session``. Raises QueriesRefused."""
        self._check(queries, self.waiting)
        submissions = [_Submission(query, judged, is_session=sessions) for query in queries]
        self._waiting.extend(submissions)
        self.notify()
        return await asyncio.gather(*(submission.answer for submission in submissions))

    async def submit_logged(self, groups: Sequence[LoggedGroup]) -> list[QueryAnswer]:
        """Waits until all are in the store, or are dropped: also those that no step takes any more. One whose name is
        trained already is answered with its step. Those that wait are withdrawn if this is cancelled. Raises
        QueriesRefused, and takes none then."""
        new = [group for group in groups if group.query.id not in self._trained]
        self._check([group.query for group in new], self.waiting)
        answers: dict[str, asyncio.Future[QueryAnswer]] = {}
        for group in new:
            submission = _Submission(group.query, judged=True, logged=group.trajectories)
            answers[group.query.id] = submission.answer
            (self._waiting if group.oldest() else self._lines).append(submission)
        self.notify()
        by_id = {answer.query: answer for answer in await asyncio.gather(*answers.values())}
        return [
            by_id.get(name) or QueryAnswer(name, self._trained[name], [], 0, "")
            for name in (group.query.id for group in groups)
        ]

    def replay(self, group: LoggedGroup) -> None:
        """Submits a group of the run again, as a program would, without a wait for its answer."""
        submission = _Submission(group.query, judged=True, logged=group.trajectories, is_replay=True)
        # Retrieved here: asyncio would report an error that nothing reads.
        submission.answer.add_done_callback(lambda answer: answer.exception())
        self._waiting.append(submission)

    def trained_until(self, step: Step) -> dict[str, Step]:
        """As in ``QueriesState.logged``."""
        return {name: of_step for name, of_step in self._trained.items() if of_step <= step}

    def _check(self, queries: Sequence[Query], waiting: int) -> None:
        if self._refusal:
            raise QueriesRefused(self._refusal)
        if waiting + len(queries) > _MOST_WAITING:
            raise QueriesRefused(
                f"{waiting} queries wait for a step already, and at most {_MOST_WAITING} may: submit fewer at a time"
            )
        under_way = {submission.query.id for submission in (*self._waiting, *self._lines)}
        under_way |= {name for _, name in self._open}
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
        self._lines = deque(waiting for waiting in self._lines if not waiting.answer.done())
        return len(self._waiting) + len(self._lines)

    def take(self, step: Step, used: Collection[str], most: int | None = None) -> list[Query]:
        """The queries that have waited longest, for ``step``: at most ``most``, and none whose id is ``used`` there."""
        queries, self._waiting = self._take(self._waiting, step, used, most)
        return queries

    def take_logged(self, step: Step, used: Collection[str], most: int) -> list[Query]:
        """The same, of answers that another policy gave."""
        queries, self._lines = self._take(self._lines, step, used, most)
        return queries

    def _take(
        self, waiting: Iterable[_Submission], step: Step, used: Collection[str], most: int | None
    ) -> tuple[list[Query], deque[_Submission]]:
        queries: list[Query] = []
        stay: deque[_Submission] = deque()
        for submission in waiting:
            if submission.answer.done():
                continue
            if submission.query.id in used or (most is not None and len(queries) >= most):
                stay.append(submission)
            else:
                self._open[step, submission.query.id] = submission
                queries.append(submission.query)
        return queries, stay

    def logged(self, step: Step, query: str) -> list[LoggedTrajectory]:
        """The trajectories of a query that the step has taken, if they ended before."""
        submission = self._open.get((step, query))
        return [] if submission is None else submission.logged

    def is_session(self, step: Step, query: str) -> bool:
        """True if a program outside the run plays this query of the step itself."""
        submission = self._open.get((step, query))
        return submission is not None and submission.is_session

    def waits(self, group: GroupWaiting) -> None:
        """A group lacks nothing but rewards from outside: answers a program that does not wait for those. The query is
        under way all the same."""
        submission = self._open.get((group.step, group.query))
        if submission is not None and not submission.judged and not submission.answer.done():
            submission.answer.set_result(
                QueryAnswer(group.query, group.step, group.trajectories, group.failures, "")
            )

    def closed(self, group: GroupClosed, trained_by: Step | None = None) -> None:
        """Answers the query, unless it was answered before: a group may begin again. ``trained_by``: None for the step
        that it began in."""
        step = group.step if trained_by is None else trained_by
        submission = self._open.pop((group.step, group.query), None)
        if submission is not None and submission.logged and not submission.is_replay and not group.dropped:
            self._trained[group.query] = step
        if submission is not None and not submission.answer.done():
            submission.answer.set_result(
                QueryAnswer(group.query, step, group.trajectories, len(group.failures), group.dropped)
            )

    def refuse(self, reason: str) -> None:
        """Refuses those that wait, and all that are submitted from now on. Those of a step are still answered."""
        self._refusal = self._refusal or reason
        for submission in (*self._waiting, *self._lines):
            if submission.answer.done():
                continue
            if submission.logged:  # others of the same call may be trained
                submission.answer.set_result(QueryAnswer(submission.query.id, Step(0), [], 0, reason))
            else:
                submission.answer.set_exception(QueriesRefused(reason))
        self._waiting.clear()
        self._lines.clear()

    def end(self, reason: str) -> None:
        """Refuses all that are not answered yet: the run has ended."""
        self.refuse(reason)
        for submission in self._open.values():
            if not submission.answer.done():
                submission.answer.set_exception(QueriesRefused(reason))
        self._open.clear()
