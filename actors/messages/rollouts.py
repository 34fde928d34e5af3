"""Messages between orchestrator and rollout: queries, groups, evaluations."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..names import AgentName, PolicyName, Step, Version
from .generating import VersionRange


@dataclass(frozen=True, slots=True)
class Query:
    """One task instance: its id (unique within a step), its text, and further plain data for the workflow."""

    id: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)


Grouping = Literal["trajectory", "agent_turns", "turn"]
"""The rewards that an agent's reward is compared with in a group: one per trajectory, one per turn of the agent, or one
per trajectory that reached the same turn of the agent."""


@dataclass(frozen=True, slots=True)
class TrajectoryFailure:
    """A trajectory that was dropped. ``trajectory`` is ``{step}:{query}_{trajectory}``."""

    trajectory: str
    error: str
    remote_traceback: str


@dataclass(frozen=True, slots=True)
class AgentTurns:
    """Turns of one agent."""

    turns: int = 0
    tokens: int = 0
    """Generated tokens."""
    truncated: int = 0
    """Turns that ended at ``max_new_tokens``."""

    def __add__(self, other: "AgentTurns") -> "AgentTurns":
        return AgentTurns(
            self.turns + other.turns, self.tokens + other.tokens, self.truncated + other.truncated
        )


@dataclass(frozen=True, slots=True)
class GroupClosed:
    """The group of one query is settled, and the samples of its trajectories that count are in the store.

    ``rewards`` (less the overlong punishment) and ``turns`` cover all trajectories that count, also those
    whose samples were left out.
    """

    step: Step
    query: str
    samples: dict[AgentName, int]
    """Rows that were put into the store, by agent; all agents are in it."""
    turns: dict[AgentName, AgentTurns]
    """All agents are in it."""
    waited_s: float
    """Seconds from the step's start until the group's first turn went to an instance."""
    rewards: dict[AgentName, list[float]]
    failures: list[TrajectoryFailure]
    dropped: str = ""
    """The reason if the group has no samples at all, or empty."""
    zero_advantage: list[AgentName] = field(default_factory=list)
    """Agents whose samples were left out, because all their rewards are equal."""
    replaced: int = 0
    """Stragglers that were replaced."""
    oversampled: int = 0
    """Trajectories that still ran when the group was settled."""
    retried_turns: int = 0
    """Turns whose instance was lost, and that another one began again; each time counts."""
    resumed_turns: int = 0
    """Turns in the store that new weights interrupted and later versions ended."""
    resumed_tokens: int = 0
    """Tokens of them that earlier versions had generated."""

    @property
    def generated_tokens(self) -> int:
        return sum(of_agent.tokens for of_agent in self.turns.values())


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics by name, over the trajectories that did not fail: means of the workflow's own metrics and of
    ``reward/<agent>``, and pass@k if queries were repeated."""

    trajectories: int
    metrics: dict[str, float]
    failures: list[TrajectoryFailure]


class RolloutApi(Protocol):
    async def start_step(
        self,
        step: Step,
        queries: list[tuple[int, Query]],
        trajectories: int,
        versions: dict[PolicyName, VersionRange],
    ) -> None:
        """Begins a group of ``trajectories`` trajectories for each query; each ends in a GroupClosed.

        ``queries``: each with its position in the training data. ``versions``: may generate the turns, by policy; the
        newest of them that the instances serve does. May be called again for the same step.
        """

    async def evaluate(self, queries: list[Query], versions: dict[PolicyName, Version]) -> Evaluation:
        """Runs each query as the config's ``evaluation`` says, outside the store."""
