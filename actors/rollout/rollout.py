"""The rollout actor: runs the user's workflow for every query and trajectory of a step.

    start_step ─> a task per group ─> a task per trajectory ─> turns at the agents' instances
                        │
                        └─ when `group.py` has settled it: samples to the store, GroupClosed to the orchestrator

All trajectories of a step run at once; a turn waits only for its own agent's version. A trajectory's workflow runs in
a task of its own, which nobody waits for once its deadline has passed: it may hang, or take no notice of being
cancelled, and its group goes on.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import xxhash

from ...core.actor import Actor, endpoint
from ...core.errors import CallTimeout, RemoteError
from ...core.ref import ActorRef
from ...core.task_groups import first_error
from ..declared_columns import Column
from ..errors import RecipeError, WrongVersion
from ..messages import (
    Evaluation,
    GenerateRequest,
    Generation,
    Grouping,
    InstanceApi,
    OrchestratorApi,
    Query,
    StoreApi,
    TrajectoryFailure,
)
from ..store_client import ExperienceWriter, segment_directories
from ..workflow import Prompt, Recipe, RecipeConfig, Rewards, Turn
from .groups.group import Abort, Close, Drop, Group, GroupRules, Start
from .groups.group_run import ClosingRules, End, GroupRun
from .overlong import punished
from .pool import AgentPool
from .resumable_turn import ResumableTurn
from .rollout_config import RolloutConfig, SamplingConfig
from .trajectory import Deadline, Trajectory, where_it_hangs

# The store and the orchestrator answer in milliseconds; this catches one that hangs.
_ANSWER_TIMEOUT_S = 300.0
_GIVE_UP_S = 1.0


class Rollout(Actor):
    """Fulfils ``RolloutApi``."""

    def __init__(
        self,
        recipe: RecipeConfig,
        sampling: dict[str, SamplingConfig],
        tokenizers: dict[str, str],
        instances: dict[str, list[ActorRef[InstanceApi]]],
        store: ActorRef[StoreApi],
        orchestrator: ActorRef[OrchestratorApi],
        config: RolloutConfig,
        memory: str,
        folder: str,
        grouping: dict[str, Grouping] | None = None,
        columns: dict[str, dict[str, Column]] | None = None,
    ) -> None:
        """``sampling``, ``tokenizers`` (a name or folder), ``instances``, ``grouping`` (without a word ``trajectory``)
        and ``columns`` are by agent; ``memory``, ``folder`` and ``columns`` as the store has them."""
        self._seed = recipe.seed
        self._recipe = Recipe(recipe)
        self._sampling = sampling
        self._tokenizers = tokenizers
        self._pools = {agent: AgentPool(agent, refs) for agent, refs in instances.items()}
        self._store = store
        self._places = segment_directories(memory, folder)
        self._orchestrator = orchestrator
        self._config = config
        self._closing = ClosingRules(tuple(sampling), grouping or {}, config.drop_zero_advantage)
        self._columns = columns or {}
        self._workflows: set[asyncio.Task[Rewards]] = set()

    async def on_start(self) -> None:
        self._experience = ExperienceWriter(self._store, self.ref.name, self._places)

    async def on_stop(self) -> None:
        self._experience.close()
        for workflow in self._workflows:
            workflow.cancel()
        if self._workflows:  # what takes no notice of it, the end of the process ends
            await asyncio.wait(self._workflows, timeout=_GIVE_UP_S)

    @endpoint
    async def serve(self, agent: str, version: int) -> None:
        self._pools[agent].serve(version)

    @endpoint
    async def start_step(
        self,
        step: int,
        queries: list[Query],
        trajectories: int,
        versions: dict[str, int],
        allow_newer: bool = False,
        first_position: int = 0,
    ) -> None:
        _refuse_equal_ids(queries, f"step {step}")
        config = self._config
        rules = GroupRules(
            wanted=trajectories,
            extra=config.extra_trajectories,
            oversampled=config.oversampled,
            minimum=config.min_trajectories,
            max_replacements=config.max_replacements,
        )
        for position, query in enumerate(queries, first_position):
            run = GroupRun(step, query, position, versions, allow_newer, Group(rules))
            self.background(self._run_group(run), f"group {query.id}")

    @endpoint
    async def evaluate(self, queries: list[Query], versions: dict[str, int]) -> Evaluation:
        _refuse_equal_ids(queries, "the evaluation")
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(
                        self._run_trajectory(Trajectory(query, "eval", 0, versions, greedy=True))
                    )
                    for query in queries
                ]
        ends = [task.result() for task in running]
        failures = [end.failure for end in ends if end.failure is not None]
        survived = [end.trajectory for end in ends if end.failure is None]
        values: dict[str, list[float]] = {}
        for trajectory in survived:
            for name, value in trajectory.rewards.metrics.items():
                values.setdefault(name, []).append(value)
            for agent, value in trajectory.rewards.by_agent.items():
                values.setdefault(f"reward/{agent}", []).append(value)
        return Evaluation(len(queries), {name: fmean(v) for name, v in values.items()}, failures)

    # ------------------------------------------------------------------ one group, one trajectory, one turn

    async def _run_group(self, run: GroupRun) -> None:
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                decisions = run.group.start()
                while True:
                    for decision in decisions:
                        match decision:
                            case Start(number):
                                work = self._run_member(run, number, run.begin(number))
                                run.tasks[number] = tasks.create_task(work)
                            case Abort(number):
                                run.tasks[number].cancel()
                            case Close(numbers):
                                await self._close_group(run, numbers, "")
                            case Drop(reason):
                                await self._close_group(run, [], reason)
                    if run.group.settled:
                        return  # once the oversampled that is kept has ended
                    decisions = self._take_end(run, await run.ends.get())

    async def _run_member(self, run: GroupRun, number: int, trajectory: Trajectory) -> None:
        run.ends.put_nowait(await self._run_trajectory(trajectory))

    def _take_end(self, run: GroupRun, end: End) -> list[Start | Abort | Close | Drop]:
        number = end.trajectory.number
        if end.failure is None:
            return run.group.succeeded(number)
        run.failures.append(end.failure)
        return run.group.failed(number, replacement=end.replacement)

    async def _close_group(self, run: GroupRun, numbers: Sequence[int], dropped: str) -> None:
        samples, closed = run.close(numbers, dropped, self._closing)
        if samples:
            await self._experience.put(samples)
        await self._orchestrator.within(_ANSWER_TIMEOUT_S).group_closed(closed)

    async def _run_trajectory(self, trajectory: Trajectory) -> End:
        """Until the workflow ends, or its deadline has passed. Raises RecipeError: such a run can't succeed.

        Cancelling it, and the deadline, cancel the workflow and with it the turns it waits for, at the instances too.
        """
        limit_s = self._config.trajectory_timeout_s
        work = asyncio.create_task(self._run_workflow(trajectory), name=f"workflow {trajectory.name}")
        self._workflows.add(work)
        work.add_done_callback(self._workflow_ended)
        trajectory.deadline = Deadline(limit_s)
        ends: set[asyncio.Future[Any]] = {work, trajectory.deadline.overran}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return self._end(trajectory, work)
            frames = self._recipe.frames(where_it_hangs(work))
            what = f"not done within rollout.trajectory_timeout_s={limit_s:g}"
            failure = TrajectoryFailure(trajectory.name, what, frames)
            return End(trajectory, failure, replacement=self._config.on_timeout == "replace")
        finally:
            trajectory.close()
            trajectory.deadline.stop()
            work.cancel()

    async def _run_workflow(self, trajectory: Trajectory) -> Rewards:
        handles = _Handles({agent: _AgentHandle(self, agent, trajectory) for agent in self._sampling})
        return self._checked(await self._recipe.workflow(trajectory.query, handles), trajectory)

    def _workflow_ended(self, work: asyncio.Task[Rewards]) -> None:
        self._workflows.discard(work)
        if not work.cancelled():
            work.exception()  # whoever still waited for it has seen it; asyncio need not complain

    def _end(self, trajectory: Trajectory, work: asyncio.Task[Rewards]) -> End:
        """What came of a workflow that has ended. User code: it may fail in any way, the others go on."""
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is None:
            trajectory.rewards = work.result()
            if not trajectory.greedy:  # evaluations show what the workflow itself says
                trajectory.rewards = punished(trajectory.rewards, trajectory.longest_turns(), self._sampling)
            return End(trajectory)
        if isinstance(error, RecipeError):
            raise error
        failure = TrajectoryFailure(
            trajectory.name, f"{type(error).__name__}: {error}", self._recipe.frames(error)
        )
        agent = trajectory.agent_that_overran(error)
        on_timeout = agent and (self._sampling[agent].on_timeout or self._config.on_timeout)
        return End(trajectory, failure, replacement=on_timeout == "replace")

    def _checked(self, rewards: Rewards, trajectory: Trajectory) -> Rewards:
        if not isinstance(rewards, Rewards):
            raise RecipeError(f"the workflow returned {type(rewards).__name__}, not Rewards")
        for agent in rewards.by_agent:
            if agent not in self._sampling:
                raise _unknown_agent(agent, self._sampling, "the workflow rewards")
        for agent in trajectory.agents_used():
            if agent not in rewards.by_agent:
                raise RecipeError(f"the workflow used agent {agent!r} and returned no reward for it")
        trajectory.check_columns()
        return rewards.checked()

    async def generate(self, agent: str, trajectory: Trajectory, prompt: Prompt) -> Turn:
        """One turn: waits for the agent's version of this step, then for its least busy instance; where new weights
        come in meanwhile and may generate it too, it is carried on with them."""
        sampling = self._sampling[agent]
        sample_id = trajectory.next_sample_id()
        turn = ResumableTurn(
            GenerateRequest(
                sample_id,
                self._segments(prompt, agent),
                trajectory.versions[agent],
                xxhash.xxh3_64_intdigest(f"{self._seed} {sample_id}".encode()),
                0.0 if trajectory.greedy else sampling.temperature,
                sampling.max_new_tokens,
                resumable=trajectory.allow_newer,
            )
        )
        left_s = sampling.turn_timeout_s or self._config.turn_timeout_s
        while not turn.ended:
            left_s -= await self._generate_piece(agent, turn, trajectory, left_s)
        trajectory.took(agent, turn)
        columns = trajectory.columns_of(agent, sample_id, self._columns.get(agent, {}))
        return Turn(agent, turn.text, turn.prompt_tokens, turn.tokens, sample_id, columns.write)

    async def _generate_piece(
        self, agent: str, turn: ResumableTurn, trajectory: Trajectory, limit_s: float
    ) -> float:
        """Until the turn has ended or its version is no longer served; the seconds that this took at an instance."""
        clock = asyncio.get_running_loop().time
        version = await self._version(self._pools[agent], turn.request, trajectory)
        request, started = replace(turn.request, policy_version=version), clock()
        try:
            turn.take(await self._ask(agent, request, trajectory, limit_s))
        except RemoteError as error:
            if not trajectory.allow_newer or error.kind != WrongVersion.__name__:
                raise
            turn.overtaken(version)  # the instance was just leaving it
        return clock() - started

    async def _version(self, pool: AgentPool, request: GenerateRequest, trajectory: Trajectory) -> int:
        """The version to generate the turn, once it is served."""
        if not pool.has_come_to(request.policy_version):
            with trajectory.waiting_for_a_version():
                await pool.wait_for(request.policy_version)
        return pool.version if trajectory.allow_newer else request.policy_version

    async def _ask(
        self, agent: str, request: GenerateRequest, trajectory: Trajectory, limit_s: float
    ) -> Generation:
        with self._pools[agent].least_busy(request.policy_version) as instance:
            trajectory.turn_begins()
            try:
                return await instance.within(max(0.0, limit_s)).generate(request)
            except CallTimeout as error:
                trajectory.turn_overran(agent, error)
                raise

    def _segments(self, prompt: Prompt, agent: str) -> tuple[str | tuple[int, ...], ...]:
        parts = (prompt,) if isinstance(prompt, str | Turn) else tuple(prompt)
        for part in parts:
            if isinstance(part, Turn) and self._tokenizers[part.agent] != self._tokenizers[agent]:
                raise RecipeError(
                    f"the workflow puts a turn of {part.agent!r} into a prompt of {agent!r}, whose tokenizer is "
                    "another: its tokens would mean something else; put the turn's .text there"
                )
        return tuple(part if isinstance(part, str) else part.prompt_tokens + part.tokens for part in parts)


def _refuse_equal_ids(queries: Sequence[Query], where: str) -> None:
    twice = [query_id for query_id, count in Counter(query.id for query in queries).items() if count > 1]
    if twice:
        raise RecipeError(f"{where} has two queries with the id {twice[0]!r}")


def _unknown_agent(agent: str, known: Iterable[str], who: str) -> RecipeError:
    return RecipeError(f"{who} agent {agent!r}, which the config lacks; it has: {', '.join(known)}")


class _AgentHandle:
    """An agent within one trajectory."""

    def __init__(self, rollout: Rollout, agent: str, trajectory: Trajectory) -> None:
        self._rollout = rollout
        self._agent = agent
        self._trajectory = trajectory

    async def generate(self, prompt: Prompt) -> Turn:
        return await self._rollout.generate(self._agent, self._trajectory, prompt)


class _Handles(dict[str, _AgentHandle]):
    def __missing__(self, agent: str) -> _AgentHandle:
        raise _unknown_agent(agent, self, "the workflow asks for")
