"""Finished groups that may come again, under a bound of their age. Pure.

    closed(group) ──> kept, if it is worth it ──> take(versions, queries) ──> comes again, at most ``times``
                        │                    └──> too old: forgotten
                        └──> beyond ``limit``: the one that is worth least is forgotten

A group that comes again is a group of its own: its query has another name, ``q7~3`` for the third group that comes
again in the run, and its samples are those of the versions that generated them, with the log-probabilities that they
were drawn with. So the correction of the loss weighs them like other samples of those versions, and the step that
trains them is found, or they are refused, by the rules of late groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...messages import LoggedGroup
from ...names import AgentName, PolicyName, Version
from .replay_options import ReplayOptions


@dataclass(slots=True)
class KeptGroup:
    """``number``: of its end, counted over the run. ``uses``: times that it came again."""

    number: int
    group: LoggedGroup
    uses: int = 0

    @property
    def rewards(self) -> dict[AgentName, list[float]]:
        """By agent."""
        rewards: dict[AgentName, list[float]] = {}
        for trajectory in self.group.trajectories:
            for agent, reward in trajectory.rewards.items():
                rewards.setdefault(agent, []).append(reward)
        return rewards

    @property
    def oldest(self) -> int:
        """The oldest version of its samples; 0 without any."""
        return min(self.group.oldest().values(), default=Version(0))


@dataclass(slots=True)
class ReplayState:
    """The buffer at a checkpoint, from which a run continues. ``closed``: groups that have been seen. ``replays``:
    groups that came again. ``credit``: groups that may come again beyond those of a step's share."""

    groups: list[KeptGroup] = field(default_factory=list)
    closed: int = 0
    replays: int = 0
    credit: float = 0.0


class ReplayBuffer:
    """``state``: of the run until now."""

    def __init__(
        self,
        options: ReplayOptions,
        staleness: int,
        policy_of: Mapping[AgentName, PolicyName],
        state: ReplayState | None = None,
    ) -> None:
        """``staleness``: of the run. ``policy_of``: the policies that are trained, by agent."""
        self._options, self._policy_of = options, policy_of
        self._bound = staleness if options.max_staleness is None else options.max_staleness
        self.state = ReplayState() if state is None else state

    def closed(self, group: LoggedGroup) -> None:
        """A group has ended, whose samples are in the store."""
        state = self.state
        state.closed += 1
        kept = KeptGroup(state.closed, group)
        if self._options.keeps(kept.rewards):
            state.groups.append(kept)
            if len(state.groups) > self._options.limit:
                state.groups.remove(min(state.groups, key=self._rank))

    def take(self, versions: Mapping[PolicyName, Version], queries: int) -> list[LoggedGroup]:
        """The groups that come again in a step of ``queries`` queries. ``versions``: the newest of each policy."""
        state = self.state
        state.groups = [kept for kept in state.groups if self._is_young(kept, versions)]
        due = state.credit + self._options.share * queries
        picks = sorted(state.groups, key=self._rank, reverse=True)[: int(due)]
        state.credit = min(due - len(picks), 1.0)
        groups = []
        for kept in picks:
            kept.uses += 1
            state.replays += 1
            query = replace(kept.group.query, id=f"{kept.group.query.id}~{state.replays}")
            groups.append(replace(kept.group, query=query))
        state.groups = [kept for kept in state.groups if kept.uses < self._options.times]
        return groups

    def _is_young(self, kept: KeptGroup, versions: Mapping[PolicyName, Version]) -> bool:
        return all(
            versions[self._policy_of[agent]] - version <= self._bound
            for agent, version in kept.group.oldest().items()
        )

    def _rank(self, kept: KeptGroup) -> tuple[float, ...]:
        # By the order of the ends at last: two groups never have the same rank.
        return (-kept.uses, *self._options.worth(kept.rewards, kept.oldest), kept.number)
