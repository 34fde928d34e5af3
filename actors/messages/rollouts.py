"""Messages between orchestrator and rollout: queries, groups, evaluations."""

from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ...core.actor import endpoint
from ..errors import RecipeError, WorkerReplaced
from ..figures import Numbers, check_figures
from ..names import AgentName, PolicyName, Step, Version
from ..trees.success_model import PrefixEnd
from .generating import TextApi, VersionRange
from .sessions import CarrierApi


@dataclass(frozen=True, slots=True)
class Query:
    """One task instance: its id (unique within a step), its text, and further plain data for the workflow."""

    id: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)


def refuse_equal_ids(queries: Iterable[Query], where: str) -> None:
    """Raises RecipeError if two queries have the same id: their trajectories would have the same names."""
    equal = [query_id for query_id, count in Counter(query.id for query in queries).items() if count > 1]
    if equal:
        raise equal_ids(where, equal[0])


def equal_ids(where: str, query_id: str) -> RecipeError:
    """The error for two queries of a step, or of an evaluation, with one id. ``where``: begins the sentence."""
    return RecipeError(
        f"{where} has two queries with the id {query_id!r}: give each an id of its own, such as its position"
    )


@dataclass(frozen=True, slots=True)
class LoggedTurn:
    """A turn that was generated before, perhaps outside of the run. ``version``: of the policy of ``agent`` that has
    generated it; None: another policy has. ``logprobs``: as in ``Sample``, under the distribution with this
    ``temperature``; NaN if they are not known."""

    agent: AgentName
    prompt: list[Any]
    """Texts or messages, for people; empty if the prompt is known by its tokens alone."""
    text: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float
    version: Version | None


@dataclass(frozen=True, slots=True)
class LoggedTrajectory:
    """``rewards``: by agent; all agents of ``turns`` have one."""

    turns: list[LoggedTurn]
    rewards: dict[AgentName, float]


@dataclass(frozen=True, slots=True)
class LoggedGroup:
    """The trajectories of one query, whose rewards are compared. ``query``: names them in the run."""

    query: Query
    trajectories: list[LoggedTrajectory]

    @property
    def turns(self) -> list[LoggedTurn]:
        """The turns of all trajectories."""
        return [turn for trajectory in self.trajectories for turn in trajectory.turns]

    def oldest(self) -> dict[AgentName, Version]:
        """By agent: the oldest version of its turns; agents whose turns have none are left out."""
        oldest: dict[AgentName, Version] = {}
        for turn in self.turns:
            if turn.version is not None:
                oldest[turn.agent] = min(oldest.get(turn.agent, turn.version), turn.version)
        return oldest


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """``text``: the answer's. ``reward``: the one that the turn is trained with, before any punishment of its length;
    None if a program outside the run has not given it yet."""

    agent: AgentName
    sample_id: str
    text: str
    policy_version: Version
    reward: float | None


@dataclass(frozen=True, slots=True)
class AnsweredTrajectory:
    """``rewards``: by agent, as they were given, with the team's share; the sum of its turns' if an agent has none
    of its own. ``metrics``: the workflow's own. ``turns``: of all agents, in their order."""

    rewards: dict[AgentName, float]
    metrics: dict[str, float]
    turns: list[AnsweredTurn]


@dataclass(frozen=True, slots=True)
class QueryAnswer:
    """A submitted query, rolled out. ``query``: its id. ``step``: the one that trains it. ``trajectories``: those that
    count. ``failures``: the number of those that failed. ``dropped``: the reason if none of its samples is trained, or
    empty."""

    query: str
    step: Step
    trajectories: list[AnsweredTrajectory]
    failures: int
    dropped: str

    @property
    def rewards(self) -> dict[AgentName, list[float]]:
        """By agent: its rewards in the trajectories that count."""
        by_agent: dict[AgentName, list[float]] = {}
        for trajectory in self.trajectories:
            for agent, reward in trajectory.rewards.items():
                by_agent.setdefault(agent, []).append(reward)
        return by_agent

    @property
    def texts(self) -> list[str]:
        """The last turn's text of each trajectory."""
        return [trajectory.turns[-1].text if trajectory.turns else "" for trajectory in self.trajectories]


Grouping = Literal["trajectory", "agent_turns", "turn"]
"""The rewards that an agent's reward is compared with in a group: one per trajectory, one per turn of the agent, or one
per trajectory that reached the same turn of the agent."""


RewardUse = Literal["trajectory", "turn", "both"]
"""The reward that a sample's advantage is computed from: its trajectory's, its turn's own, or their sum."""


@dataclass(frozen=True, slots=True)
class TrajectoryFailure:
    """A trajectory that was dropped. ``trajectory`` is ``{step}:{query}_{trajectory}``."""

    trajectory: str
    error: str
    remote_traceback: str


@dataclass(frozen=True, slots=True)
class AgentTurns:
    """Turns of one agent. ``figures``: of the agent, by their names in ``figures.py``; they are merged over the
    trajectories of a group, and over groups. ``lengths``: generated tokens of each turn. Raises UnknownFigure."""

    figures: Numbers = field(default_factory=dict)
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_figures("agent", self.figures)


@dataclass(frozen=True, slots=True)
class GroupClosed:
    """The group of one query is settled, and the samples of its trajectories that count are in the store.

    ``rewards`` (less the overlong punishment) and ``turns`` cover all trajectories that count, also those
    whose samples were left out. Raises UnknownFigure.
    """

    step: Step
    query: str
    samples: dict[AgentName, int]
    """Rows that were put into the store, by agent; all agents that are trained are in it."""
    turns: dict[AgentName, AgentTurns]
    """All agents are in it."""
    waited_s: float
    """Seconds from the step's start until the group's first turn went to an instance."""
    rewards: dict[AgentName, list[float]]
    """Rewards of trajectories, with the team's share."""
    failures: list[TrajectoryFailure]
    dropped: str = ""
    """The reason if the group has no samples at all, or empty."""
    filtered: dict[str, dict[AgentName, int]] = field(default_factory=dict)
    """By filter of ``rollout.filters`` and agent: the samples that it left out; filters that left out nothing are not
    in it."""
    figures: Numbers = field(default_factory=dict)
    """Figures of the step, by their names in ``figures.py``; the step's are merged over its groups."""
    turn_rewards: dict[AgentName, list[float]] = field(default_factory=dict)
    """Those that single turns were given; agents without any are not in it."""
    games: dict[PolicyName, list[tuple[float, float]]] = field(default_factory=dict)
    """By policy that is a pool of past versions: the mean reward of the agents against it, and that of its own agents,
    in each trajectory that gives both."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """The workflow's own, by name: one for each trajectory that counts and has it."""
    trajectories: list[AnsweredTrajectory] = field(default_factory=list)
    """Those that count, of a submitted query: for its answer."""
    tail_s: float = 0.0
    """Seconds for which the group has waited for its last trajectory alone; 0 for a group of one."""
    finished: LoggedGroup | None = None
    """All of it, if it may come again (``replay``)."""
    prefixes: list[PrefixEnd] = field(default_factory=list)
    """Prefixes of the trees of its trajectories, in order, if their rule predicts success: the run learns from them."""

    def __post_init__(self) -> None:
        check_figures("step", self.figures)

    @property
    def generated_tokens(self) -> int:
        """Tokens of all turns of the trajectories that count."""
        return int(sum(turns.figures.get("tokens", 0) for turns in self.turns.values()))


@dataclass(frozen=True, slots=True)
class GroupWaiting:
    """A group whose workflows have all returned, and that lacks nothing but rewards from outside the run.

    ``oldest``: the oldest version of its samples, by policy that is trained. ``trajectories``: those that wait or have
    ended well, without the rewards that are missing; of a submitted query, for its answer."""

    step: Step
    query: str
    oldest: dict[PolicyName, Version]
    count: int
    """Number of the trajectories that wait or have ended well."""
    failures: int
    trajectories: list[AnsweredTrajectory] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WorkerIncarnation:
    """One life of a rollout actor, from its start to its end. ``writer``: its name in this life, which the store's
    writer has too; after a restart it has another. ``incarnation``: of its system."""

    writer: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class EvaluationTrajectory:
    """``number``: unique among those of the query. ``temperature``: of all agents' turns; None: each agent's own."""

    query: Query
    number: int
    temperature: float | None


@dataclass(frozen=True, slots=True)
class EvaluationEnd:
    """The workflow's rewards by agent and its metrics, both empty if the trajectory failed."""

    rewards: dict[AgentName, float]
    metrics: dict[str, float]
    failure: TrajectoryFailure | None = None


class RolloutApi(TextApi, CarrierApi, Protocol):
    """A rollout worker. Work is meant for one of its lives, which ``writer`` names; a later one raises
    WorkerReplaced."""

    @endpoint
    def enlist(self) -> AsyncGenerator[WorkerIncarnation]:
        """This life of the worker: one item. The stream ends when the life does."""

    @endpoint(raises=[RecipeError, WorkerReplaced])
    async def start_step(
        self,
        writer: str,
        step: Step,
        queries: list[tuple[int, Query]],
        trajectories: int,
        versions: dict[PolicyName, VersionRange],
        submitted: list[str] | None = None,
        logged: dict[str, list[LoggedTrajectory]] | None = None,
        sessions: list[str] | None = None,
        success_state: list[float] | None = None,
    ) -> None:
        """Begins a group of ``trajectories`` trajectories for each query; each ends in a GroupClosed.

        ``queries``: each with the number of its draw, over the run. ``versions``: may generate the turns, by policy;
        the newest of them that the instances serve does. ``submitted``: the ids of the queries that a program has
        submitted: the reports of their groups have their trajectories. ``logged``: by id of the query, the trajectories
        of a group that ended before: no workflow runs for it. ``sessions``: the ids of the queries that a program
        outside the run plays, and no workflow: their groups have one trajectory. ``success_state``: of the
        ``SuccessModel`` that the run has learnt before the step. May be called again for the same step.
        """

    async def give_up(self, step: Step, query: str, reason: str) -> None:
        """No step can train the group any more, which waits for rewards: it ends without samples. Ignored if it has
        ended."""

    @endpoint(raises=[RecipeError, WorkerReplaced])
    async def evaluate(
        self,
        writer: str,
        step: Step,
        trajectories: list[EvaluationTrajectory],
        versions: dict[PolicyName, Version],
    ) -> list[EvaluationEnd]:
        """Runs trajectories outside the store; returns their ends in the same order. ``step``: the one that the
        evaluation comes after."""
