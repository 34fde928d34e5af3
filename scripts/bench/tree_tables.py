"""Plan-path without models: two tables learn to plan and to walk, along lines or trees.

The environment is the recipe's, and so are its queries. Trees, rewards, advantages and their comparison are those of a
run. The policies are tables: one row of scores for each prompt that they have seen, a softmax over the answers, and a
step along the policy gradient. A result depends on the seed alone.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from random import Random
from statistics import fmean
from typing import Any, Final

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.demonstrations.demonstration import Demonstration
from flexmarl.actors.demonstrations.patch_rule import PatchRule
from flexmarl.actors.environments.demonstrated_play import play_demonstrated
from flexmarl.actors.environments.environment import Environment, play
from flexmarl.actors.environments.tree_play import TreeEnd, play_tree
from flexmarl.actors.messages import Query, Sample
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.rollout.groups.credit_assignment import assign_credit
from flexmarl.actors.rollout.rollout_setup import RolloutAgent
from flexmarl.actors.rollout.trajectory_rewards import EndedTurn, TrajectoryRewards, trajectory_rewards
from flexmarl.actors.rollout.tree_rewards import tree_rewards
from flexmarl.actors.sample_id import SampleId
from flexmarl.actors.trees.branch_rule import BranchRule, TreePlace
from flexmarl.actors.trees.success_model import PrefixEnd, SuccessModel
from flexmarl.actors.workflow import Agent, Rewards, Turn
from flexmarl.launch.recipes.plan_path.workflow import DIRECTIONS, PlanPath, eval_queries, train_query

PLANNER, EXECUTOR = AgentName("planner"), AgentName("executor")
ANSWERS: Final[Mapping[AgentName, tuple[str, ...]]] = {
    PLANNER: tuple(map("".join, product(DIRECTIONS, repeat=2))),
    EXECUTOR: tuple(DIRECTIONS),
}
TOKENS: Final = {PLANNER: 3, EXECUTOR: 2}
"""Counts the tokens of a turn as in the recipe: the directions and the end."""


class ArrivalPaid(PlanPath):
    """The same walks with one reward for both, at their ends: 1 at the goal."""

    async def step(self, turns: Mapping[str, Turn]) -> Any:
        outcome = await super().step(turns)
        if not isinstance(outcome, Rewards):
            return outcome
        arrived = float(not self.distance)
        return Rewards(planner=arrived, executor=arrived, metrics=outcome.metrics)


@dataclass(frozen=True, slots=True)
class Arm:
    """A way of sampling. ``rule``: of trees; None for trajectories of one line. ``patch``: of trajectories that follow
    the demonstrations of ``expert``; None for others. ``trajectories``: of a query."""

    environment: type[Environment]
    credit: CreditConfig
    trajectories: int
    rule: BranchRule | None = None
    patch: PatchRule | None = None
    expert: Callable[[Query], Demonstration] | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """``budget``: generated tokens of a run. ``every``: tokens between two evaluations. ``lr``: of the tables.
    ``side``, ``walls``, ``rounds``: of the recipe's problems. ``evaluated``: those of an evaluation."""

    queries_per_step: int = 8
    budget: int = 50_000
    every: int = 5_000
    lr: float = 300.0
    side: int = 5
    walls: int = 3
    rounds: int = 8
    evaluated: int = 300

    @property
    def data(self) -> dict[str, Any]:
        """The arguments of the recipe's functions."""
        grid = {"side": self.side, "walls": self.walls, "rounds": self.rounds}
        return {**grid, "eval_problems": self.evaluated, "planner_reward": "plan"}


@dataclass(slots=True)
class Table:
    """A policy. ``scores``: of the answers, by prompt."""

    answers: tuple[str, ...]
    scores: dict[str, list[float]] = field(default_factory=dict)

    def chances(self, prompt: str) -> list[float]:
        row = self.scores.setdefault(prompt, [0.0] * len(self.answers))
        most = max(row)
        powers = [math.exp(score - most) for score in row]
        total = math.fsum(powers)
        return [power / total for power in powers]

    def learn(self, gradients: Mapping[str, list[float]], lr: float) -> None:
        for prompt, gradient in gradients.items():
            row = self.scores[prompt]
            for place, slope in enumerate(gradient):
                row[place] += lr * slope


@dataclass(slots=True)
class _Draws:
    """The turns of one trajectory. ``random``: None for the most probable answers."""

    name: SampleId
    tables: Mapping[AgentName, Table]
    random: Random | None
    turns: list[tuple[AgentName, str, str, str]] = field(default_factory=list)
    """Agent, sample id, prompt and answer of each."""

    def draw(self, agent: AgentName, prompt: str) -> Turn:
        table = self.tables[agent]
        chances = table.chances(prompt)
        if self.random is None:
            answer = chances.index(max(chances))
        else:
            answer = self.random.choices(range(len(chances)), chances)[0]
        sample_id = str(self.name._replace(turn=len(self.turns)))
        text = table.answers[answer]
        self.turns.append((agent, sample_id, prompt, text))
        return Turn(agent, text, (), (1,), sample_id, logprobs=(math.log(chances[answer]),))


@dataclass(frozen=True, slots=True)
class _Agent:
    agent: AgentName
    draws: _Draws

    async def generate(self, prompt: Any, **options: Any) -> Turn:
        return self.draws.draw(self.agent, prompt)


@cache
def _evaluated(settings: Settings) -> list[Query]:
    return eval_queries(0, **settings.data)


class Run:
    """A run of an arm from nothing: ``curve`` has the tokens generated so far, and the greedy success then."""

    def __init__(self, arm: Arm, settings: Settings, seed: int) -> None:
        self._arm, self._settings, self._seed = arm, settings, seed
        self._tables = {agent: Table(answers) for agent, answers in ANSWERS.items()}
        self._agents = {
            agent: RolloutAgent(PolicyName(agent), credit=arm.credit) for agent in (PLANNER, EXECUTOR)
        }
        self._model = SuccessModel()
        self._prefixes: list[PrefixEnd] = []
        self.tokens = 0
        self.curve: list[tuple[int, float]] = []

    async def play(self) -> None:
        """Learns until the budget is spent."""
        random = Random(f"{self._seed} draws")
        step = position = 0
        while self.tokens < self._settings.budget:
            if self.tokens >= len(self.curve) * self._settings.every:
                self.curve.append((self.tokens, await self._success()))
            step += 1
            gradients: dict[AgentName, dict[str, list[float]]] = {PLANNER: {}, EXECUTOR: {}}
            counts = dict.fromkeys(gradients, 0)
            for _ in range(self._settings.queries_per_step):
                query = train_query(position, self._seed, **self._settings.data)
                position += 1
                for sample, prompt, answer in await self._group(query, step, random):
                    agent = AgentName(sample.agent)
                    counts[agent] += 1
                    self._add(gradients[agent], agent, prompt, answer, sample.advantage)
            for agent, by_prompt in gradients.items():
                self._tables[agent].learn(by_prompt, self._settings.lr / max(1, counts[agent]))
            self._model.learn(self._prefixes)
            self._prefixes.clear()
        self.curve.append((self.tokens, await self._success()))

    def tokens_to(self, target: float) -> int:
        """The tokens until the success was first ``target``; all of them if it never was."""
        return next((tokens for tokens, success in self.curve if success >= target), self.tokens)

    def _add(
        self, gradients: dict[str, list[float]], agent: AgentName, prompt: str, answer: str, advantage: float
    ) -> None:
        chances = self._tables[agent].chances(prompt)
        row = gradients.setdefault(prompt, [0.0] * len(chances))
        for place, chance in enumerate(chances):
            row[place] += advantage * ((self._tables[agent].answers[place] == answer) - chance)

    async def _group(self, query: Query, step: int, random: Random) -> list[tuple[Sample, str, str]]:
        """The samples of a query's trajectories, with their advantages, prompts and answers."""
        samples: list[Sample] = []
        texts: dict[str, tuple[str, str]] = {}
        places: dict[str, TreePlace] = {}
        by_agent: dict[AgentName, dict[int, float]] = {PLANNER: {}, EXECUTOR: {}}
        for number in range(self._arm.trajectories):
            draws = _Draws(SampleId(step, query.id, 0, number), self._tables, random)
            rewards, tree = await self._trajectory(query, draws)
            self.tokens += sum(TOKENS[agent] for agent, *_ in draws.turns)
            if tree is not None:
                places |= tree.places
                self._prefixes += tree.prefixes
            for agent, amount in rewards.used.by_agent.items():
                by_agent[agent][number] = amount
            for agent, sample_id, prompt, answer in draws.turns:
                if sample_id in rewards.used.by_sample:
                    reward = rewards.used.by_sample[sample_id]
                    samples.append(
                        Sample(sample_id, agent, step, 0, draws.name.group, reward, 0.0, (1,), (1,), (0.0,))
                    )
                    texts[sample_id] = (prompt, answer)
        credited = assign_credit(samples, dict.fromkeys(by_agent, self._arm.credit), by_agent, places)
        return [(sample, *texts[sample.sample_id]) for sample in credited]

    async def _trajectory(self, query: Query, draws: _Draws) -> tuple[TrajectoryRewards, TreeEnd | None]:
        agents = _agents(draws)
        name = str(draws.name.trajectory_name)
        if self._arm.rule is None:
            returned = await self._line(query, agents)
            return trajectory_rewards(name, returned, _ended(draws), self._agents, punish=False), None
        tree = await play_tree(self._arm.environment, query, agents, self._arm.rule, self._model)
        held = frozenset[str]().union(*(end.sample_ids for end in tree.ends))
        turns = _ended(draws)
        left_out = {turn.sample_id for turn in turns} - held
        return tree_rewards(name, tree, turns, self._agents, punish=False, left_out=left_out), tree

    async def _line(self, query: Query, agents: dict[str, Agent]) -> Rewards:
        environment, arm = self._arm.environment(), self._arm
        if arm.patch is None or arm.expert is None:
            return await play(environment, query, agents)
        return (await play_demonstrated(environment, query, agents, arm.expert(query), arm.patch)).rewards

    async def _success(self) -> float:
        """The share of the evaluation's problems that the most probable answers solve."""
        solved = []
        for query in _evaluated(self._settings):
            draws = _Draws(SampleId(None, query.id, 0, 0), self._tables, None)
            agents = _agents(draws)
            solved.append((await play(PlanPath(), query, agents)).metrics["accuracy"])
        return fmean(solved)


def _agents(draws: _Draws) -> dict[str, Agent]:
    return {agent: _Agent(agent, draws) for agent in (PLANNER, EXECUTOR)}


def _ended(draws: _Draws) -> list[EndedTurn]:
    return [EndedTurn(agent, sample_id, TOKENS[agent]) for agent, sample_id, *_ in draws.turns]


def runs_of(arms: Sequence[Arm], settings: Settings, seed: int) -> list[Run]:
    """A run of each arm, in order."""
    runs = [Run(arm, settings, seed) for arm in arms]
    for run in runs:
        asyncio.run(run.play())
    return runs
