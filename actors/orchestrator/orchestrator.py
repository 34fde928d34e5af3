"""The orchestrator: carries out what ``pipeline.py`` decides.

    decision          asks                                    then tells the pipeline
    StartStep, Replacement rollout.start_step                      (group_closed, by the rollout actor)
    Train             trainer.train                           trained
    StepOptimizer     trainer.optimizer_step                  stepped
    Publish           every instance.apply_weights,           applied
                      then rollout.serve
    Save              trainer.save                            saved
    CommitCheckpoint  (checkpoint.commit, on disk)            committed
    Evaluate          rollout.evaluate                        evaluated
    StepComplete      console.step                            -
    Finish            console.ended                           -

Each decision runs as a task of its own; the order of two messages to the same actor is the order of the
decisions. A task that raises ends the run.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ...core.actor import Actor, endpoint
from ...core.ref import ActorRef
from ...core.task_groups import first_error
from ..errors import RecipeError, TooManyFailures, WrongVersion
from ..messages import (
    ConsoleApi,
    GroupClosed,
    InstanceApi,
    Published,
    Query,
    RolloutApi,
    RunResult,
    TrainerApi,
    TrajectoryFailure,
)
from ..names import AgentName, PolicyName, Step, Version
from ..run_events import CheckpointSaved, CheckpointSaving, Evaluated, SftDone, TrajectoryFailed
from ..step_metrics import StepMetrics
from ..workflow import Recipe, RecipeConfig
from . import checkpoint
from .checkpoint import RunState
from .orchestrator_config import ScheduleConfig
from .pipeline import (
    CommitCheckpoint,
    Decision,
    Evaluate,
    Finish,
    Pipeline,
    Plan,
    Publish,
    Replacement,
    Save,
    StartStep,
    StepComplete,
    StepOptimizer,
    Train,
)
from .query_order import ClosingOrder, QueryOrder
from .recorder import StepRecord

# Long work has long deadlines, queueing for it included: they catch what hangs, not what is slow.
_WORK_TIMEOUT_S = 24 * 3600.0
_WARM_UP_CHUNK = 10


class Orchestrator(Actor):
    """Fulfils ``OrchestratorApi``."""

    def __init__(
        self,
        schedule: ScheduleConfig,
        recipe: RecipeConfig,
        trainer: ActorRef[TrainerApi],
        rollout: ActorRef[RolloutApi],
        instances: dict[str, list[ActorRef[InstanceApi]]],
        console: ActorRef[ConsoleApi],
        checkpoints: str,
        resume_from: RunState | None,
    ) -> None:
        self._schedule = schedule
        self._recipe = Recipe(recipe)
        self._trainer = trainer
        self._rollout = rollout
        self._instances = instances
        self._console = console
        self._checkpoints = Path(checkpoints)
        self._resume_from = resume_from
        self._evaluations = dict(resume_from.evaluations) if resume_from else {}
        self._records: dict[int, StepRecord] = {}
        self._unreported: dict[int, StepMetrics] = {}
        self._published: dict[str, Published] = {}
        self._first_failure: TrajectoryFailure | None = None
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._committing = asyncio.Lock()
        self._drawing = asyncio.Lock()
        self._closing = ClosingOrder(schedule.deterministic)
        self._stop_asked = False
        self._pipeline: Pipeline | None = None
        self._last_checkpoint = ""
        if resume_from is not None:
            self._last_checkpoint = str(checkpoint.committed_folder(self._checkpoints, resume_from.step))

    # ------------------------------------------------------------------ endpoints

    @endpoint
    async def start(self) -> None:
        self.background(self._run(), "run")

    @endpoint
    async def stop(self) -> None:
        self._stop_asked = True
        if self._pipeline is not None and not self._finished.done():
            self._carry_out(self._pipeline.request_stop())

    @endpoint
    async def group_closed(self, group: GroupClosed) -> None:
        if self._finished.done():
            return  # the run has failed, and what still closes is of no use
        record = self._records[group.step]
        record.group_closed(group, time.monotonic())
        for failure in group.failures:
            self._tell_failure(failure, group.step)
        allowed = self._schedule.max_failed_share * self._trajectories_per_step
        if record.failed > allowed:
            failed = f"{record.failed} of {self._trajectories_per_step} trajectories failed"
            self._finished.set_exception(self._too_many_failures(f"step {group.step}: {failed}"))
            return
        for closed in self._closing.closed(group):
            dropped = bool(closed.dropped)
            self._carry_out(self._running.group_closed(closed.step, closed.samples, dropped=dropped))

    # ------------------------------------------------------------------ the run

    async def _run(self) -> None:
        state = self._resume_from
        if state is None:
            await self._sft()
        versions = await self._publish_all()
        self._started = self._last_end = time.monotonic()
        first = state.step + 1 if state else 1
        self._queries = QueryOrder(state.next_position if state else 0)
        plan = Plan(
            mode=self._schedule.mode,
            agents=tuple(self._instances),
            first_step=first,
            last_step=self._schedule.training.steps,
            queries=self._schedule.training.queries_per_step,
            micro_batch=self._schedule.training.micro_batch,
            save_every=self._schedule.checkpoint.every,
            evaluate_every=self._schedule.evaluation.every,
            evaluate_first=self._is_evaluation_due(first - 1),
            max_staleness=self._schedule.max_staleness,
            global_batch=self._schedule.global_batch,
            whole_step=self._schedule.whole_step,
            replacement_queries=self._schedule.replacement_queries,
        )
        self._pipeline = Pipeline(plan, versions)
        with first_error():
            async with asyncio.TaskGroup() as self._tasks:
                if self._stop_asked:
                    self._carry_out(self._pipeline.request_stop())
                self._carry_out(self._pipeline.start())
                await self._finished

    async def _sft(self) -> None:
        """The recipe's supervised batches, in chunks, so that progress shows."""
        for agent, batches in self._schedule.sft_batches.items():
            if batches and not self._recipe.has_sft:
                raise RecipeError(
                    f"agents.{agent}.sft.batches={batches}, but the recipe's workflow.py defines no sft"
                )
            for done in range(0, batches, _WARM_UP_CHUNK):
                if self._stop_asked:
                    return
                await self._console.tell("phase", f"warming up {agent}", done, batches)
                count = min(_WARM_UP_CHUNK, batches - done)
                loss = await self._trainer.within(_WORK_TIMEOUT_S).sft(PolicyName(agent), done, count)
            if batches:
                await self._console.tell("event", SftDone(PolicyName(agent), batches, loss))

    async def _publish_all(self) -> dict[str, int]:
        """The first weights of every agent reach its instances."""
        for agent in self._instances:
            published = await self._trainer.within(_WORK_TIMEOUT_S).publish(PolicyName(agent))
            await self._install(published)
            self._published[agent] = published
        return {agent: published.version for agent, published in self._published.items()}

    async def _install(self, published: Published) -> None:
        """Every instance has applied the weights, and only then turns that wait for them go on."""
        async with asyncio.TaskGroup() as group:
            for instance in self._instances[published.agent]:
                group.create_task(_applied(instance, published))
        await self._rollout.api.serve(published.agent, published.version)

    # ------------------------------------------------------------------ carrying out decisions

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            self._tasks.create_task(self._do(decision), name=type(decision).__name__)

    async def _do(self, decision: Decision) -> None:
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
            case Save(agent, step):
                folder = checkpoint.partial_folder(self._checkpoints, step) / agent
                await self._trainer.within(_WORK_TIMEOUT_S).save(PolicyName(agent), str(folder))
                self._carry_out(self._running.saved(agent, step))
            case CommitCheckpoint():
                await self._commit(decision)
            case Evaluate():
                await self._evaluate(decision)
            case StepComplete():
                self._step_complete(decision)
            case Finish(last_step):
                stopped = last_step < self._schedule.training.steps
                await self._console.within(_WORK_TIMEOUT_S).ended(
                    RunResult(last_step, stopped, self._evaluations, self._last_checkpoint)
                )
                self._finished.set_result(None)

    async def _start_step(self, decision: StartStep) -> None:
        self._records[decision.step] = StepRecord(
            Step(decision.step),
            _by_policy(decision.versions),
            map(AgentName, self._instances),
            time.monotonic(),
            overlaps_itself=self._schedule.mode != "async",
        )
        positions = self._queries.begin(decision.step, self._schedule.training.queries_per_step)
        await self._start_groups(decision.step, positions)

    async def _replacement(self, step: int) -> None:
        self._records[step].replaced_queries += 1
        await self._start_groups(step, self._queries.more(1))

    async def _start_groups(self, step: int, positions: range) -> None:
        """The queries at ``positions`` of the training data, for the step."""
        async with self._drawing:  # in the order of the positions, however long the user's code takes for one
            queries = await asyncio.to_thread(self._train_queries, positions)  # it may read from a disk
            ids = [query.id for query in queries]
            self._queries.name(step, ids)
            self._closing.begun(step, ids)
            await self._rollout.api.start_step(
                step,
                queries,
                self._schedule.training.trajectories_per_query,
                {str(policy): int(version) for policy, version in self._records[step].versions.items()},
                self._schedule.mode == "async",
                positions.start,
            )

    async def _train(self, decision: Train) -> None:
        trainer = self._trainer.within(_WORK_TIMEOUT_S)
        result = await trainer.train(PolicyName(decision.agent), decision.version, decision.count)
        record = self._records[decision.step]
        record.trained(PolicyName(decision.agent), result, decision.version, time.monotonic())
        self._carry_out(self._running.trained(decision.agent, decision.step, result.samples))

    async def _step_optimizer(self, decision: StepOptimizer) -> None:
        result = await self._trainer.within(_WORK_TIMEOUT_S).optimizer_step(PolicyName(decision.agent))
        self._records[decision.step].optimizer_stepped(PolicyName(decision.agent), result, time.monotonic())
        self._published[decision.agent] = result.published
        self._carry_out(self._running.stepped(decision.agent, decision.step))

    async def _publish(self, decision: Publish) -> None:
        published = self._published[decision.agent]
        await self._install(published)
        self._records[decision.step].applied(PolicyName(decision.agent), time.monotonic())
        self._carry_out(self._running.applied(decision.agent, decision.step, published.version))

    async def _commit(self, decision: CommitCheckpoint) -> None:
        step = decision.step
        position = self._queries.position_after(step)
        state = RunState(step, position, decision.versions, dict(self._evaluations))
        async with self._committing:  # in the order of the steps, however slow the disk
            # An answer to this means that the console has written all it was told before, the step's metrics among
            # it: whatever is killed from here on, a run resumed from this checkpoint lacks no line.
            await self._console.within(_WORK_TIMEOUT_S).event(CheckpointSaving(Step(step)))
            folder = await asyncio.to_thread(
                checkpoint.commit, self._checkpoints, state, self._schedule.checkpoint.keep
            )
        self._last_checkpoint = str(folder)
        await self._console.tell("event", CheckpointSaved(Step(step), str(folder)))
        self._carry_out(self._running.committed(step))

    async def _evaluate(self, decision: Evaluate) -> None:
        started = time.monotonic()
        queries = await asyncio.to_thread(self._recipe.eval_queries)
        await self._console.tell("phase", f"evaluating {len(queries)} queries", None, None)
        rollout = self._rollout.within(_WORK_TIMEOUT_S)
        result = await rollout.evaluate(queries, decision.versions)
        for failure in result.failures:
            self._tell_failure(failure, decision.step)
        if len(result.failures) > self._schedule.max_failed_share * result.queries:
            failed = f"{len(result.failures)} of {result.queries} trajectories failed"
            raise self._too_many_failures(f"evaluation after step {decision.step}: {failed}")
        self._evaluations[decision.step] = result.metrics
        eval_s = time.monotonic() - started
        self._last_end += eval_s  # no step is under way: its seconds are no step's
        await self._console.tell("event", Evaluated(Step(decision.step), eval_s, result.metrics))
        if (metrics := self._unreported.pop(decision.step, None)) is not None:
            await self._console.tell("step", replace(metrics, eval_s=eval_s, evaluation=result.metrics))
        self._carry_out(self._running.evaluated(decision.step))

    def _step_complete(self, decision: StepComplete) -> None:
        now = time.monotonic()
        record = self._records.pop(decision.step)
        self._queries.end(decision.step)
        self._closing.end(decision.step)
        metrics = record.metrics(
            _by_policy(decision.versions),
            {PolicyName(policy): count for policy, count in decision.carried.items()},
            self._started,
            self._last_end,
            now,
        )
        self._last_end = now
        if decision.evaluated:
            self._unreported[decision.step] = metrics  # its line carries the evaluation too
        else:
            self._console.tell_nowait("step", metrics)

    # ------------------------------------------------------------------ small things

    @property
    def _running(self) -> Pipeline:
        assert self._pipeline is not None, "the run has not begun"
        return self._pipeline

    @property
    def _trajectories_per_step(self) -> int:
        return self._schedule.training.queries_per_step * self._schedule.training.trajectories_per_query

    def _is_evaluation_due(self, step: int) -> bool:
        """Of the state that the run begins with: it may have been stopped before its evaluation."""
        every = self._schedule.evaluation.every
        return step not in self._evaluations and (step == 0 or bool(every and step % every == 0))

    def _train_queries(self, positions: range) -> list[Query]:
        return [self._recipe.train_query(position) for position in positions]

    def _too_many_failures(self, where: str) -> TooManyFailures:
        first = self._first_failure
        assert first is not None
        return TooManyFailures(
            f"{where} (rollout.max_failed_share allows {self._schedule.max_failed_share:.0%}); the first of the run, "
            f"{first.trajectory}: {first.error}\n{first.remote_traceback}"
        )

    def _tell_failure(self, failure: TrajectoryFailure, step: int) -> None:
        self._first_failure = self._first_failure or failure
        event = TrajectoryFailed(Step(step), failure.trajectory, failure.error, failure.remote_traceback)
        self._console.tell_nowait("event", event)


def _by_policy(versions: Mapping[str, int]) -> dict[PolicyName, Version]:
    return {PolicyName(policy): Version(version) for policy, version in versions.items()}


async def _applied(instance: ActorRef[InstanceApi], published: Published) -> None:
    version = await instance.within(_WORK_TIMEOUT_S).apply_weights(published)
    if version != published.version:
        raise WrongVersion(published.agent, published.version, version)
