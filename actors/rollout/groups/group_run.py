"""A group while it runs, and what it leaves: samples for the store, and what the orchestrator is told."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...messages import GroupClosed, Grouping, Query, Sample, TrajectoryFailure
from ..trajectory import Trajectory
from .comparison import grouped
from .group import Group, has_signal


@dataclass(frozen=True, slots=True)
class End:
    """How a trajectory ended. ``replace``: it overran, and another is wanted in its place."""

    trajectory: Trajectory
    failure: TrajectoryFailure | None = None
    replacement: bool = False


@dataclass(frozen=True, slots=True)
class ClosingRules:
    """``agents``: all of the run. ``grouping``: by agent, ``trajectory`` where it is not said.
    ``drop_zero_advantage``: as ``RolloutConfig`` has it."""

    agents: tuple[str, ...]
    grouping: Mapping[str, Grouping]
    drop_zero_advantage: bool


@dataclass(slots=True)
class GroupRun:
    """``position``: of the query in the training data. ``trajectories`` by number."""

    step: int
    query: Query
    position: int
    versions: dict[str, int]
    allow_newer: bool
    group: Group
    started: float = field(default_factory=time.monotonic)
    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    ends: asyncio.Queue[End] = field(default_factory=asyncio.Queue)
    failures: list[TrajectoryFailure] = field(default_factory=list)

    def begin(self, number: int) -> Trajectory:
        trajectory = Trajectory(
            self.query, str(self.step), number, self.versions, greedy=False, allow_newer=self.allow_newer
        )
        self.trajectories[number] = trajectory
        return trajectory

    def close(
        self, numbers: Sequence[int], dropped: str, rules: ClosingRules
    ) -> tuple[list[Sample], GroupClosed]:
        """What the trajectories of these numbers, which count, have made. ``dropped``: why none does, or empty."""
        members = [self.trajectories[number] for number in numbers]
        rewards = {
            agent: [m.rewards.by_agent[agent] for m in members if agent in m.rewards.by_agent]
            for agent in rules.agents
        }
        of_all = {agent: tuple(values) for agent, values in rewards.items()}
        turns = [sample for m in members for sample in m.samples(self.step, self.position, of_all)]
        kept = turns = grouped(turns, rules.grouping)
        zero_advantage: list[str] = []
        if rules.drop_zero_advantage:
            sampled = {sample.agent for sample in turns}
            zero_advantage = [a for a in rules.agents if a in sampled and not has_signal(rewards[a])]
            kept = [sample for sample in turns if sample.agent not in zero_advantage]
        if zero_advantage and not kept:
            dropped = f"all rewards are equal: {', '.join(zero_advantage)}"
        counts = Counter(sample.agent for sample in kept)
        resumed_turns = [sample for sample in kept if sample.version_changes]
        return kept, GroupClosed(
            step=self.step,
            query=self.query.id,
            samples={agent: counts[agent] for agent in rules.agents},
            generated_tokens=sum(len(sample.tokens) for sample in turns),
            waited_s=self._waited_s(),
            rewards=rewards,
            failures=self.failures,
            dropped=dropped,
            zero_advantage=zero_advantage,
            replaced=self.group.replacements,
            oversampled=self.group.oversampled,
            resumed_turns=len(resumed_turns),
            resumed_tokens=sum(sample.version_changes[-2] for sample in resumed_turns),
        )

    def _waited_s(self) -> float:
        first_turn_at = min(trajectory.first_turn_at for trajectory in self.trajectories.values())
        return max(0.0, min(first_turn_at, time.monotonic()) - self.started)
