"""Messages between orchestrator and trainer; the weights that the trainer publishes."""

import math
from dataclasses import dataclass, field
from typing import Protocol

from ...core.actor import endpoint
from ...transport.handle import StateHandle
from ..errors import SamplesLost, SamplesUnreachable, TooFewRows
from ..expert_routes import SentRoutes
from ..figures import Numbers, check_figures
from ..names import AgentName, PolicyName, Step, Version


@dataclass(frozen=True, slots=True)
class LikelyTokens:
    """The likeliest ``tokens`` behind ``prompt``, in descending order, and their log-probabilities at temperature 1.

    ``routes``: the experts of the prompt's tokens; None without experts, or if they can't be recorded.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    routes: SentRoutes | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Published:
    """A policy's weights, ready for its instances to fetch. ``probe``: computed by the trainer with these weights, for
    instances to compare with their engines' answers; empty if this version is not to be proven."""

    policy: PolicyName
    version: Version
    handle: StateHandle
    probe: tuple[LikelyTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class MicroBatchTrained:
    """``busy_s``: seconds of forward and backward. ``nonzero_advantage``: samples whose advantage is not zero.
    ``versions``: number of samples by the policy version that generated them. ``even_ranks``: the ranks that its
    samples keep busy all the time, all tokens by those of the longest sample."""

    samples: int
    tokens: int
    versions: dict[int, int]
    nonzero_advantage: int
    busy_s: float
    even_ranks: float = math.inf


@dataclass(frozen=True, slots=True)
class StepStats:
    """One optimizer step, over all of its micro-batches.

    ``samples`` and ``tokens`` (completion tokens) count all that was accumulated: other figures are divided by them.
    ``figures``: of the policy, by their names in ``figures.py``; those that are not finite are 0. ``by_agent``: figures
    of its agents. Raises UnknownFigure.
    """

    samples: int
    tokens: int
    figures: Numbers
    by_agent: dict[AgentName, Numbers] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_figures("policy", self.figures)
        for numbers in self.by_agent.values():
            check_figures("agent", numbers)


@dataclass(frozen=True, slots=True)
class PolicyStepped:
    """One optimizer step, with the weights after it.

    ``stats``: with the figures of the pool. ``publish_s``: seconds of publishing the weights and of committing the rows
    that were used. ``moves``: times since the last such answer of any policy in which states moved to the slots of a
    shared pool or from them: seconds before this answer of the begin and the end of each.
    """

    published: Published
    stats: StepStats
    publish_s: float
    moves: list[tuple[float, float]] = field(default_factory=list)


class TrainerApi(Protocol):
    async def sft(self, policy: PolicyName, first_batch: int, count: int) -> float:
        """Trains the supervised batches ``first_batch ... first_batch + count - 1`` of the recipe, with examples of
        all the policy's agents; returns the last loss."""

    async def publish(self, policy: PolicyName) -> Published:
        """Makes the current weights available to the instances.

        Ends supervised training, so that ``train`` may follow: reinforcement learning starts with fresh optimizer
        moments, and so would a ``sft`` after this.
        """

    async def keep(self, published: Published, file: str) -> None:
        """Writes published weights of a policy that is trained into a new file, for ``publish_file``."""

    async def publish_file(self, policy: PolicyName, version: Version, file: str) -> Published:
        """Makes the weights in ``file`` available as ``version`` of a policy that is not trained."""

    @endpoint(raises=[TooFewRows, SamplesLost, SamplesUnreachable])
    async def train(self, policy: PolicyName, policy_version: Version, count: int) -> MicroBatchTrained:
        """Leases ``count`` rows of the policy's agents and accumulates their gradient. After TooFewRows and
        SamplesUnreachable nothing was accumulated, and no row is leased."""

    async def optimizer_step(self, policy: PolicyName, step: Step) -> PolicyStepped:
        """Steps the policy in the run's step ``step`` (from 1), commits the rows that were used, publishes the new
        weights."""

    async def save(self, policy: PolicyName, folder: str) -> None:
        """Writes the policy's Hugging Face checkpoint and training state into ``folder``."""
