"""Carries out what becomes of groups that no step waits for: they begin, wait for rewards, and end."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ...core.waits import Wait
from ..messages import GroupClosed, GroupWaiting, Query
from ..names import PolicyName, Step, Version
from ..run_events import GroupLate
from .decisions import Decision
from .loose_groups import LooseGroups, is_forgotten_soon
from .pipeline import Pipeline
from .rollout_workers import GroupKey
from .run_parts import RunParts

_TOO_LATE: Final = "late: its samples are older than max_staleness allows, or no step begins any more"


class LooseRollout:
    """``groups``: those that are loose."""

    def __init__(
        self,
        parts: RunParts,
        pipeline: Callable[[], Pipeline],
        begin_groups: Callable[[Step, Sequence[Query]], None],
        carry_out: Callable[[Iterable[Decision]], None],
    ) -> None:
        """``pipeline``: called once the run has begun. ``begin_groups``: begins groups in a step, and does not wait for
        it. ``carry_out``: the orchestrator's."""
        self.groups = LooseGroups()
        self._queries, self._workers, self._records = parts.queries, parts.workers, parts.records
        self._failures, self._system, self._tell_console = parts.failures, parts.system, parts.tell_console
        self._pipeline, self._begin_groups, self._carry_out = pipeline, begin_groups, carry_out
        self._first_rewards: dict[Step, float] = {}

    def begin_submitted(self) -> None:
        """Begins submitted queries at once, in the newest step."""
        step = self._records.newest
        if queries := self._queries.take_submitted(step):
            count = len(queries)
            self._records.note(step, lambda record: record.figures.add("submitted_queries", count))
            self._pipeline().begun_at_once(count)
            for query in queries:
                self.groups.begin((step, query.id))
            self._begin_groups(step, queries)

    async def wait(self, writer: str, group: GroupWaiting) -> None:
        """A group lacks nothing but rewards: no step waits for it from now on."""
        held = self.groups.is_held((group.step, group.query))
        step = self.groups.wait(writer, group)
        if step is not None:
            self._carry_out(self._pipeline().let_go(step, held=held))
        # This group alone: with thousands that wait, all of them are looked at after an optimizer step.
        await self._give_up_late([((group.step, group.query), writer, group.oldest)])

    def admit(self, key: GroupKey, oldest: dict[PolicyName, Version]) -> str:
        """As ``OrchestratorApi.admit``, for a loose group."""
        if is_forgotten_soon(key, self._records.newest):
            return _TOO_LATE
        to_step, decisions = self._pipeline().admit(oldest)
        if to_step is None:
            return _TOO_LATE
        self.groups.admit(key, to_step)
        self._carry_out(decisions)
        return ""

    async def end(self, group: GroupClosed, *, submitted: bool) -> None:
        """A loose group has ended without samples."""
        key = group.step, group.query
        self.groups.end(key)
        self._workers.forget(key)
        now = self._system().clock()
        self._records.note(
            self._records.newest,
            lambda record: record.group_closed(group, now, submitted=submitted, late=True),
        )
        await self._report_late(group)
        for event in self._failures.add(group.failures, group.step, count=False):
            await self._tell_console("event", event)
        self._carry_out(self._pipeline().drop())

    async def end_all(self, reason: str) -> None:
        """The run has ended: reports the groups that are loose."""
        for end in self.groups.ends(f"late: {reason}"):
            await self._report_late(end)

    async def _report_late(self, group: GroupClosed) -> None:
        if late := int(group.figures.get("late_trajectories", 0)):
            await self._tell_console("event", GroupLate(group.step, group.query, late, group.dropped))

    async def give_up_late(self) -> None:
        """Ends those groups that no step can train any more."""
        await self._give_up_late([*self.groups.waiting()])

    async def _give_up_late(self, groups: Iterable[tuple[GroupKey, str, dict[PolicyName, Version]]]) -> None:
        """The same, of some that wait for rewards."""
        for key, writer, oldest in groups:
            # It may have ended while an earlier one's worker was notified.
            late = self._pipeline().step_for(oldest) is None or is_forgotten_soon(key, self._records.newest)
            if late and key in self.groups:
                self.groups.give_up(key)
                await self._workers.give_up(writer, key, _TOO_LATE)

    def waits(self) -> list[Wait]:
        """The steps without a sample, which wait for the first rewards from outside."""
        now, steps = self._system().clock(), self._pipeline().awaits_first_rewards
        self._first_rewards = {step: self._first_rewards.get(step, now) for step in steps}
        groups = f"{len(self.groups)} {'group' if len(self.groups) == 1 else 'groups'}"
        text = "the first reward from outside for step {}, which has no sample: {} wait; does the judge run?"
        limit = "agents.<agent>.columns.reward.timeout_s ends it"
        return [
            Wait(text.format(step, groups), now - since, limit) for step, since in self._first_rewards.items()
        ]
