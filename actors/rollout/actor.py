"""The rollout actor: runs the user's workflow for every query and trajectory of a step.

    start_step ─> a task per group ─> a task per trajectory ─> turns at the agents' instances
                        │
                        └─ when the last trajectory has ended: samples to the store, GroupClosed to the orchestrator

All trajectories of a step run at once; a turn waits only for its own agent's version.
"""

import asyncio
import math
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

import xxhash

from ...core.actor import Actor, endpoint
from ...core.config import Config
from ...core.errors import RecipeError
from ...core.ref import ActorRef
from ...core.tasks import first_error
from ..messages import (
    Evaluation,
    GenerateRequest,
    Generation,
    GroupClosed,
    InstanceApi,
    OrchestratorApi,
    Query,
    Sample,
    StoreApi,
    TrajectoryFailed,
)
from ..workflow import Prompt, Recipe, RecipeConfig, Rewards, Turn
from .config import RolloutConfig, SamplingConfig
from .pool import AgentPool


class AgentRollout(Config):
    """How one agent generates: the actors that serve it are named apart, as references."""

    sampling: SamplingConfig


@dataclass(slots=True)
class _Trajectory:
    """One run of the workflow: what identifies it, the versions it may use, the turns it took."""

    query: Query
    number: int
    versions: Mapping[str, int]
    greedy: bool
    turns: list[tuple[str, str, Generation]] = field(default_factory=list)
    asked: int = 0
    first_turn_at: float = math.inf
    rewards: Rewards = field(default_factory=Rewards)

    def next_sample_id(self) -> str:
        self.asked += 1
        return f"{self.query.id}_{self.asked - 1}_{self.number}"


class Rollout(Actor):
    """Fulfils ``RolloutApi``."""

    def __init__(
        self,
        recipe: RecipeConfig,
        agents: dict[str, AgentRollout],
        instances: dict[str, list[ActorRef[InstanceApi]]],
        store: ActorRef[StoreApi],
        orchestrator: ActorRef[OrchestratorApi],
        config: RolloutConfig,
    ) -> None:
        self._seed = recipe.seed
        self._recipe = Recipe(recipe)
        self._agents = agents
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
        for query in queries:
            self.background(self._run_group(step, query, trajectories, versions), f"group {query.id}")

    @endpoint
    async def evaluate(self, queries: list[Query], versions: dict[str, int]) -> Evaluation:
        ended = await self._run_all([_Trajectory(query, 0, versions, greedy=True) for query in queries])
        survived = [t.rewards for t in ended if isinstance(t, _Trajectory)]
        values: dict[str, list[float]] = {}
        for rewards in survived:
            for name, value in rewards.metrics.items():
                values.setdefault(name, []).append(value)
            for agent, value in rewards.by_agent.items():
                values.setdefault(f"reward/{agent}", []).append(value)
        failures = [t for t in ended if isinstance(t, TrajectoryFailed)]
        return Evaluation(len(queries), {name: fmean(v) for name, v in values.items()}, failures)

    # ------------------------------------------------------------------ one group, one trajectory, one turn

    async def _run_group(self, step: int, query: Query, trajectories: int, versions: dict[str, int]) -> None:
        started = time.monotonic()
        group = [_Trajectory(query, number, versions, greedy=False) for number in range(trajectories)]
        ended = await self._run_all(group)
        survived = [t for t in ended if isinstance(t, _Trajectory)]
        rewards = {
            agent: [t.rewards.by_agent[agent] for t in survived if agent in t.rewards.by_agent]
            for agent in self._agents
        }
        samples = _samples(step, survived, rewards)
        if samples:
            await self._store.api.put(samples)
        counts = Counter(sample.agent for sample in samples)
        first_turn_at = min(trajectory.first_turn_at for trajectory in group)
        await self._orchestrator.api.group_closed(
            GroupClosed(
                step=step,
                query=query.id,
                samples={agent: counts[agent] for agent in self._agents},
                generated_tokens=sum(len(sample.tokens) for sample in samples),
                waited_s=max(0.0, min(first_turn_at, time.monotonic()) - started),
                rewards=rewards,
                failures=[t for t in ended if isinstance(t, TrajectoryFailed)],
            )
        )

    async def _run_all(self, trajectories: list[_Trajectory]) -> "list[_Trajectory | TrajectoryFailed]":
        with first_error():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._run_trajectory(trajectory)) for trajectory in trajectories]
        return [task.result() for task in tasks]

    async def _run_trajectory(self, trajectory: _Trajectory) -> "_Trajectory | TrajectoryFailed":
        """The trajectory with its rewards, or how it failed. Raises RecipeError: such a run can't succeed."""
        handles = _Handles({agent: _AgentHandle(self, agent, trajectory) for agent in self._agents})
        limit_s = self._config.trajectory_timeout_s
        try:
            async with asyncio.timeout(limit_s) as deadline:
                rewards = await self._recipe.workflow(trajectory.query, handles)
            trajectory.rewards = self._checked(rewards, trajectory)
        except RecipeError:
            raise
        except Exception as error:  # noqa: BLE001  # user code: a trajectory may fail in any way, the others go on
            name = f"{trajectory.query.id}_{trajectory.number}"
            what = f"{type(error).__name__}: {error}"
            if deadline.expired():
                what = f"not done within rollout.trajectory_timeout_s={limit_s:g}"
            return TrajectoryFailed(name, what, "".join(traceback.format_exception(error)))
        return trajectory

    def _checked(self, rewards: Rewards, trajectory: _Trajectory) -> Rewards:
        if not isinstance(rewards, Rewards):
            raise RecipeError(f"the workflow returned {type(rewards).__name__}, not Rewards")
        for agent in rewards.by_agent:
            if agent not in self._agents:
                raise _unknown_agent(agent, self._agents, "the workflow rewards")
        for agent, _, _ in trajectory.turns:
            if agent not in rewards.by_agent:
                raise RecipeError(f"the workflow used agent {agent!r} and returned no reward for it")
        return rewards.checked()

    async def generate(self, agent: str, trajectory: _Trajectory, prompt: Prompt) -> Turn:
        """One turn: waits for the agent's version of this step, then for its least busy instance."""
        sampling = self._agents[agent].sampling
        sample_id = trajectory.next_sample_id()
        version = trajectory.versions[agent]
        request = GenerateRequest(
            sample_id,
            _segments(prompt),
            version,
            xxhash.xxh3_64_intdigest(f"{self._seed} {sample_id}".encode()),
            0.0 if trajectory.greedy else sampling.temperature,
            sampling.max_new_tokens,
        )
        async with self._pools[agent].instance(version) as instance:
            trajectory.first_turn_at = min(trajectory.first_turn_at, time.monotonic())
            generation = await instance.within(self._config.turn_timeout_s).generate(request)
        trajectory.turns.append((agent, sample_id, generation))
        return Turn(generation.text, generation.prompt_tokens, generation.tokens)


def _samples(step: int, survived: list[_Trajectory], rewards: dict[str, list[float]]) -> list[Sample]:
    group = {agent: tuple(values) for agent, values in rewards.items()}
    return [
        Sample(
            sample_id=sample_id,
            agent=agent,
            step=step,
            policy_version=generation.policy_version,
            group=trajectory.query.id,
            reward=trajectory.rewards.by_agent[agent],
            group_rewards=group[agent],
            prompt_tokens=generation.prompt_tokens,
            tokens=generation.tokens,
            logprobs=generation.logprobs,
        )
        for trajectory in survived
        for agent, sample_id, generation in trajectory.turns
    ]


def _segments(prompt: Prompt) -> tuple[str | tuple[int, ...], ...]:
    parts = (prompt,) if isinstance(prompt, str | Turn) else tuple(prompt)
    return tuple(part if isinstance(part, str) else part.prompt_tokens + part.tokens for part in parts)


def _unknown_agent(agent: str, known: Iterable[str], who: str) -> RecipeError:
    return RecipeError(f"{who} agent {agent!r}, which the config lacks; it has: {', '.join(known)}")


class _AgentHandle:
    """An agent within one trajectory."""

    def __init__(self, rollout: Rollout, agent: str, trajectory: _Trajectory) -> None:
        self._rollout = rollout
        self._agent = agent
        self._trajectory = trajectory

    async def generate(self, prompt: Prompt) -> Turn:
        return await self._rollout.generate(self._agent, self._trajectory, prompt)


class _Handles(dict[str, _AgentHandle]):
    def __missing__(self, agent: str) -> _AgentHandle:
        raise _unknown_agent(agent, self, "the workflow asks for")
