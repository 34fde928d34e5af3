"""A running group, and the samples and report that it leaves."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from ...credit.credit_config import CreditConfig
from ...demonstrations.demonstration import Demonstration
from ...errors import SessionUnrewarded
from ...figures import Numbers, StepFigures
from ...filters.group_filter import FinishedGroup, FinishedTurn, GroupFilter, apply_filters
from ...messages import (
    AgentTurns,
    GroupClosed,
    GroupWaiting,
    LoggedGroup,
    LoggedTrajectory,
    Query,
    Sample,
    TrajectoryFailure,
    VersionRange,
)
from ...names import AgentName, PolicyName, Step, Version
from ...sample_id import SampleId
from ...trees.branch_rule import BranchRule
from ...trees.success_model import PrefixEnd, SuccessModel
from ..trajectory import Trajectory
from ..trajectory_rewards import Amounts
from .credit_assignment import assign_credit
from .explorations import ExplorationsConfig
from .exploring import exploration_figures
from .group import Decision, Group


@dataclass(frozen=True, slots=True)
class TrajectoryEnd:
    """The end of a trajectory. ``replacement``: it passed its deadline, and another should take its place. ``error``:
    that of its workflow, or one whose traceback shows the frames in which that hangs. ``late``: it has failed for want
    of rewards from outside alone."""

    trajectory: Trajectory
    failure: TrajectoryFailure | None = None
    replacement: bool = False
    error: BaseException | None = None
    late: bool = False


@dataclass(frozen=True, slots=True)
class RewardsAwaited:
    """A trajectory's workflow has returned, and rewards from outside are missing."""

    number: int


@dataclass(frozen=True, slots=True)
class GivenUp:
    """No step can train the group any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class GroupClosingRules:
    """``credit``: by agent, for all agents of the run. ``filters``: leave samples out, in their order. ``frozen``:
    agents that are not trained, and leave no samples. ``replays``: the report of a group has its trajectories, which
    may come again. ``sides``: by policy that is a pool of past versions, the agents against it and its own."""

    credit: Mapping[AgentName, CreditConfig]
    filters: Sequence[GroupFilter] = ()
    frozen: Collection[AgentName] = ()
    replays: bool = False
    sides: Mapping[PolicyName, tuple[Sequence[AgentName], Sequence[AgentName]]] = field(default_factory=dict)

    @property
    def agents(self) -> Collection[AgentName]:
        """All agents of the run, also those that are not trained."""
        return self.credit.keys()

    @property
    def trained(self) -> list[AgentName]:
        """The agents that leave samples."""
        return [agent for agent in self.agents if agent not in self.frozen]


@dataclass(slots=True)
class GroupRun:
    """``position``: the number of the query's draw, over the run. ``submitted``: a program has submitted the query, and
    waits for its answer. ``grace_s``: seconds after which a trajectory that lacks rewards from outside counts as
    ``awaited``; None: never. ``leaves_out_late``: a trajectory whose reward is not there in time is late, and no
    failure. ``logged``: its trajectories, if they ended before; the step has only samples of them, and no figures of
    generating and rewarding. ``is_session``: a program outside the run plays it. ``rule``: of the branches of its
    trajectories. ``model``: predicts their success for the rule. ``demonstration``: that they follow. ``explores``: its
    explorations. ``clock``: the time in seconds. ``trajectories`` and ``tasks`` are by number, and so are ``ended``,
    the ends until now, and ``explorations``, which have ended before the first of ``trajectories`` begins and never
    leave samples. ``awaited``: the trajectories that wait for rewards from outside, or have waited. ``announced``: the
    orchestrator knows that the group waits. ``late``: the number of trajectories that are left out, because rewards
    came too late or not at all. ``credited_turns``: once it has closed, all turns of the trajectories that count."""

    step: Step
    query: Query
    position: int
    versions: Mapping[PolicyName, VersionRange]
    group: Group
    clock: Callable[[], float]
    submitted: bool = False
    grace_s: float | None = None
    leaves_out_late: bool = False
    logged: Sequence[LoggedTrajectory] = ()
    is_session: bool = False
    rule: BranchRule | None = None
    model: SuccessModel | None = None
    demonstration: Demonstration | None = None
    explores: ExplorationsConfig | None = None
    started: float = field(init=False)
    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    explorations: dict[int, Trajectory] = field(default_factory=dict)
    failed_explorations: int = 0
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    # One queue, read by the group's own task: ``Group`` gets one event after the other, however many end at once.
    ends: asyncio.Queue[TrajectoryEnd | RewardsAwaited | GivenUp] = field(default_factory=asyncio.Queue)
    awaited: set[int] = field(default_factory=set)
    announced: bool = False
    late: int = 0
    failures: list[TrajectoryFailure] = field(default_factory=list)
    ended: dict[int, TrajectoryEnd] = field(default_factory=dict)
    _ended_at: list[float] = field(default_factory=list)
    credited_turns: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def begin(self, number: int) -> Trajectory:
        """Makes the trajectory that a Start of the group has decided."""
        trajectory = Trajectory(self.query, self.step, number, self.versions)
        trajectory.leaves_out_late = self.leaves_out_late
        trajectory.is_session = self.is_session
        trajectory.rule, trajectory.model, trajectory.demonstration = (
            self.rule,
            self.model,
            self.demonstration,
        )
        if self.grace_s is not None:
            trajectory.awaits_rewards = partial(self._await_rewards, number, self.grace_s)
        self.trajectories[number] = trajectory
        return trajectory

    def begin_exploration(self, number: int, explorers: Mapping[PolicyName, PolicyName]) -> Trajectory:
        """Makes an exploration. ``explorers``: by policy; those that have no versions of their own serve the
        policy's."""
        of_explorers = {explorer: self.versions[policy] for policy, explorer in explorers.items()}
        trajectory = Trajectory(self.query, self.step, number, {**of_explorers, **self.versions})
        trajectory.is_exploration = True
        self.explorations[number] = trajectory
        return trajectory

    def end(self, number: int, end: TrajectoryEnd) -> None:
        """Notes the end of a trajectory."""
        self.ended[number] = end
        self._ended_at.append(self.clock())

    def _await_rewards(self, number: int, grace_s: float) -> None:
        asyncio.get_running_loop().call_later(grace_s, self.ends.put_nowait, RewardsAwaited(number))

    @property
    def awaits_rewards(self) -> bool:
        """True if the group lacks nothing but rewards from outside."""
        running = self.trajectories.keys() - self.ended.keys()
        return bool(running) and running <= self.awaited

    @property
    def _unfailed(self) -> list[Trajectory]:
        """The trajectories that run or have ended well."""
        return [
            trajectory
            for number, trajectory in self.trajectories.items()
            if number not in self.ended or self.ended[number].failure is None
        ]

    def oldest(self, policy_of: Mapping[AgentName, PolicyName]) -> dict[PolicyName, Version]:
        """The oldest version of its samples. ``policy_of``: the policies that are trained, by agent."""
        oldest: dict[PolicyName, Version] = {}
        for trajectory in self._unfailed:
            for agent, version in trajectory.oldest_versions().items():
                if agent in policy_of:
                    policy = policy_of[agent]
                    oldest[policy] = min(oldest.get(policy, version), version)
        return oldest

    def waiting(self, policy_of: Mapping[AgentName, PolicyName]) -> GroupWaiting:
        """The report of a group that lacks nothing but rewards."""
        members = self._unfailed
        answers = [member.answer() for member in members] if self.submitted else []
        return GroupWaiting(
            self.step, self.query.id, self.oldest(policy_of), len(members), len(self.failures), answers
        )

    def with_late(self, reason: str) -> str:
        """``reason`` for which the group is dropped, with the trajectories that had no reward in time."""
        if unrewarded := self._unrewarded:
            return str(unrewarded[0])
        late = sum(end.late for end in self.ended.values())
        return f"{reason}; {late} had no reward in time" if late else reason

    @property
    def _unrewarded(self) -> list[SessionUnrewarded]:
        """The errors of sessions that ended without rewards."""
        errors = (end.error for end in self.ended.values())
        return [error for error in errors if isinstance(error, SessionUnrewarded)]

    def give_up(self, reason: str) -> list[Decision]:
        """No step can train the group any more."""
        if not self.group.settled:
            self.late += len(self._unfailed)
        return self.group.give_up(reason)

    def close(
        self, numbers: Sequence[int], rules: GroupClosingRules, dropped: str = ""
    ) -> tuple[list[Sample], GroupClosed]:
        """The samples, each with its advantage and the size of its group, and the report of the trajectories with these
        numbers, those that count. ``dropped``: the reason for counting no trajectory."""
        members = [self.trajectories[number] for number in numbers]
        used = {member.number: member.rewards.used for member in members}
        # Also the turns that are left out below: the record of the run shows their advantages.
        turns = self.credited_turns = self._turns(used, rules)
        kept, filtered, reasons = self._filter(turns, members, rules)
        if reasons and not kept:  # then another query may take its place, as for a group that failed
            dropped = "; ".join(reasons)
        counts = Counter(sample.agent for sample in kept)
        if self.logged:
            return kept, self._close_logged(counts, members, rules, dropped, filtered)
        resumed_turns = [sample for sample in kept if sample.version_changes]
        return kept, GroupClosed(
            step=self.step,
            query=self.query.id,
            samples={agent: counts[agent] for agent in rules.trained},
            turns={agent: _turns_of(members, agent) for agent in rules.agents},
            waited_s=self._waited_s(),
            tail_s=self._tail_s(),
            rewards={agent: [*numbers.values()] for agent, numbers in _by_agent(used, rules.agents).items()},
            turn_rewards=_turn_rewards(members, rules.agents),
            metrics=_metrics(members),
            failures=self.failures,
            dropped=dropped,
            filtered=filtered,
            figures={
                "replaced_trajectories": self.group.replacements,
                "oversampled_trajectories": self.group.oversampled,
                "late_trajectories": self.late,
                "retried_turns": sum(trajectory.retried_turns for trajectory in self.trajectories.values()),
                "limited_trajectories": sum(trajectory.limited for trajectory in self.trajectories.values()),
                "environment_s": sum(member.environment_s for member in members),
                "reward_s": sum(member.reward_s for member in members),
                **_service_figures(self.trajectories.values()),
                **self._gateway_figures(),
                **_tree_figures(members),
                **exploration_figures(self.explorations, members, rules.trained, self.failed_explorations),
                **Counter(f"{unrewarded.fate}_sessions" for unrewarded in self._unrewarded),
                "resumed_turns": len(resumed_turns),
                # The place of the last change: all tokens before it were kept from earlier versions.
                "resumed_tokens": sum(sample.version_changes[-2] for sample in resumed_turns),
            },
            games={pool: _games(members, *sides) for pool, sides in rules.sides.items()},
            trajectories=[member.answer() for member in members] if self.submitted else [],
            finished=self._record_group(members, rules) if kept and not self.submitted else None,
            prefixes=_prefixes(members),
        )

    def _record_group(self, members: Sequence[Trajectory], rules: GroupClosingRules) -> LoggedGroup | None:
        if not rules.replays:
            return None
        logged = [member.logged(rules.trained) for member in members]
        trajectories = [trajectory for trajectory in logged if trajectory is not None]
        return LoggedGroup(self.query, trajectories) if len(trajectories) == len(logged) else None

    def _gateway_figures(self) -> dict[str, int | float]:
        trajectories = self.trajectories.values()
        counts = {
            f"gateway_{kind}": sum(trajectory.programs.counts[kind] for trajectory in trajectories)
            for kind in ("merged", "branched")
        }
        masked = sum(len(trajectory.left_out) for trajectory in trajectories if trajectory.tree is None)
        return {**counts, "gateway_masked": masked}

    def _close_logged(
        self,
        counts: Mapping[str, int],
        members: Sequence[Trajectory],
        rules: GroupClosingRules,
        dropped: str,
        filtered: dict[str, dict[AgentName, int]],
    ) -> GroupClosed:
        return GroupClosed(
            step=self.step,
            query=self.query.id,
            samples={agent: counts.get(agent, 0) for agent in rules.trained},
            turns={agent: AgentTurns() for agent in rules.agents},
            waited_s=math.inf,
            rewards={},
            failures=self.failures,
            dropped=dropped,
            filtered=filtered,
            figures={
                "logged_trajectories": len(members),
                "late_trajectories": self.late,
                "shared_groups": int("origin" in self.query.data),
            },
            trajectories=[member.answer() for member in members],
        )

    def _turns(self, amounts: Mapping[int, Amounts], rules: GroupClosingRules) -> list[Sample]:
        """All turns of the trajectories that count, as samples. ``amounts``: the rewards of each, by number."""
        trained = rules.trained
        turns = [
            sample
            for number, rewards in amounts.items()
            for sample in self.trajectories[number].samples(self.step, self.position, trained, rewards)
        ]
        trees = [tree for number in amounts if (tree := self.trajectories[number].tree) is not None]
        places = {sample_id: place for tree in trees for sample_id, place in tree.places.items()}
        return assign_credit(turns, rules.credit, _by_agent(amounts, trained), places)

    def _filter(
        self, turns: list[Sample], members: Sequence[Trajectory], rules: GroupClosingRules
    ) -> tuple[list[Sample], dict[str, dict[AgentName, int]], list[str]]:
        """Those of ``turns`` that no filter leaves out; by filter and agent the number of the others; the reasons."""
        if not rules.filters:
            return turns, {}, []
        rest, counts, reasons = apply_filters(self._finished_group(members, rules), rules.filters)
        remaining = {turn.sample_id for turn in rest.turns}
        return [turn for turn in turns if turn.sample_id in remaining], counts, reasons

    def _finished_group(self, members: Sequence[Trajectory], rules: GroupClosingRules) -> FinishedGroup:
        """The group as filters see it, by the workflow's rewards before any punishment."""
        amounts = {member.number: member.rewards.before_punishment for member in members}
        endings = {sample_id: ending for member in members for sample_id, ending in member.endings().items()}
        turns = []
        for sample in sorted(
            self._turns(amounts, rules), key=lambda sample: SampleId.parse(sample.sample_id)
        ):
            text, truncated = endings[sample.sample_id]
            turns.append(
                FinishedTurn(
                    sample_id=sample.sample_id,
                    agent=AgentName(sample.agent),
                    trajectory=SampleId.parse(sample.sample_id).trajectory,
                    prompt_tokens=sample.prompt_tokens,
                    tokens=sample.tokens,
                    text=text,
                    truncated=truncated,
                    reward=sample.reward,
                    advantage=sample.advantage,
                )
            )
        rewards = {agent: [*numbers.values()] for agent, numbers in _by_agent(amounts, rules.agents).items()}
        return FinishedGroup(self.query, tuple(turns), rewards, _metrics(members))

    def _waited_s(self) -> float:
        # Infinity if no turn has gone to an instance: then the group has waited until now.
        played = [*self.explorations.values(), *self.trajectories.values()]
        first_turn_at = min(trajectory.first_turn_at for trajectory in played)
        return max(0.0, min(first_turn_at, self.clock()) - self.started)

    def _tail_s(self) -> float:
        if self.group.oversampled:  # it has waited for the first of several, as it was asked to
            return 0.0
        return self._ended_at[-1] - self._ended_at[-2] if len(self._ended_at) > 1 else 0.0


def _by_agent(
    amounts: Mapping[int, Amounts], agents: Iterable[AgentName]
) -> dict[AgentName, dict[int, float]]:
    """By agent and number: its reward in each trajectory that gives it one."""
    return {
        agent: {
            number: rewards.by_agent[agent]
            for number, rewards in amounts.items()
            if agent in rewards.by_agent
        }
        for agent in agents
    }


def _turn_rewards(members: Sequence[Trajectory], agents: Iterable[AgentName]) -> dict[AgentName, list[float]]:
    """By agent: the rewards of single turns; agents without any are left out."""
    by_agent = {
        agent: [reward for member in members for reward in member.rewards.of_turns.get(agent, ())]
        for agent in agents
    }
    return {agent: rewards for agent, rewards in by_agent.items() if rewards}


def _games(
    members: Sequence[Trajectory], against: Iterable[AgentName], policy_agents: Iterable[AgentName]
) -> list[tuple[float, float]]:
    """By the workflow's own rewards, before any punishment. See ``GroupClosed.games``."""
    games = []
    for rewards in (member.rewards.before_punishment.by_agent for member in members):
        sides = [[rewards[agent] for agent in side if agent in rewards] for side in (against, policy_agents)]
        if all(sides):
            games.append((fmean(sides[0]), fmean(sides[1])))
    return games


def _metrics(members: Sequence[Trajectory]) -> dict[str, list[float]]:
    values_of: dict[str, list[float]] = {}
    for member in members:
        for name, value in member.rewards.metrics.items():
            values_of.setdefault(name, []).append(value)
    return values_of


def _service_figures(trajectories: Iterable[Trajectory]) -> Numbers:
    """Sums over all calls of outside services, also those of trajectories that have failed."""
    sums: Numbers = {}
    for trajectory in trajectories:
        for name, value in trajectory.service_figures.items():
            sums[name] = sums.get(name, 0) + value
    return sums


def _tree_figures(members: Sequence[Trajectory]) -> dict[str, int]:
    trees = [(member, tree) for member in members if (tree := member.tree) is not None]
    return {
        "branch_points": sum(tree.nodes for _, tree in trees),
        "cut_lines": sum(tree.cut_lines for _, tree in trees),
        "untrained_branch_turns": sum(len(member.left_out) for member, _ in trees),
    }


def _prefixes(members: Sequence[Trajectory]) -> list[PrefixEnd]:
    """In the order of the trajectories' numbers, not of their ends: the sums of floats in the predictor follow it."""
    trees = [member.tree for member in sorted(members, key=lambda member: member.number)]
    return [prefix for tree in trees if tree is not None for prefix in tree.prefixes]


def _turns_of(members: Sequence[Trajectory], agent: AgentName) -> AgentTurns:
    figures, lengths = StepFigures("agent"), list[int]()
    for turns in (member.turns_of(agent) for member in members):
        figures.update(turns.figures)
        lengths += turns.lengths
    return AgentTurns(figures.numbers(), tuple(lengths))
