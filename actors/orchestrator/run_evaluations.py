"""The evaluations of a run: their trajectories are played by the rollout workers, their metrics kept by step."""

from collections.abc import Sequence
from functools import partial

from ..messages import Query
from .decisions import Evaluate
from .run_parts import RunParts


class RunEvaluations:
    """``metrics``: of each evaluation, by the step before it."""

    def __init__(self, parts: RunParts) -> None:
        self._rules, resumed = parts.setup.evaluation, parts.setup.resume_from
        self._queries, self._workers, self._opponents = parts.queries, parts.workers, parts.opponents
        self._failures, self._tell_console = parts.failures, parts.tell_console
        self.metrics = dict(resumed.evaluations) if resumed else {}

    async def evaluate(self, decision: Evaluate) -> None:
        """Plays one evaluation, and a tournament of the pools. Raises RecipeError, and TooManyFailures."""
        step = decision.step
        queries = await self._queries.evaluation()
        noun = "query" if len(queries) == 1 else "queries"
        await self._tell_console("phase", f"evaluating {len(queries)} {noun}", None, None)
        versions = self._opponents.with_frozen(decision.versions)
        ends = await self._workers.evaluate(step, self._rules.work(queries), versions)
        result = self._rules.result(queries, ends)
        for event in self._failures.add(result.failures, step):
            await self._tell_console("event", event)
        when = f"evaluation after step {step}"
        if error := self._failures.too_many(when, len(result.failures), result.trajectories):
            raise error
        self.metrics[step] = result.metrics
        await self._play_tournament(decision, queries)

    async def _play_tournament(self, decision: Evaluate, queries: Sequence[Query]) -> None:
        step = decision.step
        failures = await self._opponents.tournament(
            step,
            decision.versions,
            queries,
            sum(sampling.repeats for sampling in self._rules.samplings.values()),
            partial(self._workers.evaluate, step),
        )
        for event in self._failures.add(failures, step):
            await self._tell_console("event", event)
        await self._opponents.write_results()
