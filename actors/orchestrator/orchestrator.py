"""The orchestrator: carries out the decisions of ``pipeline.py``.

    decision               calls                              then reports to the pipeline
    StartStep, Replacement start_step of rollout workers           (group_closed, by the workers)
    (group_waits, admit)   give_up of rollout workers              (group_closed, by the workers)
    Train                  trainer.train                           trained
    StepOptimizer          trainer.optimizer_step                  stepped
    Publish                router.publish                          applied
    Save                   trainer.save                            saved
    CommitCheckpoint       (checkpoint.commit, on disk)            committed
    Evaluate               evaluate of rollout workers             evaluated
    StepComplete           console.step                            -
    Finish                 console.ended                           -
    CarryOn                (open groups belong to the next step)   -

The concurrent parts, and the event that unblocks each:

    run              waits for ``_finished``: set by Finish, or by too many failed trajectories
    a step's groups  run in the rollout workers (``rollout_workers.py``); their turns wait there for the version of
                     their policy, and for an instance
    Train            waits in the trainer, one computation at a time, and in the store for columns of an external writer
    StepOptimizer    waits in the trainer behind the policy's micro-batches, and for the store's commit
    Publish          waits for every instance of the policy; the other policies continue
    StartStep,       wait for the draw before: the recipe's query source is called in the order of the steps
    Replacement
    CommitCheckpoint waits for the one before (``RunCheckpoints.commit``): checkpoints are completed in the order of
                     their steps, however slow the disk
    Evaluate         waits for its trajectories; the pipeline begins no step before its end

Each decision runs as a task of its own; the order of two messages to the same actor is the order of the
decisions. A task that raises ends the run.

From a query's text to the optimizer step, with mode strict. Here:

    Pipeline.start              decides StartStep, with the versions that generate the step's turns
    RunQueries.draw             has the recipe's query source give the queries, in a thread (``RecipeData.call``)
    RolloutWorkers.begin        deals each query to the worker with the fewest open groups (``WorkAssignment.deal``)

In a rollout worker, where all groups of the step run at once:

    Rollout.start_step          begins a task per group; ``Group.start`` decides how many trajectories it gets
    Recipe.workflow             the user's function; asks by ``AgentHandle.generate`` -> ``TurnGeneration.generate``
    turn_request                checks prompt and options. A text stays text: the instance has the tokenizer
    TurnRoutes.route            asks the router: ``Router.requested`` queues the turn, ``Router.decisions`` finds it an
                                instance that serves its version. The trajectory's deadline is paused meanwhile
    Instance.generate           straight from the worker to the instance: ``prompt_tokens`` encodes, the engine samples.
                                It checks the version again, as weights may have arrived since the route
    ResumableTurn.take          keeps the very tokens and their log-probabilities; a lost instance means another route
    trajectory_rewards          gives every turn its reward, once the workflow has returned (or a program outside the
                                run has judged: ``OutsideRewards.of``)
    GroupRun.close              once ``Group`` has settled it: ``assign_credit`` compares the rewards and gives each
                                turn its advantage. A trainer may only transform it (``transforms.py``)
    ExperienceWriter.put        copies tokens into shared memory and sends references, with the group's report.
                                ``Store.put`` answers when both are in the journal. Only then ``group_closed`` is sent
                                here, so that no row is counted before it is durable

Here, and in the trainer:

    Pipeline.group_closed       counts the rows, and decides Train for each micro-batch: other groups still run
    Trainer.train               leases the rows under a fence (``Store.lease``), in the order of the decisions
    ExperienceReader.samples    maps the tokens; ``TrainingPool.accumulate`` computes where the policy lies
    TorchPolicy.accumulate      forward and backward (``batch_loss``). The gradient is a sum: nothing is divided yet
    Pipeline.trained            decides StepOptimizer, once the step is rolled out and all its rows are trained
    TorchPolicy.optimizer_step  divides once by the step's tokens or sequences, clips, AdamW
    Trainer.optimizer_step      publishes the weights, and at the same time sends the fences to ``Store.commit``; with a
                                shared pool, when the state is whole in the host's memory
    Pipeline.stepped            decides Publish: ``RouterActor.publish`` returns when every instance has the version

Then ``Pipeline.applied`` lets turns of the next version begin.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

from ...core.actor import Actor, endpoint
from ...core.base.task_groups import first_error
from ...core.system import ActorSystem
from ...core.waits import OpenWaits, Wait
from ..errors import ProtocolViolation, QueriesRefused, SamplesUnreachable, StoreError, TooFewRows
from ..messages import (
    WORK_TIMEOUT_S,
    GroupClosed,
    GroupWaiting,
    LoggedGroup,
    OrchestratorApi,
    Published,
    Query,
    QueryAnswer,
    RunResult,
)
from ..names import PolicyName, Step, Version
from ..recipe.recipe import Recipe
from ..run_events import Evaluated, WorkerLost
from ..spans import record as record_span
from ..spans import record_time
from ..step_metrics import StepMetrics
from .closing_order import ClosingOrder
from .decisions import (
    CarryOn,
    CommitCheckpoint,
    Decision,
    Evaluate,
    Finish,
    Publish,
    Replacement,
    Save,
    StartStep,
    StepComplete,
    StepOptimizer,
    Train,
    Work,
    wait_of,
)
from .failures import Failures
from .fine_tuning import fine_tune
from .group_starts import GroupStarts
from .loose_rollout import LooseRollout
from .opponents.opponents import Opponents
from .orchestrator_setup import OrchestratorSetup
from .pipeline import Pipeline
from .queries.run_queries import RunQueries
from .recorder import StepRecord
from .replay.replay_buffer import ReplayBuffer
from .replay.replay_config import NoReplayConfig
from .rollout_workers import GroupKey, Listener, RolloutWorkers
from .run_checkpoints import RunCheckpoints
from .run_evaluations import RunEvaluations
from .run_parts import RunParts
from .step_records import StepRecords

_LOSS_KNOWN_S = 60.0
# The samples of a Train may be out of reach for two reasons. If they are lost, ``group_lost`` says so; if only the way
# to their host fails for a moment, no event ever comes. So it is tried again after a short while, in both cases.
_TRAIN_AGAIN_S = 0.1


class Orchestrator(Actor, OrchestratorApi, Listener):
    """Carries out the decisions of the pipeline, and reports their results to it.

    It is one class because each decision is one method, and all of them report to one pipeline.
    """

    def __init__(self, setup: OrchestratorSetup) -> None:
        """Raises RecipeError if the recipe can't be loaded."""
        self._setup, self._plan, self._console = setup, setup.plan, setup.console
        self._router = setup.router.within(WORK_TIMEOUT_S)
        self._trainer = setup.trainer.within(WORK_TIMEOUT_S)
        self._recipe = Recipe(setup.recipe)
        resumed, tell = setup.resume_from, self._tell_console

        def system() -> ActorSystem:
            return self.system  # there is one once the actor runs

        self._workers = RolloutWorkers(
            setup.workers, setup.store, setup.supervisor, self, lambda work, name: self.background(work, name)
        )
        self._queries = RunQueries(
            self._recipe,
            system,
            setup.data_timeout_s,
            setup.plan,
            setup.evaluation.success,
            resumed.queries if resumed else None,
            predicts=setup.predicts_success,
        )
        self._opponents = Opponents(setup.opponents, self._recipe, self._trainer, self._router, tell, system)
        self._policy_of = setup.policy_of
        self._agents = [*self._policy_of, *self._opponents.agents]
        self._replay: ReplayBuffer | None = None
        if not isinstance(setup.replay, NoReplayConfig):
            kept = resumed.replay if resumed else None
            self._replay = ReplayBuffer(setup.replay, setup.plan.max_staleness, self._policy_of, kept)
        self._failures, self._records = Failures(setup.max_failed_share), StepRecords()
        self._closing = ClosingOrder(setup.group_order)
        parts = RunParts(
            setup, self._queries, self._workers, self._opponents, self._records, self._failures, system, tell
        )
        self._loose = LooseRollout(parts, lambda: self._running, self._begin_loose, self._carry_out)
        self._starts = GroupStarts(parts, self._closing, self._loose.groups)
        self._evaluations = RunEvaluations(parts)
        self._checkpoints = RunCheckpoints(parts, self._replay)
        self._queries.submissions.notify = self._begin_submitted
        self._pipeline: Pipeline | None = None
        self._waits, self._decisions_done = OpenWaits(), 0
        self._unreported: dict[Step, StepMetrics] = {}
        self._published: dict[PolicyName, Published] = {}
        self._not_trained_since: dict[PolicyName, float] = {}
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop_asked = self._finishing = False
        self._stop = asyncio.Event()

    # ------------------------------------------------------------------ endpoints

    @endpoint
    async def start(self) -> None:
        self.background(self._run(), "run")

    @endpoint
    async def stop(self) -> None:
        self._stop_asked = True
        self._stop.set()
        if self._pipeline is not None and not self._finished.done():
            self._carry_out(self._pipeline.request_stop())
            self._refuse_late("the run is being stopped")

    @endpoint
    async def submit(
        self, queries: list[Query], judged: bool = True, *, sessions: bool = False
    ) -> list[QueryAnswer]:
        return await self._queries.submissions.submit(queries, judged=judged, sessions=sessions)

    @endpoint
    async def submit_logged(self, groups: list[LoggedGroup]) -> list[QueryAnswer]:
        for query, turn in ((group.query.id, turn) for group in groups for turn in group.turns):
            policy = self._policy_of[turn.agent]
            newest = self._published[policy].version if policy in self._published else Version(0)
            if turn.version is not None and turn.version > newest:
                raise QueriesRefused(
                    f"{query}: agent {turn.agent} has version {turn.version}, and the newest of policy "
                    f"{policy} is {newest}: leave the version out if another run has generated the answer"
                )
        return await self._queries.submissions.submit_logged(groups)

    @endpoint
    async def group_waits(self, writer: str, group: GroupWaiting) -> None:
        if not self._workers.has(writer, (group.step, group.query)) or self._finished.done():
            return
        self._queries.submissions.waits(group)
        if self._plan.mode == "async":
            await self._loose.wait(writer, group)

    @endpoint
    async def admit(self, writer: str, step: Step, query: str, oldest: dict[PolicyName, Version]) -> str:
        key = step, query
        if not self._workers.has(writer, key) or self._finished.done():
            return "it is no longer this worker's"
        return self._loose.admit(key, oldest) if key in self._loose.groups else ""

    @endpoint
    async def group_closed(self, writer: str, group: GroupClosed) -> None:
        self._decisions_done += 1
        # False for a worker that was given up and still sends: its group has begun again elsewhere, and counts once.
        if self._workers.closed(writer, group):
            await self.closed(group)

    # ------------------------------------------------------------------ rollout_workers.Listener

    @property
    def finished(self) -> bool:
        return self._finishing or self._finished.done()

    async def worker_lost(self, event: WorkerLost, groups: Mapping[Step, int]) -> None:
        for step, count in groups.items():  # that of a loose group may have ended
            self._records.note(step, partial(_count_restarted, count))
        await self._tell_console("event", event)

    async def closed(self, group: GroupClosed) -> None:
        if self._finished.done():
            return  # the run has failed: groups that still close are not needed
        key = group.step, group.query
        submitted = self._queries.closed(group, self._loose.groups.step_of(key))
        if self._replay is not None and group.finished is not None:
            self._replay.closed(group.finished)
        if key in self._loose.groups:
            await self._loose.end(group, submitted=submitted)
            return
        now, step = self.system.clock(), self._loose.groups.step_of(key)
        self._records.note(step, lambda record: record.group_closed(group, now, submitted=submitted))
        if key[0] in self._records:  # games of a step that is complete are counted
            self._opponents.closed(group)
        for event in self._failures.add(group.failures, group.step, count=not submitted):
            await self._tell_console("event", event)
        if self._finished.done():
            return
        when, trajectories = f"step {step}", self._plan.queries * self._setup.trajectories_per_query
        failed = self._records[step].failed if step in self._records else 0
        if (error := self._failures.too_many(when, failed, trajectories)) is not None:
            self._finished.set_exception(error)
            return
        # None, one or several: in deterministic runs a group waits here for those before it.
        for closed in self._closing.closed(group):
            samples, key = self._by_policy(closed), (closed.step, closed.query)
            step, held = self._loose.groups.step_of(key), self._loose.groups.is_held(key)
            self._loose.groups.close(key)
            self._carry_out(
                self._running.group_closed(step, samples, dropped=bool(closed.dropped), held=held)
            )

    def group_lost(self, group: GroupClosed) -> None:
        self._closing.lost(group)
        key, groups = (group.step, group.query), self._loose.groups
        groups.reopen(key)
        self._running.group_lost(groups.step_of(key), self._by_policy(group), held=groups.is_held(key))
        self._opponents.lost(group)

    def ended_with_worker(self, key: GroupKey) -> GroupClosed | None:
        return self._loose.groups.lost(key, "late: its rollout worker was lost while it waited for rewards")

    # ------------------------------------------------------------------ groups

    def _begin_submitted(self) -> None:
        """Begins submitted queries at once, where the mode allows it."""
        if self._plan.mode == "async" and self._records.newest and not self.finished:
            self._loose.begin_submitted()

    def _begin_loose(self, step: Step, queries: Sequence[Query]) -> None:
        self._tasks.create_task(self._starts.begin(step, queries), name="submitted queries")

    def _by_policy(self, group: GroupClosed) -> dict[PolicyName, int]:
        samples = Counter[PolicyName]()
        for agent, count in group.samples.items():
            samples[self._policy_of[agent]] += count
        return dict(samples)

    # ------------------------------------------------------------------ for people

    def progress(self) -> int:
        """Decisions that are carried out, and groups that have closed."""
        return self._decisions_done

    def waits(self) -> list[Wait]:
        """The recipe's data, decisions that are being carried out, groups that have not closed, and steps without a
        sample."""
        return [
            *self._queries.waits(),
            *self._waits.current(),
            *self._workers.waits(),
            *(self._loose.waits() if self._pipeline else ()),
        ]

    # ------------------------------------------------------------------ the run

    async def _run(self) -> None:
        await self._queries.start()
        resumed = self._setup.resume_from
        is_tuned = resumed is None and await fine_tune(
            self._setup, self._recipe, self._trainer, self._tell_console, lambda: self._stop_asked
        )
        await self._workers.start()
        versions = await self._publish_all()
        if is_tuned and self._plan.save_every:
            await self._save_fine_tuned(versions)
        if self._setup.serves:
            await self._serve()
            return
        self._started = self._last_end = self.system.clock()
        before = resumed.step if resumed else Step(0)
        plan = replace(
            self._plan,
            first_step=Step(before + 1),
            evaluate_first=self._plan.is_evaluation_due(before, self._evaluations.metrics),
        )
        self._pipeline = Pipeline(plan, versions)
        with first_error():
            async with asyncio.TaskGroup() as self._tasks:
                if self._stop_asked:
                    self._carry_out(self._pipeline.request_stop())
                self._carry_out(self._pipeline.start())
                await self._finished

    async def _serve(self) -> None:
        """Waits until the run is stopped: nothing but its person ends it."""
        await self._tell_console("phase", "serving", None, None)
        await self._stop.wait()
        self._finishing = True
        await self._console.within(WORK_TIMEOUT_S).ended(RunResult(Step(0), True, {}, ""))

    async def _save_fine_tuned(self, versions: dict[PolicyName, Version]) -> None:
        """Makes the checkpoint of step 0. Supervised batches may have taken hours, and the first mistake of a workflow
        shows right after them: a resumed run does not train them again."""
        step = Step(0)
        for policy in versions:
            with self._waits.open(*wait_of(Save(policy, step))):
                await self._checkpoints.save(policy, step)
        with self._waits.open(*wait_of(commit := CommitCheckpoint(step, versions))):
            await self._checkpoints.commit(commit, self._evaluations.metrics)

    async def _publish_all(self) -> dict[PolicyName, Version]:
        """Brings the first weights of every policy to its instances."""
        for policy in self._setup.policies:
            with self._waits.open(f"the first weights of {policy}", actor=self._setup.trainer.name):
                published = await self._trainer.publish(policy)
            with self._waits.open(f"the instances of {policy}", actor=self._setup.router.name):
                await self._router.publish(published)
            await self._take_published(published)
        await self._opponents.start()
        return {policy: published.version for policy, published in self._published.items()}

    async def _take_published(self, published: Published) -> None:
        self._published[published.policy] = published
        await self._opponents.trained(published)

    # ------------------------------------------------------------------ carrying out decisions

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, CarryOn):  # at once: the next event may be the end of such a group
                self._carry_on(decision)
            else:
                self._tasks.create_task(self._do(decision), name=type(decision).__name__)

    def _carry_on(self, decision: CarryOn) -> None:
        count = self._loose.groups.carry_on(decision.step)
        if count != decision.count:
            raise ProtocolViolation(
                f"step {decision.step} carries {decision.count} groups on, and {count} of them are open"
            )
        self._records[decision.step].figures.add("carried_queries", count)

    async def _do(self, decision: Work) -> None:
        span: AbstractContextManager[None] = nullcontext()
        if isinstance(decision, Evaluate | CommitCheckpoint):
            kind = "evaluation" if isinstance(decision, Evaluate) else "checkpoint"
            span = record_time(self.system.spans, self.ref.name, kind, step=decision.step)
        with self._waits.open(*wait_of(decision)), span:
            await self._carry(decision)
        self._decisions_done += 1

    async def _carry(self, decision: Work) -> None:
        match decision:
            case StartStep():
                await self._start_step(decision)
            case Replacement(step):
                await self._replacement(step)
            case Train():
                await self._train(decision)
            case StepOptimizer():
                await self._step_optimizer(decision)
            case Publish():
                await self._publish(decision)
            case Save(policy, step):
                await self._checkpoints.save(policy, step)
                self._carry_out(self._running.saved(policy, step))
            case CommitCheckpoint(step):
                await self._checkpoints.commit(decision, self._evaluations.metrics)
                self._carry_out(self._running.committed(step))
            case Evaluate():
                await self._evaluate(decision)
            case StepComplete():
                await self._step_complete(decision)
            case Finish(last_step):
                self._finishing = True  # the workers may be stopped from now on
                reason = f"the run has ended after step {last_step}"
                await self._loose.end_all(reason)
                self._queries.submissions.end(reason)
                stopped = last_step < self._plan.last_step
                await self._console.within(WORK_TIMEOUT_S).ended(
                    RunResult(last_step, stopped, self._evaluations.metrics, self._checkpoints.newest)
                )
                self._finished.set_result(None)

    async def _start_step(self, decision: StartStep) -> None:
        record = StepRecord(
            decision.step,
            decision.versions,
            self._agents,
            self.system.clock(),
            overlaps_itself=self._plan.mode != "async",
        )
        self._records.begin(record, decision.versions)
        for work in self._opponents.begin(decision.step, decision.versions):
            self._tasks.create_task(work, name="opponent")
        submitted = self._queries.begin(decision.step, decision.versions, decision.queries)
        record.figures.add("submitted_queries", len(submitted))
        self._refuse_late(f"step {decision.step}, the run's last, has begun")
        await self._starts.draw(decision.step, decision.queries - len(submitted), submitted)
        if self._replay is not None and not self._running.begins_no_more:
            newest = {policy: published.version for policy, published in self._published.items()}
            groups = self._replay.take(newest, self._plan.queries)
            record.figures.add("replayed_groups", len(groups))
            for group in groups:
                self._queries.submissions.replay(group)
            self._begin_submitted()

    def _refuse_late(self, reason: str) -> None:
        """Refuses submitted queries that no step will take."""
        if self._running.begins_no_more:
            self._queries.submissions.refuse(f"no further step begins: {reason}")

    async def _replacement(self, step: Step) -> None:
        self._records[step].figures.add("replaced_queries", 1)
        await self._starts.draw(step, 1)

    async def _train(self, decision: Train) -> None:
        try:
            result = await self._trainer.train(decision.policy, decision.version, decision.count)
        except (TooFewRows, SamplesUnreachable) as error:
            await self._train_again(decision, error)
            return
        self._not_trained_since.pop(decision.policy, None)
        record = self._records[decision.step]
        record.trained(decision.policy, result, decision.version, self.system.clock())
        self._carry_out(self._running.trained(decision.policy, decision.step, result.samples))

    async def _train_again(self, decision: Train, error: StoreError) -> None:
        """Samples are lost: their groups begin again once that is known. Raises ``error`` if it is not in time."""
        now = self.system.clock()
        if now - self._not_trained_since.setdefault(decision.policy, now) > _LOSS_KNOWN_S:
            raise error
        await asyncio.sleep(_TRAIN_AGAIN_S)
        self._carry_out(self._running.not_trained(decision.policy, decision.step, decision.count))

    async def _step_optimizer(self, decision: StepOptimizer) -> None:
        await self._opponents.wait_kept(decision.policy)
        result = await self._trainer.optimizer_step(decision.policy, decision.step)
        self._records[decision.step].optimizer_stepped(decision.policy, result, self.system.clock())
        await self._take_published(result.published)
        self._carry_out(self._running.stepped(decision.policy, decision.step))
        await self._loose.give_up_late()

    async def _publish(self, decision: Publish) -> None:
        published = self._published[decision.policy]
        loaded = await self._router.publish(published)
        self._records[decision.step].applied(decision.policy, loaded, self.system.clock())
        self._carry_out(self._running.applied(decision.policy, decision.step, published.version))

    async def _evaluate(self, decision: Evaluate) -> None:
        started = self.system.clock()
        await self._evaluations.evaluate(decision)
        eval_s, figures = self.system.clock() - started, self._evaluations.metrics[decision.step]
        self._last_end += eval_s  # no step is under way: its seconds belong to no step
        await self._tell_console("event", Evaluated(decision.step, eval_s, figures))
        if (metrics := self._unreported.pop(decision.step, None)) is not None:
            await self._tell_console("step", replace(metrics, eval_s=eval_s, evaluation=figures))
        self._carry_out(self._running.evaluated(decision.step))

    @property
    def _running(self) -> Pipeline:
        assert self._pipeline is not None, "the run has not begun"
        return self._pipeline

    async def _step_complete(self, decision: StepComplete) -> None:
        now = self.system.clock()
        record = self._records.pop(decision.step)
        self._closing.end(decision.step)
        record_span(self.system.spans, self.ref.name, "step", record.started, now, step=decision.step)
        metrics = replace(
            record.metrics(decision.versions, decision.carried, self._started, self._last_end, now),
            source=self._queries.end(decision.step),
            by_opponent=self._opponents.metrics(decision.step),
        )
        self._last_end = now
        if decision.evaluated:
            self._unreported[decision.step] = metrics  # its line carries the evaluation too
        else:  # at once: the next decision may be the run's end
            await self._tell_console("step", metrics)
        for step in {decision.step, *self._loose.groups.complete(decision.step)} - self._records.keys():
            await self._workers.forget_step(step, self._loose.groups.open_of(step))
        await self._opponents.write_results()

    # ------------------------------------------------------------------ the console

    async def _tell_console(self, endpoint: str, *args: object) -> None:
        """Sends the console a message. It has the launcher's process, which may be stopped (ctrl-Z) for hours: after a
        window of messages this waits."""
        await self._console.tell(endpoint, *args, timeout_s=WORK_TIMEOUT_S)


def _count_restarted(groups: int, record: StepRecord) -> None:
    record.figures.add("restarted_groups", groups)
