"""The rollout actor: runs the user's workflow for every query and trajectory of a step.

    start_step ─> a task per group ─> a task per trajectory ─> turns at the agents' instances
                        │
                        └─ when the last trajectory has ended: samples to the store, GroupClosed to the orchestrator

All trajectories of a step run at once; a turn waits only for its own agent's version.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

import xxhash

from ...core.actor import Actor, endpoint
from ...core.errors import RecipeError
from ...core.ref import ActorRef
from ...core.tasks import first_error
from ..messages import (
    Evaluation,
    GenerateRequest,
    GroupClosed,
    InstanceApi,
    OrchestratorApi,
    Query,
    StoreApi,
    TrajectoryFailed,
)
from ..workflow import Prompt, Recipe, RecipeConfig, Rewards, Turn
from .config import RolloutConfig, SamplingConfig
from .pool import AgentPool
from .trajectory import Trajectory

# The store and the orchestrator answer in milliseconds; this catches one that hangs.
_ANSWER_TIMEOUT_S = 300.0


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
    ) -> None:
        """``sampling``, ``tokenizers`` (a name or folder) and ``instances`` are by agent."""
        self._seed = recipe.seed
        self._recipe = Recipe(recipe)
        self._sampling = sampling
        self._tokenizers = tokenizers
        self._pools = {agent: AgentPool(agent, refs) for agent, refs in instances.items()}
        self._store = store
        self._orchestrator = orchestrator
        self._config = config

    @endpoint
    async def serve(self, agent: str, version: int) -> None:
        self._pools[agent].serve(version)

    @endpoint
    async def start_step(
        self, step: int, queries: list[Query], trajectories: int, versions: dict[str, int]
    ) -> None:
        _refuse_equal_ids(queries, f"step {step}")
        for query in queries:
            group = [Trajectory(query, str(step), n, versions, greedy=False) for n in range(trajectories)]
            self.background(self._run_group(step, group), f"group {query.id}")

    @endpoint
    async def evaluate(self, queries: list[Query], versions: dict[str, int]) -> Evaluation:
        _refuse_equal_ids(queries, "the evaluation")
        survived, failures = await self._run_all(
            [Trajectory(query, "eval", 0, versions, greedy=True) for query in queries]
        )
        values: dict[str, list[float]] = {}
        for trajectory in survived:
            for name, value in trajectory.rewards.metrics.items():
                values.setdefault(name, []).append(value)
            for agent, value in trajectory.rewards.by_agent.items():
                values.setdefault(f"reward/{agent}", []).append(value)
        return Evaluation(len(queries), {name: fmean(v) for name, v in values.items()}, failures)

    # ------------------------------------------------------------------ one group, one trajectory, one turn

    async def _run_group(self, step: int, group: Sequence[Trajectory]) -> None:
        started = time.monotonic()
        survived, failures = await self._run_all(group)
        rewards = {
            agent: [t.rewards.by_agent[agent] for t in survived if agent in t.rewards.by_agent]
            for agent in self._sampling
        }
        group_rewards = {agent: tuple(values) for agent, values in rewards.items()}
        samples = [sample for trajectory in survived for sample in trajectory.samples(step, group_rewards)]
        if samples:
            await self._store.within(_ANSWER_TIMEOUT_S).put(samples)
        counts = Counter(sample.agent for sample in samples)
        first_turn_at = min(trajectory.first_turn_at for trajectory in group)
        await self._orchestrator.within(_ANSWER_TIMEOUT_S).group_closed(
            GroupClosed(
                step=step,
                query=group[0].query.id,
                samples={agent: counts[agent] for agent in self._sampling},
                generated_tokens=sum(len(sample.tokens) for sample in samples),
                waited_s=max(0.0, min(first_turn_at, time.monotonic()) - started),
                rewards=rewards,
                failures=failures,
            )
        )

    async def _run_all(
        self, trajectories: Sequence[Trajectory]
    ) -> tuple[list[Trajectory], list[TrajectoryFailed]]:
        """Those that succeeded, with their rewards, and how the others failed."""
        with first_error():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run_trajectory(trajectory)) for trajectory in trajectories]
        failures = [task.result() for task in tasks]
        survived = [t for t, failure in zip(trajectories, failures, strict=True) if failure is None]
        return survived, [failure for failure in failures if failure is not None]

    async def _run_trajectory(self, trajectory: Trajectory) -> TrajectoryFailed | None:
        """Runs the workflow; how it failed, where it did. Raises RecipeError: such a run can't succeed."""
        handles = _Handles({agent: _AgentHandle(self, agent, trajectory) for agent in self._sampling})
        limit_s = self._config.trajectory_timeout_s
        try:
            async with asyncio.timeout(limit_s) as trajectory.deadline:
                rewards = await self._recipe.workflow(trajectory.query, handles)
            trajectory.rewards = self._checked(rewards, trajectory)
        except RecipeError:
            raise
        except Exception as error:  # noqa: BLE001  # user code: a trajectory may fail in any way, the others go on
            what = f"{type(error).__name__}: {error}"
            if trajectory.deadline is not None and trajectory.deadline.expired():
                what = f"not done within rollout.trajectory_timeout_s={limit_s:g}"
            return TrajectoryFailed(trajectory.name, what, self._recipe.frames(error))
        finally:
            trajectory.close()
        return None

    def _checked(self, rewards: Rewards, trajectory: Trajectory) -> Rewards:
        if not isinstance(rewards, Rewards):
            raise RecipeError(f"the workflow returned {type(rewards).__name__}, not Rewards")
        for agent in rewards.by_agent:
            if agent not in self._sampling:
                raise _unknown_agent(agent, self._sampling, "the workflow rewards")
        for agent in trajectory.agents_used():
            if agent not in rewards.by_agent:
                raise RecipeError(f"the workflow used agent {agent!r} and returned no reward for it")
        return rewards.checked()

    async def generate(self, agent: str, trajectory: Trajectory, prompt: Prompt) -> Turn:
        """One turn: waits for the agent's version of this step, then for its least busy instance."""
        sampling, pool = self._sampling[agent], self._pools[agent]
        sample_id = trajectory.next_sample_id()
        version = trajectory.versions[agent]
        request = GenerateRequest(
            sample_id,
            self._segments(prompt, agent),
            version,
            xxhash.xxh3_64_intdigest(f"{self._seed} {sample_id}".encode()),
            0.0 if trajectory.greedy else sampling.temperature,
            sampling.max_new_tokens,
        )
        if not pool.has_come_to(version):
            with trajectory.waiting_for_a_version():
                await pool.wait_for(version)
        with pool.least_busy(version) as instance:
            trajectory.turn_begins()
            generation = await instance.within(self._config.turn_timeout_s).generate(request)
        trajectory.took(agent, sample_id, generation)
        return Turn(agent, generation.text, generation.prompt_tokens, generation.tokens)

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
