"""The queries of a run: those that its steps draw, and the groups that their source has still to hear of.

    begin(step)        takes queries that were submitted from outside
    draw(step, n)      the source hears of the groups that have ended, and gives the other queries of the step; later
                       one for each group that is replaced
    closed(group)      keeps how the group ended for the source, or answers who has submitted its query
    state_after(step)  what a run that resumes after the step continues from

A state is taken when the next step begins, after the source has heard of all groups and before it gives a query; after
the last step, when the checkpoint is made. So a checkpoint has all of its step and nothing of a later one, however far
that has come. A run that is resumed makes the same calls to the source as one that was never interrupted, if its groups
have the same results. The predictor of trees learns when the source hears: all trees of a step have the same weights.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Final

from ....core.system import ActorSystem
from ....core.waits import Wait
from ...errors import DataChanged
from ...messages import GroupClosed, Query, equal_ids, refuse_equal_ids
from ...names import AgentName, PolicyName, Step, Version
from ...recipe.query_source import GroupEnd
from ...recipe.recipe import Recipe
from ...trees.success_model import PrefixEnd, SuccessModel
from ..evaluation import REWARD
from ..plan import Plan
from .position_source import digest_of_all
from .queries_state import QueriesState
from .recipe_data import RecipeData
from .recipe_source import RecipeSource
from .submissions import Submissions

_LEFT_OUT: Final = "left out: a submitted query of the step has its id"
# A source may come back to a query that was left out. One that gives no other ends the run, rather than hang it.
_MOST_LEFT_OUT: Final = 100


@dataclass(slots=True)
class _Draw:
    """A query of a step. ``number``: of the draw, counted over the run. ``heard``: its source knows how it ended.
    ``closed``: its group has. ``prefixes``: of the group's trees, which the predictor has
    still to learn from."""

    number: int
    query: Query
    submitted: bool = False
    heard: bool = False
    closed: bool = False
    prefixes: Sequence[PrefixEnd] = ()


@dataclass(slots=True)
class _StepQueries:
    """``by_id``: also those whose groups have closed. ``figures``: of the source, None before its first draw.
    ``success_state``: of the ``SuccessModel`` when the step began."""

    versions: dict[PolicyName, Version]
    by_id: dict[str, _Draw] = field(default_factory=dict)
    figures: dict[str, float] | None = None
    success_state: list[float] | None = None


class RunQueries:
    def __init__(
        self,
        recipe: Recipe,
        system: Callable[[], ActorSystem],
        timeout_s: float,
        plan: Plan,
        success: str,
        resumed: QueriesState | None,
        *,
        predicts: bool = False,
    ) -> None:
        """``system``, ``timeout_s``: as for ``RecipeData``. ``success``: as in ``EvaluationRules``. ``predicts``: a
        predictor of success learns from the trees of the groups (``SuccessModel``)."""
        learnt = resumed.success_state if resumed else None
        self._model = SuccessModel(learnt or ()) if predicts else None
        self.submissions = Submissions(resumed.logged if resumed else {})
        self._recipe, self._plan, self._success = recipe, plan, success
        self._data = RecipeData(recipe, system, timeout_s)
        self._source: RecipeSource | None = None
        self._resumed = resumed
        self._count = resumed.drawn if resumed else 0
        self._evaluation = resumed.evaluation if resumed else ""
        self._steps: dict[Step, _StepQueries] = {}
        self._remainders: dict[Step, _StepQueries] = {}
        """Queries of complete steps: of the newest, and of those with groups that may still close."""
        self._ends: dict[int, tuple[_Draw, GroupEnd]] = {}
        """The groups that the source has still to hear of, by number of the draw."""
        self._after: dict[Step, QueriesState] = {}
        self._newest_state = Step(-1)
        """The step whose state was taken last. That of step 0, before the first one, may be taken too."""
        self._drawing, self._taking = asyncio.Lock(), asyncio.Lock()

    async def start(self) -> None:
        """Makes the recipe's source, and restores it. Raises RecipeError, and DataChanged if the recipe now returns
        other queries than in the run that is resumed."""
        source = await self._data.call(lambda: "query_source", partial(RecipeSource, self._recipe))
        self._source = source
        if (resumed := self._resumed) is None:
            return
        await self._data.call(lambda: source.function, partial(source.restore, resumed))
        if resumed.evaluation:
            await self.evaluation()
            if self._evaluation != resumed.evaluation:
                raise DataChanged(
                    "eval_queries now returns other queries than those that the run was evaluated on"
                )

    async def evaluation(self) -> list[Query]:
        """The queries of an evaluation. Raises RecipeError."""

        def read() -> tuple[list[Query], str]:
            queries = self._recipe.eval_queries()
            return queries, digest_of_all(queries)

        queries, self._evaluation = await self._data.call(lambda: "eval_queries", read)
        refuse_equal_ids(queries, "the evaluation")
        return queries

    # ------------------------------------------------------------------ a step

    def begin(
        self, step: Step, versions: Mapping[PolicyName, Version], most: int | None = None
    ) -> list[Query]:
        """The submitted queries that a step takes, ``most`` at most (None: the plan's number); the others it draws.
        Steps begin in order."""
        self._remainders = {
            earlier: of_step
            for earlier, of_step in self._remainders.items()
            if not all(draw.closed for draw in of_step.by_id.values())
        }
        self._steps[step] = _StepQueries(dict(versions))
        places = self._plan.queries if most is None else most
        submitted = self.take_submitted(step, places)
        # All places but one: the run's own data must not wait for the end of a long log.
        most_logged = min(places - len(submitted), max(1, self._plan.queries - 1))
        return submitted + self._note_submitted(
            step, self.submissions.take_logged(step, self._steps[step].by_id, most_logged)
        )

    def take_submitted(self, step: Step, most: int | None = None) -> list[Query]:
        """The submitted queries that begin in the newest step; those stay whose ids a query of it has."""
        by_id = (self._steps.get(step) or self._remainders[step]).by_id
        return self._note_submitted(step, self.submissions.take(step, by_id, most))

    def _note_submitted(self, step: Step, submitted: list[Query]) -> list[Query]:
        by_id = (self._steps.get(step) or self._remainders[step]).by_id
        by_id |= {query.id: _Draw(0, query, submitted=True) for query in submitted}
        return submitted

    @asynccontextmanager
    async def draw(self, step: Step, count: int) -> AsyncIterator[list[tuple[int, Query]]]:
        """The next ``count`` queries for a step, each with its number. The next draw waits for the end of the block:
        groups begin in the order in which their queries are drawn.

        Raises RecipeError, also if a query of the step has the id of another: their samples would have the same names.
        One with the id of a submitted query is left out, which its source hears of, and the next one drawn in its
        place: a program that submits can't end the run.
        """
        async with self._drawing:
            of_step, source = self._steps[step], self._running
            before, begins = Step(step - 1), of_step.figures is None
            if begins and self._plan.saves(before):
                # In a call of its own: the checkpoint does not wait for the queries of the step after it.
                await self._take_state(before)
            ends = self._take_ends() if begins else []
            if begins:
                of_step.success_state = self._success_state()
            draws: list[tuple[int, Query]] = []
            left_out = Counter[str]()
            missing = count
            while missing or of_step.figures is None:
                queries, of_step.figures = await self._data.call(
                    lambda: source.function, partial(source.draw, ends, step, missing)
                )
                for number, query in enumerate(queries, self._count):
                    if (other := of_step.by_id.get(query.id)) is None:
                        of_step.by_id[query.id] = _Draw(number, query)
                        draws.append((number, query))
                    elif other.submitted and left_out[query.id] < _MOST_LEFT_OUT:
                        left_out[query.id] += 1
                        end = GroupEnd(query, step, of_step.versions, {}, {}, None, 0, _LEFT_OUT)
                        self._ends[number] = _Draw(number, query, closed=True), end
                    else:
                        raise equal_ids(f"step {step}", query.id)
                self._count += missing
                ends, missing = [], count - len(draws)
            yield draws

    def success_state(self, step: Step) -> list[float] | None:
        """The state of the ``SuccessModel`` for the trees of a step, once it has begun to draw; None without one."""
        of_step = self._steps.get(step) or self._remainders.get(step)
        return None if of_step is None else of_step.success_state

    def _success_state(self) -> list[float] | None:
        return None if self._model is None else self._model.state

    def closed(self, group: GroupClosed, trained_by: Step | None = None) -> bool:
        """True if the query of a group was submitted: it is answered. ``trained_by``: None for the step that it began
        in. A group may begin again, and close again: the source hears of the last end before the next step begins, and
        of no later one."""
        of_step = self._steps.get(group.step) or self._remainders.get(group.step)
        if of_step is None:
            return False  # it closed in a step that is complete, and has begun again with a lost host
        draw = of_step.by_id[group.query]
        draw.closed, draw.prefixes = True, group.prefixes
        end = GroupEnd(
            draw.query,
            group.step,
            of_step.versions,
            group.rewards,
            group.metrics,
            _success(self._success, group),
            len(group.failures),
            group.dropped,
            group.filtered,
        )
        if draw.submitted:
            self.submissions.closed(group, trained_by)
        elif not draw.heard:
            self._ends[draw.number] = draw, end
        return draw.submitted

    def end(self, step: Step) -> dict[str, float]:
        """Ends a step that is complete: forgets its queries, but for those whose groups have not closed. Returns the
        source's figures."""
        of_step = self._remainders[step] = self._steps.pop(step)
        return of_step.figures or {}

    def _take_ends(self) -> list[GroupEnd]:
        # By number, not by arrival: a sum of floats, or a queue, in the source depends on the order.
        ends = [self._ends[number] for number in sorted(self._ends)]
        self._ends.clear()
        if self._model is not None:
            self._model.learn([prefix for draw, _ in ends for prefix in draw.prefixes])
        for draw, _ in ends:
            draw.heard, draw.prefixes = True, ()
        return [end for _, end in ends]

    # ------------------------------------------------------------------ checkpoints

    async def state_after(self, step: Step) -> QueriesState:
        """The queries after a complete step, to be asked for once. Raises RecipeError."""
        if step not in self._after:
            await self._take_state(step)
        logged = self.submissions.trained_until(step)
        return replace(self._after.pop(step), evaluation=self._evaluation, logged=logged)

    async def _take_state(self, step: Step) -> None:
        """Takes the state of a saved step once: for the next step's draw or for the checkpoint, whichever comes
        first."""
        # A lock of its own: the checkpoint does not wait for the queries of the next step.
        async with self._taking:
            if step > self._newest_state:
                source, ends = self._running, self._take_ends()
                learnt = self._success_state()  # before the wait, in which a later step may begin to learn
                state = await self._data.call(lambda: source.function, partial(source.state_after, ends))
                state = replace(state, drawn=self._count, success_state=learnt)
                self._after[step], self._newest_state = state, step

    # ------------------------------------------------------------------ for people

    def waits(self) -> list[Wait]:
        """The recipe's data."""
        return self._data.waits()

    @property
    def _running(self) -> RecipeSource:
        assert self._source is not None, "the run has not begun"
        return self._source


def _success(metric: str, group: GroupClosed) -> float | None:
    values = group.metrics.get(metric)
    if values is None and metric.startswith(REWARD):
        values = group.rewards.get(AgentName(metric.removeprefix(REWARD)))
    return fmean(value >= 1 for value in values) if values else None
