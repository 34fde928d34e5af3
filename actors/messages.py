"""Every message the four roles exchange, and the endpoints they may call on one another.

Roles never import each other: what they share is data, and it is here. A ``...Api`` class lists a role's
endpoints with their signatures; the actor runtime validates arguments and results against them.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import Field, model_validator

from ..core.actor import endpoint
from ..transport.handle import StateHandle
from ..transport.segments import ByteRef, SegmentGrant
from .config_base import Config
from .errors import InvalidRequest, PromptTooLong, StoreError, TurnAborted, WrongPolicy, WrongVersion
from .names import AgentName, PolicyName, Step, Version
from .run_events import RunEvent
from .step_metrics import StepMetrics

WORK_TIMEOUT_S: Final = 24 * 3600.0
"""Deadline of long operations, queueing included: catches one that hangs, never one that is slow."""

# --------------------------------------------------------------------------- shared configuration


class ModelConfig(Config):
    """Where a policy's weights and architecture come from; exactly one of ``path`` and ``config``.

    ``path``: a Hugging Face hub name or a local folder. ``config``: keyword arguments of
    ``AutoConfig.for_model`` (``model_type`` among them); the model is made from it with random weights.
    ``tokenizer``: a hub name or folder, by default ``path``. ``device``: where the policy trains and generates.
    """

    path: str | None = None
    config: dict[str, Any] | None = None
    tokenizer: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        if (self.path is None) == (self.config is None):
            raise ValueError(
                "give exactly one of `path` (hub name or folder) and `config` (made from scratch)"
            )
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("`config` needs a `model_type` such as qwen3")
        if self.path is None and self.tokenizer is None:
            raise ValueError("a model made from `config` needs a `tokenizer` (hub name or folder)")
        return self

    @property
    def tokenizer_source(self) -> str:
        """Hub name or folder of the tokenizer: ``tokenizer``, by default ``path``."""
        source = self.tokenizer or self.path
        assert source is not None  # checked above
        return source


# --------------------------------------------------------------------------- generating


@dataclass(frozen=True, slots=True)
class VersionRange:
    """The policy versions that may generate a turn: ``oldest ... newest``, both included, or without an upper bound.

    A turn that new weights interrupt is resumed with them if they are in its range.
    """

    oldest: Version
    newest: Version | None

    @classmethod
    def exactly(cls, version: Version) -> "VersionRange":
        return cls(version, version)

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.oldest <= version and not self._ends_before(version)

    def has_later_than(self, version: int) -> bool:
        return not self._ends_before(version + 1)

    def _ends_before(self, version: int) -> bool:
        return self.newest is not None and self.newest < version


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn to generate. ``prompt`` is a sequence of segments: text, or token ids of earlier turns,
    which are never decoded and tokenised again. ``versions``: the instance must serve one of them.

    If new weights interrupt the turn and ``versions`` has later ones, the answer is the part generated so far; else the
    turn fails with TurnAborted. ``completion``: such a part, by earlier versions, that the generation continues;
    ``max_new_tokens`` counts its tokens too.
    """

    sample_id: str
    prompt: tuple[str | tuple[int, ...], ...]
    versions: VersionRange
    seed: int
    temperature: float
    max_new_tokens: int
    completion: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to a GenerateRequest. ``tokens`` include the end-of-sequence token if one was drawn;
    ``logprobs[i]`` is the log-probability of ``tokens[i]`` under the distribution it was drawn from.

    ``text`` includes the request's ``completion``, ``tokens`` do not. ``interrupted``: new weights arrived; there may
    be no tokens yet.
    """

    text: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: Version
    finish_reason: Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True)
class Query:
    """One task instance: its id (no two of one step are equal), its text, and whatever else the workflow needs
    (plain data)."""

    id: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)


Grouping = Literal["trajectory", "agent_turns", "turn"]
"""Whose rewards an agent's are compared with in a group: one per trajectory, one per turn of the agent, or one per
trajectory that reached the same turn of the agent."""


# --------------------------------------------------------------------------- the experience store

MOST_VERSION_CHANGES: Final = 16
"""Of a turn: it sees at most as many as its policy may be ahead of it when it is trained. So many fit the store's short
strings, with token numbers of 7 digits and versions of 6."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn with its reward: a row of its agent's table.

    ``group`` is ``{step}:{query}`` and ``sample_id`` ``{group}_{turn}_{trajectory}``: unique over the run, also where
    a query comes again. ``group_rewards`` are those that ``reward`` is compared with, itself included: the agent's over
    the surviving trajectories of the group, or over its turns, as its `Grouping` says. They are known when the group
    closes, and a group-local advantage is a function of them alone. ``query_position``: of its query in the training
    data. ``columns``: what the workflow wrote into those that the config declares (``declared_columns.py``), as plain
    numbers, strings and arrays.

    ``policy_version`` generated the first token: the oldest version of all. ``version_changes`` are pairs, one behind
    the other: the number of a token and the newer version that generated it and those behind it; empty where one
    version generated all. ``temperature``: of the distribution that the tokens were drawn from.
    """

    sample_id: str
    agent: str
    step: int
    policy_version: int
    group: str
    reward: float
    group_rewards: tuple[float, ...]
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    query_position: int = 0
    columns: dict[str, Any] = field(default_factory=dict)
    version_changes: tuple[int, ...] = ()
    temperature: float = 1.0

    @property
    def token_versions(self) -> tuple[int, ...]:
        """The version that generated each of ``tokens``."""
        starts = (0, *self.version_changes[::2], len(self.tokens))
        versions = (self.policy_version, *self.version_changes[1::2])
        return tuple(
            v for v, (start, end) in zip(versions, pairwise(starts), strict=True) for _ in range(start, end)
        )


@dataclass(frozen=True, slots=True)
class TableStatistics:
    """Rows by status; ``consumed`` counts rows that an optimizer step used and that are gone."""

    ready: int
    leased: int
    consumed: int


@dataclass(frozen=True, slots=True)
class LeasedBatch:
    """Rows of one policy under a fence, by column, in the order of the policy's queue. The rows may be of several
    agents' tables: ``columns["agent"]`` names each row's, and a column that its table lacks is None for it. Columns of
    token lists and arrays are references (``column_refs.py``)."""

    fence: int
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """``memory_bytes`` and ``disk_bytes``: of segments; ``live_bytes``: what rows refer to."""

    memory_bytes: int
    disk_bytes: int
    live_bytes: int
    journal_bytes: int
    compactions: int


@dataclass(frozen=True, slots=True)
class Selection:
    """``rows``: the first of ``total`` for which the expression is true, as plain data by column name."""

    rows: list[dict[str, Any]]
    total: int


class StoreApi(Protocol):
    """The experience store, as ``store_client.py`` calls it."""

    @endpoint(idempotent=True, raises=[StoreError])
    async def grant(self, writer: str, at_least_bytes: int, finished: list[str]) -> SegmentGrant:
        """A segment for ``writer`` to fill; it writes no more to those that are ``finished``. Waits while there is no
        room. Raises StoreError where there never will be."""

    @endpoint(raises=[StoreError])
    async def put(self, writer: str, parts: dict[str, dict[str, Any]]) -> None:
        """New rows by agent and column, all or none; acknowledged once they are durable. Refused with the reason: a
        ``sample_id`` that is there already, an unknown column, a wrong type, bytes that are not the writer's."""

    @endpoint(raises=[StoreError])
    async def write(self, writer: str, parts: dict[str, dict[str, Any]]) -> None:
        """Further columns of rows that are there, by agent and column (``sample_id`` among them), all or none;
        acknowledged once they are durable. For columns that the config says are ``written_by: external``; a row whose
        required columns are all written is READY. Refused with the reason: a row that is not there (it comes when its
        group is complete), is consumed or has the column already, an unknown column, a wrong type."""

    @endpoint(raises=[StoreError])
    async def lease(self, policy: PolicyName, policy_version: int, count: int) -> LeasedBatch:
        """The oldest ``count`` READY rows of the policy's agents, of that version, or under ``async`` of those that are
        not too stale. Waits for rows that lack only what is ``written_by: external``, as long as the config says.
        Refused if there are fewer."""

    @endpoint(raises=[StoreError])
    async def commit(self, policy: PolicyName, fences: list[int], policy_version: int) -> int:
        """The rows leased under ``fences`` are consumed by the optimizer step to ``policy_version``, the policy's next;
        returns how many they are. The same call again changes nothing. Refused if a lease has ended."""

    @endpoint(raises=[StoreError])
    def fetch(self, refs: list[ByteRef]) -> AsyncIterator[bytes]:
        """The bytes of ``refs``, one behind the other, in chunks of 1 MiB, for a reader on another host. Refused where
        one is into nothing. What is leased stays until it is committed."""

    @endpoint(raises=[StoreError])
    async def select(self, where: str, limit: int) -> Selection:
        """Rows for which an SQL expression over their scalar columns is true."""

    @endpoint(raises=[StoreError])
    async def trajectory(self, name: str) -> Selection:
        """The samples of a trajectory in the tables of all agents, turn by turn. ``name``: the trajectory's,
        ``{step}:{query}_{trajectory}``, or the id of one of its samples."""

    async def table_statistics(self) -> dict[str, TableStatistics]: ...

    async def store_statistics(self) -> StoreStatistics: ...


# --------------------------------------------------------------------------- training


@dataclass(frozen=True, slots=True)
class Published:
    """A policy's weights, ready for its instances to fetch."""

    policy: PolicyName
    version: Version
    handle: StateHandle


@dataclass(frozen=True, slots=True)
class MicroBatchTrained:
    """``busy_s``: seconds of forward and backward. ``nonzero_advantage``: samples whose advantage is not zero.
    ``versions``: how many of the samples each policy version had generated."""

    samples: int
    tokens: int
    versions: dict[int, int]
    nonzero_advantage: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class PolicyStepped:
    """One optimizer step; ``loss`` is the step's token mean, ``grad_norm`` the norm before clipping.

    ``ratio_deviation``: mean ``|ratio - 1|`` between the trainer's and the engine's probability of a token,
    about 1e-6 where they agree. ``busy_s``: computing the step and the weights to publish. ``value_loss`` and
    ``explained_variance``: of the policy's critic (`critic.explained_variance`), if it has one.
    """

    published: Published
    samples: int
    tokens: int
    loss: float
    grad_norm: float
    lr: float
    clip_fraction: float
    ratio_deviation: float
    busy_s: float
    publish_s: float
    value_loss: float | None = None
    explained_variance: float | None = None


class TrainerApi(Protocol):
    async def sft(self, policy: PolicyName, first_batch: int, count: int) -> float:
        """Trains the supervised batches ``first_batch ... first_batch + count - 1`` of the recipe, with examples of
        all the policy's agents; returns the last loss."""

    async def publish(self, policy: PolicyName) -> Published:
        """Makes the current weights available to the instances.

        Ends supervised training, so that ``train`` may follow: reinforcement learning starts with fresh optimizer
        moments, and so would a ``sft`` after this.
        """

    async def train(self, policy: PolicyName, policy_version: Version, count: int) -> MicroBatchTrained:
        """Leases ``count`` rows of the policy's agents and accumulates their gradient."""

    async def optimizer_step(self, policy: PolicyName) -> PolicyStepped:
        """Steps the policy, commits the rows that were used, publishes the new weights."""

    async def save(self, policy: PolicyName, folder: str) -> None:
        """Writes the policy's Hugging Face checkpoint and training state into ``folder``."""


# --------------------------------------------------------------------------- generating


class InstanceApi(Protocol):
    @endpoint(raises=(WrongPolicy, WrongVersion))
    async def apply_weights(self, published: Published) -> Version:
        """Fetches and installs a version; returns once every new turn is generated by it.

        Raises WrongPolicy for weights of another policy than the instance's, WrongVersion if the weights found are of
        another version than ``published`` says.
        """

    @endpoint(raises=(WrongVersion, PromptTooLong, InvalidRequest, TurnAborted))
    async def generate(self, request: GenerateRequest) -> Generation:
        """Raises WrongVersion if the version served is not in ``request.versions``, PromptTooLong, InvalidRequest, and
        TurnAborted if new weights ended a turn that they may not resume."""


@dataclass(frozen=True, slots=True)
class TrajectoryFailure:
    """A trajectory that was dropped. ``trajectory`` is ``{step}:{query}_{trajectory}``."""

    trajectory: str
    error: str
    remote_traceback: str


@dataclass(frozen=True, slots=True)
class GroupClosed:
    """The group of one query is settled, and the samples of its trajectories that count are in the store.

    ``rewards`` (less the overlong punishment) and ``generated_tokens`` cover all trajectories that count, also those
    whose samples were left out.
    """

    step: Step
    query: str
    samples: dict[AgentName, int]
    """Rows that were put into the store, by agent; all agents are in it."""
    generated_tokens: int
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
    resumed_turns: int = 0
    """Turns in the store that new weights interrupted and later versions ended."""
    resumed_tokens: int = 0
    """Tokens of them that earlier versions had generated."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Means over the evaluation queries that succeeded: the workflow's own metrics and ``reward/<agent>``."""

    queries: int
    metrics: dict[str, float]
    failures: list[TrajectoryFailure]


class RolloutApi(Protocol):
    async def weights_applied(self, policy: PolicyName, version: Version) -> None:
        """All instances of ``policy`` have applied ``version``: turns that wait for it may begin."""

    async def start_step(
        self,
        step: Step,
        queries: list[tuple[int, Query]],
        trajectories: int,
        versions: dict[PolicyName, VersionRange],
    ) -> None:
        """Begins a group of ``trajectories`` trajectories for each query; each ends in a GroupClosed.

        ``queries``: each with its position in the training data. ``versions``: may generate the turns, by policy; the
        newest of them that all instances serve does. May be called again for the same step.
        """

    async def evaluate(self, queries: list[Query], versions: dict[PolicyName, Version]) -> Evaluation:
        """Runs each query once with greedy decoding, outside the store."""


# --------------------------------------------------------------------------- steering and showing


class OrchestratorApi(Protocol):
    async def start(self) -> None:
        """Begins the run; the console gets its progress and its end."""

    async def stop(self) -> None:
        """Ends the run after the steps under way, with a checkpoint."""

    async def group_closed(self, group: GroupClosed) -> None: ...


@dataclass(frozen=True, slots=True)
class RunResult:
    """``stopped``: by request, before the last step. ``evaluations``: step -> metrics."""

    last_step: int
    stopped: bool
    evaluations: dict[int, dict[str, float]]
    checkpoint: str


class ConsoleApi(Protocol):
    """Shows the run to the person who started it, and logs it."""

    async def step(self, metrics: StepMetrics) -> None:
        """A step is complete, its evaluation included."""

    async def phase(self, text: str, done: int | None, total: int | None) -> None:
        """The run's present work, and how much of it is done."""

    async def event(self, event: RunEvent) -> None: ...

    async def ended(self, result: RunResult) -> None:
        """The last message of a run that did not fail."""
