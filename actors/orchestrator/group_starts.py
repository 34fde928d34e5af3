"""The beginning of groups: their queries are drawn, and dealt to the rollout workers with the versions of the step."""

from collections.abc import Sequence

from ..messages import Query, VersionRange
from ..names import PolicyName, Step
from .closing_order import ClosingOrder
from .loose_groups import LooseGroups
from .rollout_workers import GroupWork
from .run_parts import RunParts


class GroupStarts:
    def __init__(self, parts: RunParts, closing: ClosingOrder, groups: LooseGroups) -> None:
        self._mode, self._trajectories = parts.setup.plan.mode, parts.setup.trajectories_per_query
        self._queries, self._workers, self._opponents = parts.queries, parts.workers, parts.opponents
        self._records, self._closing, self._groups = parts.records, closing, groups

    async def draw(self, step: Step, count: int, submitted: Sequence[Query] = ()) -> None:
        """Begins the groups of ``submitted`` queries, and of ``count`` others. Raises RecipeError."""
        async with self._queries.draw(step, count) as draws:
            self._groups.hold(step, [query.id for query in [*submitted, *(query for _, query in draws)]])
            await self.begin(step, submitted, draws)

    async def begin(
        self, step: Step, submitted: Sequence[Query], draws: Sequence[tuple[int, Query]] = ()
    ) -> None:
        """Begins groups. ``draws``: queries with the numbers of their draws."""
        self._closing.begun(step, [query.id for query in submitted] + [query.id for _, query in draws])
        record = self._records.get(step)
        versions = self._opponents.with_frozen(
            self._records.newest_versions if record is None else record.versions
        )
        newer = self._mode == "async"  # versions that may also generate turns of the step
        ranges = {
            policy: VersionRange(version, None if newer else version) for policy, version in versions.items()
        }
        learnt = self._queries.success_state(step)
        await self._workers.begin(
            [
                *(self._submitted_work(step, query, ranges) for query in submitted),
                *(
                    GroupWork(step, number, query, self._trajectories, ranges, success_state=learnt)
                    for number, query in draws
                ),
            ]
        )

    def _submitted_work(self, step: Step, query: Query, ranges: dict[PolicyName, VersionRange]) -> GroupWork:
        logged = self._queries.submissions.logged(step, query.id)
        is_session = self._queries.submissions.is_session(step, query.id)
        trajectories = 1 if is_session else len(logged) or self._trajectories
        return GroupWork(step, 0, query, trajectories, ranges, True, logged, is_session)
