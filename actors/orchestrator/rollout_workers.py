"""The rollout workers as the orchestrator sees them: deals work to them, and begins the work of lost ones again.

    enlist (a stream, open as long as the worker lives)
      │ a life         -> gets work
      └ its end        -> the life is lost:
                            supervisor.lost   kills its process, if that only hangs: one that reported its end is
                                              left alone, since its supervisor decides by the error
                            store.retire      refuses its later puts, returns the reports of its earlier ones
                            groups with a report have closed, the others are dealt again
                            store.lost_groups: those whose samples are lost with the worker's host begin again too

So each group is trained once, also if the worker dies between its put and its ``group_closed``, or is stopped for so
long that it is given up, and then continues: its puts are refused, its messages name a life that has no work any more.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from ...core.base.texts import text_of
from ...core.errors import ActorDead, CallTimeout, FlexmarlError, is_loss
from ...core.ref import ActorRef
from ...core.supervision.system_api import FOR_EVER
from ...core.telemetry import get_logger
from ...core.waits import Wait
from ..errors import WorkerReplaced
from ..messages import (
    WORK_TIMEOUT_S,
    EvaluationEnd,
    EvaluationTrajectory,
    GroupClosed,
    LoggedTrajectory,
    Query,
    RolloutApi,
    StoreApi,
    SupervisorApi,
    VersionRange,
    WorkerIncarnation,
)
from ..names import PolicyName, Step, Version
from ..run_events import WorkerLost
from .work_assignment import WorkAssignment

log = get_logger(__name__)

# A worker that can't be reached is being started.
_RETRY_S: Final = 0.1
_START_S: Final = 10.0
_SHOWN: Final = 3

GroupKey = tuple[Step, str]
"""Step and query id of a group."""


class Listener(Protocol):
    """The orchestrator, as its workers' view sees it. ``finished``: nothing is needed of the workers any more."""

    @property
    def finished(self) -> bool:
        """True once the run needs nothing more of its workers: a lost one is not replaced."""

    async def worker_lost(self, event: WorkerLost, groups: Mapping[Step, int]) -> None:
        """``groups``: begun again, by step."""

    async def closed(self, group: GroupClosed) -> None:
        """A group of a lost worker had closed."""

    def group_lost(self, group: GroupClosed) -> None:
        """A group that had closed begins again: its samples are lost with the worker's host."""

    def ended_with_worker(self, key: GroupKey) -> GroupClosed | None:
        """The end of a group whose worker was lost, if it does not begin again: it has waited for rewards, and no step
        for it."""


@dataclass(frozen=True, slots=True)
class GroupWork:
    """A query's group. ``position``: the number of the query's draw, over the run. ``submitted``: it was not drawn.
    ``logged``: its trajectories, if they ended before. ``is_session``: a program outside the run plays it.
    ``success_state``: for its trees, those of the step."""

    step: Step
    position: int
    query: Query
    trajectories: int
    versions: dict[PolicyName, VersionRange]
    submitted: bool = False
    logged: list[LoggedTrajectory] = field(default_factory=list)
    is_session: bool = False
    success_state: list[float] | None = None

    @property
    def key(self) -> GroupKey:
        """Names the group in a run: no step has two queries with the same id."""
        return self.step, self.query.id


@dataclass(slots=True)
class _Evaluating:
    """An evaluation under way, after ``step``. ``ends``: by number of the trajectory."""

    step: Step
    trajectories: Sequence[EvaluationTrajectory]
    versions: dict[PolicyName, Version]
    ends: dict[int, EvaluationEnd] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class RolloutWorkers:
    def __init__(
        self,
        refs: Sequence[ActorRef[RolloutApi]],
        store: ActorRef[StoreApi],
        supervisor: ActorRef[SupervisorApi],
        listener: Listener,
        background: Callable[[Coroutine[Any, Any, None], str], None],
    ) -> None:
        """``background``: as ``Actor.background``."""
        self._refs = {ref.name: ref for ref in refs}
        self._store, self._supervisor = store, supervisor
        self._listener, self._background = listener, background
        self._assignment: WorkAssignment[GroupKey | int] = WorkAssignment()
        self._lives: dict[str, tuple[ActorRef[RolloutApi], WorkerIncarnation]] = {}
        """Every life that was enlisted, by writer; those that are lost stay, so that none is enlisted again."""
        self._groups: dict[GroupKey, GroupWork] = {}
        self._evaluating: _Evaluating | None = None
        self._absent = set(self._refs)
        self._all_enlisted = asyncio.Event()
        self._closed_at = asyncio.get_running_loop().time()
        """The time at which the last group closed."""

    # ------------------------------------------------------------------ the workers' lives

    async def start(self) -> None:
        """Returns when every worker is enlisted, so that the first work is dealt to all of them; without those that
        can't be reached for 10 s, if there is another one."""
        for ref in self._refs.values():
            self._background(self._tend(ref), f"worker {ref.name}")
        await self._all_enlisted.wait()

    async def _tend(self, ref: ActorRef[RolloutApi]) -> None:
        """Enlists one life of a worker after the other."""
        loop = asyncio.get_running_loop()
        late_from = loop.time() + _START_S
        while not self._listener.finished:
            life: WorkerIncarnation | None = None
            end: FlexmarlError | None = None
            try:
                async with aclosing(ref.within(FOR_EVER).enlist()) as lives:
                    async for life in lives:
                        await self._take_in(ref, life)
            except FlexmarlError as error:
                if not is_loss(error):
                    raise
                end = error
            if life is not None:
                await self._lose(life.writer, end)
            if loop.time() >= late_from:  # it was lost before it has enlisted, perhaps for good
                self._await_no_more(ref.name)
            await asyncio.sleep(_RETRY_S)

    async def _take_in(self, ref: ActorRef[RolloutApi], life: WorkerIncarnation) -> None:
        if life.writer in self._lives:  # given up, and not killed yet
            return
        self._lives[life.writer] = ref, life
        await self._send(self._assignment.enlist(life.writer))
        self._await_no_more(ref.name)

    def _await_no_more(self, name: str) -> None:
        self._absent.discard(name)
        if not self._absent and self._lives:
            self._all_enlisted.set()

    async def _lose(self, writer: str, error: FlexmarlError | None) -> None:
        """``error``: of the call that noticed it; None if the life's stream has ended."""
        if writer not in self._assignment or self._listener.finished:
            return
        open_items = self._assignment.lose(writer)  # from now on it closes none
        ref, life = self._lives[writer]
        reason = _reason(error)
        log.warning(
            "rollout worker lost", name=ref.name, writer=writer, incarnation=life.incarnation, reason=reason
        )
        if not (isinstance(error, ActorDead) and error.reported):
            await self._supervisor.tell("lost", ref.name, life.incarnation, reason, timeout_s=WORK_TIMEOUT_S)
        store = self._store.within(WORK_TIMEOUT_S)
        reports, lost = await store.retire(writer), await store.lost_groups(writer)
        put: dict[GroupKey | int, GroupClosed] = {(report.step, report.query): report for report in reports}
        again = [item for item in open_items if item not in put]
        for report in lost:
            if (report.step, report.query) not in again:
                self._listener.group_lost(report)
                again.append((report.step, report.query))
        ends = [
            end
            for item in again
            if not isinstance(item, int) and (end := self._listener.ended_with_worker(item))
        ]
        again = [item for item in again if item not in {(end.step, end.query) for end in ends}]
        groups = [self._groups[item] for item in again if not isinstance(item, int)]
        trajectories = sum(group.trajectories for group in groups) + len(again) - len(groups)
        steps: dict[Step, int] = {}
        for group in groups:
            steps[group.step] = steps.get(group.step, 0) + 1
        await self._listener.worker_lost(WorkerLost(ref.name, reason, len(groups), trajectories), steps)
        for end in ends + [put[item] for item in open_items if item in put]:
            await self._listener.closed(end)
        await self._send(self._assignment.deal(again))

    # ------------------------------------------------------------------ groups

    async def begin(self, groups: Iterable[GroupWork]) -> None:
        """Deals groups to the workers. Without a worker they wait for the next one that enlists."""
        new = {group.key: group for group in groups}
        self._groups |= new
        await self._send(self._assignment.deal(new))

    def closed(self, writer: str, group: GroupClosed) -> bool:
        """False if the group does not, or no longer, belong to that life of a worker."""
        key = group.step, group.query
        if not self._assignment.close(writer, key):
            log.warning("group of another worker ignored", writer=writer, step=group.step, query=group.query)
            return False
        self._closed_at = asyncio.get_running_loop().time()
        return True

    def has(self, writer: str, key: GroupKey) -> bool:
        """True if the group is open, and that life of a worker has it."""
        return self._assignment.has(writer, key)

    async def give_up(self, writer: str, key: GroupKey, reason: str) -> None:
        """No step can train the group, which waits for rewards: has its worker end it."""
        ref, _ = self._lives[writer]
        try:
            await ref.tell("give_up", *key, reason, timeout_s=WORK_TIMEOUT_S)
        except FlexmarlError as error:
            if not is_loss(error):
                raise  # else the group ends with its worker

    def forget(self, key: GroupKey) -> None:
        """The group has ended without samples: it never begins again. Its step may have been forgotten before."""
        self._groups.pop(key, None)

    async def forget_step(self, step: Step, kept: Collection[str] = ()) -> None:
        """All groups of the step have closed, and are trained, but for those of the queries ``kept``."""
        self._groups = {
            key: group for key, group in self._groups.items() if group.step != step or key[1] in kept
        }
        await self._store.tell("forget_reports", step, [*kept], timeout_s=WORK_TIMEOUT_S)

    # ------------------------------------------------------------------ evaluations

    async def evaluate(
        self, step: Step, trajectories: Sequence[EvaluationTrajectory], versions: dict[PolicyName, Version]
    ) -> list[EvaluationEnd]:
        """The ends of the trajectories, in their order. One evaluation at a time; ``step``: the one before it."""
        evaluating = self._evaluating = _Evaluating(step, trajectories, versions)
        if trajectories:
            await self._send(self._assignment.deal(range(len(trajectories))))
            await evaluating.done.wait()
        return [evaluating.ends[number] for number in range(len(trajectories))]

    async def _evaluate_at(self, writer: str, numbers: list[int]) -> None:
        evaluating = self._evaluating
        assert evaluating is not None
        ref, _ = self._lives[writer]
        trajectories = [evaluating.trajectories[number] for number in numbers]
        call = ref.within(WORK_TIMEOUT_S).evaluate(writer, evaluating.step, trajectories, evaluating.versions)
        try:
            ends = await call
        except (ActorDead, CallTimeout, WorkerReplaced) as error:
            await self._lose(writer, error)
            return
        for number, end in zip(numbers, ends, strict=True):
            if self._assignment.close(writer, number):
                evaluating.ends[number] = end
        if len(evaluating.ends) == len(evaluating.trajectories):
            evaluating.done.set()

    def waits(self) -> list[Wait]:
        """The work that the workers have, and that waits for one. Since the last group closed."""
        seconds = asyncio.get_running_loop().time() - self._closed_at
        waits = [
            Wait(f"{_words(items)} at {ref.name}", seconds, actor=ref.name)
            for writer, (ref, _) in self._lives.items()
            if (items := self._assignment.open_items(writer))
        ]
        if waiting := self._assignment.waiting:
            what = f"a rollout worker for {waiting} groups, or trajectories of an evaluation"
            waits.append(Wait(what, seconds, actor="rollout workers"))
        waits += [Wait(f"{name}, which has not begun", seconds, actor=name) for name in sorted(self._absent)]
        return waits

    # ------------------------------------------------------------------ sending

    async def _send(self, dealt: Mapping[str, Sequence[GroupKey | int]]) -> None:
        for writer, items in dealt.items():
            numbers = [item for item in items if isinstance(item, int)]
            if numbers:
                self._background(self._evaluate_at(writer, numbers), "evaluation")
            groups = [self._groups[item] for item in items if not isinstance(item, int)]
            for step in dict.fromkeys(group.step for group in groups):
                await self._begin_at(writer, [group for group in groups if group.step == step])

    async def _begin_at(self, writer: str, groups: Sequence[GroupWork]) -> None:
        """Begins groups of one step."""
        ref, _ = self._lives[writer]
        first = groups[0]
        queries = [(group.position, group.query) for group in groups]
        submitted = [group.query.id for group in groups if group.submitted]
        logged = {group.query.id: group.logged for group in groups if group.logged}
        sessions = [group.query.id for group in groups if group.is_session]
        # The number of trajectories is one for all groups whose workflow has still to run.
        drawn = (group.trajectories for group in groups if not (group.logged or group.is_session))
        learnt = next((group.success_state for group in groups if group.success_state), None)
        trajectories = next(drawn, 1)
        try:
            await ref.api.start_step(
                writer,
                first.step,
                queries,
                trajectories,
                first.versions,
                submitted,
                logged,
                sessions,
                learnt,
            )
        except (ActorDead, CallTimeout, WorkerReplaced) as error:
            await self._lose(writer, error)


def _reason(error: FlexmarlError | None) -> str:
    if error is None:
        return "it ended"
    return error.reason if isinstance(error, ActorDead) else text_of(error)


def _words(items: Sequence[GroupKey | int]) -> str:
    groups = [item[1] for item in items if not isinstance(item, int)]
    trajectories = len(items) - len(groups)
    names = ", ".join(groups[:_SHOWN]) + (" ..." if len(groups) > _SHOWN else "")
    parts = [f"{len(groups)} {'group' if len(groups) == 1 else 'groups'} ({names})"] if groups else []
    noun = "trajectory" if trajectories == 1 else "trajectories"
    parts += [f"{trajectories} {noun} of an evaluation"] if trajectories else []
    return " and ".join(parts)
