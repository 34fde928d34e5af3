"""A rollout worker: runs the user's workflow for every query and trajectory that the orchestrator deals to it.

    start_step ─> a task per group ─> a task per trajectory ─> turns at the instances of the agents' policies
                        │
                        └─ when `group.py` has settled it: samples to the store, GroupClosed to the orchestrator

All trajectories of a step run at once; a turn waits only for its route: for the version of its agent's policy, and for
an instance that the router chooses. The turn goes straight to the instance, and its tokens come straight back. A turn
whose instance is lost asks for another route. A trajectory's workflow
runs in a task of its own. After its deadline nothing waits for that task: it may hang, or ignore its cancellation, and
its group continues without it.

A group's samples and its report reach the store in one put. If this process dies between that and ``group_closed``, the
orchestrator finds the report there; groups without one are begun again by another worker.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from statistics import fmean
from typing import Any

from ...core.actor import Actor, endpoint
from ...core.base.task_groups import first_error
from ...core.base.texts import text_of
from ...core.errors import ActorDead, FlexmarlError, origin_of
from ...core.waits import Wait
from ..columns.store_client import ExperienceWriter, segment_directories, writer_node
from ..deadline import Deadline
from ..environments.tree_play import TreeEnd
from ..errors import (
    NotJudged,
    RecipeError,
    SessionUnrewarded,
    WorkerReplaced,
    WriterRetired,
)
from ..filters.group_filter import GroupFilter
from ..gateway.carried import answer_carried
from ..gateway.http_app import application
from ..messages import (
    CarriedAnswer,
    CarriedRequest,
    EvaluationEnd,
    EvaluationTrajectory,
    LoggedTrajectory,
    Query,
    RolloutApi,
    SessionRewards,
    TrajectoryFailure,
    VersionRange,
    WorkerIncarnation,
    refuse_equal_ids,
)
from ..names import PolicyName, Step, Version
from ..recipe.missing_await import await_hint_of
from ..recipe.recipe import Recipe
from ..recipe.user_traceback import headline
from ..run_events import ActorEndedBadly
from ..trees.success_model import SuccessModel
from ..workflow import Rewards
from .agent_handles import AgentHandles
from .block_watch import BlockWatch, report_file
from .groups.exploring import explore
from .groups.group import Abort, Close, Decision, Drop, Group, GroupRules, Start
from .groups.group_run import GivenUp, GroupClosingRules, GroupRun, RewardsAwaited, TrajectoryEnd
from .logged_turns import take_logged
from .outside_rewards import OutsideRewards
from .outside_sessions import LIMIT as SESSION_LIMIT
from .outside_sessions import OutsideSessions
from .rollout_setup import RolloutSetup, sides_of
from .rollout_spans import RolloutSpans
from .rollout_waits import RolloutWaits
from .served_agents import served_agents
from .services.service import ServiceWorker
from .services.services import WorkflowServices
from .services.worker_programs import WorkerPrograms
from .trajectory import Trajectory, where_it_hangs
from .trajectory_play import TrajectoryPlay
from .trajectory_records import TrajectoryRecords
from .trajectory_rewards import TrajectoryRewards, trajectory_rewards
from .tree_rewards import tree_rewards
from .turn_generation import TurnGeneration
from .turn_routes import TurnRoutes

# The store and the orchestrator answer in milliseconds; this catches one that hangs.
_ANSWER_TIMEOUT_S = 300.0
_GIVE_UP_S = 1.0
_LAST_RECORDS_S = 5.0


class Rollout(Actor, RolloutApi):
    """Runs the workflow: its groups and their trajectories.

    It is one class because groups and trajectories end together: each looks for the others in one table.
    """

    def __init__(self, setup: RolloutSetup) -> None:
        """Raises RecipeError if the recipe can't be loaded."""
        self._setup = setup
        self._config = setup.config
        self._agents = setup.agents
        self._recipe = self.load_recipe()
        self._play = TrajectoryPlay(self._recipe, setup.config, setup.agents)
        self._closing = GroupClosingRules(
            {agent: settings.credit for agent, settings in setup.agents.items()},
            [GroupFilter(settings.label, settings.load(self._recipe)) for settings in setup.config.filters],
            frozenset(agent for agent, settings in setup.agents.items() if not settings.trained),
            setup.replays,
            sides_of(setup.agents),
        )
        self._trained = {
            agent: settings.policy for agent, settings in setup.agents.items() if settings.trained
        }
        self._explorers = {
            settings.policy: settings.explorer
            for settings in setup.agents.values()
            if settings.explorer is not None
        }
        self._groups: dict[tuple[Step, str], GroupRun] = {}
        self._workflows: set[asyncio.Task[TrajectoryRewards]] = set()
        self._waits = RolloutWaits(self._recipe.folder, setup.config)

    def load_recipe(self) -> Recipe:
        """Called once. Raises RecipeError."""
        return Recipe(self._setup.recipe)

    async def on_start(self) -> None:
        places = segment_directories(self.system.directory, self._setup.store_dir)
        self.writer = f"{self.ref.name}-{self.system.new_id()}"
        node = writer_node(self.system, self.writer, f"{self.ref.name}-", encrypted=self._setup.encrypted)
        self._experience = ExperienceWriter(self._setup.store, self.writer, places, node)
        self._outside = OutsideRewards(
            self._setup.store, self.writer, self._agents, self._config.late_rewards_after_s
        )
        self.background(self._outside.run(), "outside rewards")
        self._routes = TurnRoutes(self._setup.router, self.ref.name)
        await self._routes.open()
        self.background(self._routes.run(), "routes")
        self._spans = RolloutSpans(self.system.spans, self.ref.name)
        self._records = TrajectoryRecords(self._setup, self.system.run_blocking)
        self.background(self._records.run(), "records")
        self._turns = TurnGeneration(
            self._setup, self.ref, self.system.clock, self._routes, self._waits, self._spans, self._records
        )
        number = _worker_number(self.ref.name)
        self._services = WorkflowServices(
            ServiceWorker(self._setup, number, self.writer, self._recipe.folder, self.system, self._waits)
        )
        server = self._services.of(WorkerPrograms).server
        self._sessions = OutsideSessions(self._setup.gateway, server, self._agents, self.ref)
        self._carried_to = server.application
        if self._setup.serves:
            served = served_agents(
                self._turns.generate, self._agents, self._config.trajectory_timeout_s, self.writer
            )
            self._carried_to = application(served)
        self._services.enter(None)
        with self._waits.setup():
            await self._recipe.setup(self._config.setup_timeout_s)
        self._block_watch = BlockWatch(self._recipe.folder, report_file(self._setup.logs, self.ref.name))

    async def on_stop(self) -> None:
        await self._records.drain(_LAST_RECORDS_S)
        self._experience.close()
        self._routes.close()
        for workflow in self._workflows:
            workflow.cancel()
        if self._workflows:  # tasks that ignore cancellation end with the process
            await asyncio.wait(self._workflows, timeout=_GIVE_UP_S)
        try:
            await self._recipe.teardown(_GIVE_UP_S)
        except RecipeError as error:
            await self._report(text_of(error).partition("\n")[0])
            raise
        finally:
            self._block_watch.stop()
            await self._services.close()

    async def _report(self, problem: str) -> None:
        """Notifies the console of an end that is not in good order."""
        if self._setup.console is not None:
            with suppress(FlexmarlError):  # it may be gone
                event = ActorEndedBadly(self.ref.name, problem)
                await self._setup.console.tell("event", event, timeout_s=_GIVE_UP_S)

    @endpoint
    async def enlist(self) -> AsyncGenerator[WorkerIncarnation]:
        yield WorkerIncarnation(self.writer, self.system.incarnation)
        await asyncio.Event().wait()

    @endpoint
    async def start_step(
        self,
        writer: str,
        step: Step,
        queries: list[tuple[int, Query]],
        trajectories: int,
        versions: dict[PolicyName, VersionRange],
        submitted: list[str] | None = None,
        logged: dict[str, list[LoggedTrajectory]] | None = None,
        sessions: list[str] | None = None,
        success_state: list[float] | None = None,
    ) -> None:
        self._check_incarnation(writer)
        refuse_equal_ids([query for _, query in queries], f"step {step}")
        config = self._config
        drawn = GroupRules(
            size=trajectories,
            extra=config.extra_trajectories,
            oversampled=config.oversampled,
            minimum=config.min_trajectories,
            max_replacements=config.max_replacements,
        )
        model = SuccessModel(success_state or ()) if config.tree is not None else None
        for position, query in queries:
            ended = (logged or {}).get(query.id, ())
            is_session = query.id in (sessions or ())
            rules = GroupRules(size=len(ended) or 1) if ended or is_session else drawn
            is_submitted = query.id in (submitted or ())
            # An answer is for a person: it is there when the rewards alone are missing.
            grace_s = 0.0 if is_submitted else None if self._setup.steps_wait else config.reward_grace_s
            run = GroupRun(
                step, query, position, versions, Group(rules), self.system.clock, is_submitted, grace_s
            )
            run.logged = ended
            is_let_go = grace_s is not None and not self._setup.steps_wait
            run.leaves_out_late = is_let_go or config.late_rewards_after_s is not None
            run.is_session = is_session
            # An answer to a program is one line of the policy's own turns.
            if not (ended or is_session or is_submitted):
                run.rule, run.demonstration = config.tree, self._play.demonstration_of(query)
                run.model, run.explores = model, config.explorations
            self.background(self._run_group(run), f"group {query.id}")

    @endpoint
    async def give_up(self, step: Step, query: str, reason: str) -> None:
        if (run := self._groups.get((step, query))) is not None:
            run.ends.put_nowait(GivenUp(reason))

    @endpoint
    async def evaluate(
        self,
        writer: str,
        step: Step,
        trajectories: list[EvaluationTrajectory],
        versions: dict[PolicyName, Version],
    ) -> list[EvaluationEnd]:
        self._check_incarnation(writer)
        exactly = {policy: VersionRange.exactly(version) for policy, version in versions.items()}
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._run_evaluation(step, work, exactly)) for work in trajectories
                ]
        return [task.result() for task in running]

    @endpoint
    async def carry(self, request: CarriedRequest) -> AsyncGenerator[CarriedAnswer]:
        async with aclosing(answer_carried(self._carried_to, request)) as parts:
            async for part in parts:
                yield part

    @endpoint
    async def settle_session(self, session: str, rewards: SessionRewards | None) -> str | None:
        return self._sessions.settle(session, rewards)

    @endpoint
    async def lose_sessions(self, reason: str) -> None:
        self._sessions.lose(reason)

    @endpoint
    async def take_text(self, stream: int, start: int, text: str) -> None:
        self._turns.texts.take(stream, start, text)

    def _check_incarnation(self, writer: str) -> None:
        """Raises WorkerReplaced if ``writer`` is not this life."""
        if writer != self.writer:
            raise WorkerReplaced(self.writer, writer)

    def statistics(self) -> Mapping[str, float]:
        """Trajectories that are not in the run's file of trajectories, though they should be."""
        return {"dropped_records": self._records.dropped} if self._setup.archive is not None else {}

    def progress(self) -> int:
        """Turns, or parts of them, and trajectories that have ended."""
        return self._waits.ended

    def waits(self) -> list[Wait]:
        return self._waits.current()

    # ------------------------------------------------------------------ one group, one trajectory

    async def _run_evaluation(
        self, step: Step, work: EvaluationTrajectory, versions: dict[PolicyName, VersionRange]
    ) -> EvaluationEnd:
        trajectory = Trajectory(work.query, None, work.number, versions, work.temperature)
        end = await self.run_trajectory(trajectory)
        self._records.evaluated(step, end)
        if end.failure is not None:
            return EvaluationEnd({}, {}, end.failure)
        rewards = trajectory.rewards
        of_turns = {f"turn_reward/{agent}": fmean(amounts) for agent, amounts in rewards.of_turns.items()}
        return EvaluationEnd(rewards.before_punishment.by_agent, {**rewards.metrics, **of_turns})

    async def _run_group(self, run: GroupRun) -> None:
        key = run.step, run.query.id
        self._groups[key] = run
        try:
            await self._settle_group(run)
        finally:
            if self._groups.get(key) is run:
                del self._groups[key]

    async def _settle_group(self, run: GroupRun) -> None:
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                decisions = await explore(run, self._explorers, self._closing.trained, self.run_trajectory)
                while True:
                    for decision in decisions:
                        match decision:
                            case Start(number):
                                work = self._run_member(run, number, run.begin(number))
                                run.tasks[number] = tasks.create_task(work)
                            case Abort(number):
                                run.tasks[number].cancel()
                            case Close(numbers):
                                await self._close_group(run, numbers)
                            case Drop(reason):
                                await self._close_group(run, [], run.with_late(reason))
                    if run.group.settled:
                        return  # the task group waits for oversampled trajectories that are kept
                    if run.awaits_rewards and not run.announced:
                        await self._announce(run)
                    decisions = self._take(run, await run.ends.get())

    async def _run_member(self, run: GroupRun, number: int, trajectory: Trajectory) -> None:
        if run.logged:
            take_logged(trajectory, run.logged[number], self._agents)
            for turn, (_, ended, *_) in zip(run.logged[number].turns, trajectory.ended_turns(), strict=True):
                self._records.note_prompt(trajectory, ended.request.sample_id, turn.prompt)
            run.ends.put_nowait(TrajectoryEnd(trajectory))
        else:
            run.ends.put_nowait(await self.run_trajectory(trajectory))

    async def _announce(self, run: GroupRun) -> None:
        """Reports that the group lacks nothing but rewards from outside. Messages to the orchestrator keep their order:
        this one is there before ``admit``."""
        run.announced = True
        waiting = run.waiting(self._trained)
        await self._setup.orchestrator.tell("group_waits", self.writer, waiting, timeout_s=_ANSWER_TIMEOUT_S)

    def _take(self, run: GroupRun, event: TrajectoryEnd | RewardsAwaited | GivenUp) -> list[Decision]:
        match event:
            case TrajectoryEnd():
                return self._take_end(run, event)
            case RewardsAwaited(number):
                run.awaited.add(number)
                return []
            case GivenUp(reason):
                return run.give_up(reason)

    def _take_end(self, run: GroupRun, end: TrajectoryEnd) -> list[Decision]:
        number = end.trajectory.number
        run.end(number, end)
        if end.failure is None:
            return run.group.succeeded(number)
        if end.late:
            run.late += 1
        else:
            run.failures.append(end.failure)
        return run.group.failed(number, replacement=end.replacement)

    async def _close_group(self, run: GroupRun, numbers: Sequence[int], dropped: str = "") -> None:
        samples, closed = run.close(numbers, self._closing, dropped)
        if samples and (reason := await self._refusal(run)):
            run.late += len(numbers)
            samples, closed = run.close([], self._closing, reason)
        if samples:
            try:
                with self._waits.of_actor("room for the samples of a group", self._setup.store.name):
                    await self._experience.put(samples, closed)
            except WriterRetired as retired:  # this worker was silent for long
                raise ActorDead(self.ref.name, str(retired)) from retired
        self._records.closed(run)
        await self._setup.orchestrator.within(_ANSWER_TIMEOUT_S).group_closed(self.writer, closed)

    async def _refusal(self, run: GroupRun) -> str:
        """The reason for which no step can train the group's samples; empty if one waits for them."""
        if self._setup.steps_wait or not (run.announced or run.submitted):
            return ""
        oldest = run.oldest(self._trained)
        orchestrator = self._setup.orchestrator.within(_ANSWER_TIMEOUT_S)
        with self._waits.of_actor(
            "a step for a group that waited for its rewards", self._setup.orchestrator.name
        ):
            return await orchestrator.admit(self.writer, run.step, run.query.id, oldest)

    async def run_trajectory(self, trajectory: Trajectory) -> TrajectoryEnd:
        """Runs until the workflow ends or its deadline has passed. Raises RecipeError, since such a run can't succeed.

        Cancellation and the deadline cancel the workflow, and with it the turns it waits for, at the instances too.
        """
        limit_s = self._config.trajectory_timeout_s
        work = asyncio.create_task(self._run_workflow(trajectory), name=f"workflow {trajectory.name}")
        self._workflows.add(work)
        work.add_done_callback(self._workflow_ended)
        self._waits.began(trajectory, work)
        trajectory.deadline = Deadline(limit_s)
        ends: set[asyncio.Future[Any]] = {work, trajectory.deadline.overran}
        try:
            begin = self._spans.now()
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._spans.trajectory(trajectory, begin)
            if work.done():
                return self._end(trajectory, work)
            hang = where_it_hangs(self._recipe.folder, work)
            what = f"not done within rollout.trajectory_timeout_s={limit_s:g}"
            failure = TrajectoryFailure(trajectory.name, what, self._recipe.frames(hang))
            return TrajectoryEnd(trajectory, failure, self._config.on_timeout == "replace", hang)
        finally:
            self._waits.over(trajectory)
            trajectory.close()
            trajectory.deadline.stop()
            work.cancel()

    async def _run_workflow(self, trajectory: Trajectory) -> TrajectoryRewards:
        self._services.enter(trajectory)
        handles = AgentHandles(self._turns.generate, self._agents, trajectory)
        assert trajectory.deadline is not None, "it runs"
        if trajectory.is_session:  # the program's time
            with trajectory.deadline.paused(), self._waits.judge(trajectory, SESSION_LIMIT):
                returned: Rewards | TreeEnd = await self._sessions.play(trajectory, handles)
        else:
            returned = await self._play.play(trajectory, handles)
        self._spans.between_turns(trajectory)
        self._waits.returned(trajectory)
        trajectory.close()
        trajectory.leave_out(returned)
        trajectory.check_columns()
        if isinstance(returned, TreeEnd):
            return tree_rewards(
                trajectory.name,
                returned,
                trajectory.turns_to_reward(),
                self._agents,
                punish=True,
                left_out=trajectory.left_out,
            )
        # This time is the judge's.
        with trajectory.deadline.paused(), self._waits.judge(trajectory, self._outside.limit):
            outside = await self._outside.of(trajectory)
        return trajectory_rewards(
            trajectory.name,
            returned,
            trajectory.turns_to_reward(),
            self._agents,
            punish=not trajectory.is_evaluation,  # evaluations report the rewards as they were given
            outside=outside,
            left_out=trajectory.left_out,
        )

    def _workflow_ended(self, work: asyncio.Task[TrajectoryRewards]) -> None:
        self._workflows.discard(work)
        if not work.cancelled():
            work.exception()  # marks it as retrieved: after its deadline no task waits for the workflow

    def _end(self, trajectory: Trajectory, work: asyncio.Task[TrajectoryRewards]) -> TrajectoryEnd:
        """The end of a trajectory whose workflow has ended. User code: it may fail in any way, the others continue."""
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is None:
            self._turns.trajectory_ended(trajectory)
            trajectory.rewards = work.result()
            return TrajectoryEnd(trajectory)
        if isinstance(error, RecipeError):
            if line := self._recipe.line(error):
                raise RecipeError(f"{error} ({line})") from error
            raise error
        _, kind, text = origin_of(error, self.ref.name)
        what = headline(kind, text + await_hint_of(error), error)
        failure = TrajectoryFailure(trajectory.name, what, self._recipe.frames(error))
        agent = trajectory.agent_that_overran(error)
        on_timeout = agent and (self._agents[agent].sampling.on_timeout or self._config.on_timeout)
        late = isinstance(error, NotJudged) and trajectory.leaves_out_late
        late = late or isinstance(error, SessionUnrewarded)
        return TrajectoryEnd(trajectory, failure, on_timeout == "replace", error, late)


def _worker_number(name: str) -> int:
    """That of ``rollout-3``; 0 for a worker of another name."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdigit() else 0
