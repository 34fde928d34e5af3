"""Messages between orchestrator and trainer; the weights that the trainer publishes."""

from dataclasses import dataclass, field
from typing import Protocol

from ...core.actor import endpoint
from ...transport.handle import StateHandle
from ..errors import SamplesLost, SamplesUnreachable, TooFewRows
from ..names import AgentName, PolicyName, Step, Version


@dataclass(frozen=True, slots=True)
class Published:
    """A policy's weights, ready for its instances to fetch."""

    policy: PolicyName
    version: Version
    handle: StateHandle


@dataclass(frozen=True, slots=True)
class MicroBatchTrained:
    """``busy_s``: seconds of forward and backward. ``nonzero_advantage``: samples whose advantage is not zero.
    ``versions``: number of samples by the policy version that generated them."""

    samples: int
    tokens: int
    versions: dict[int, int]
    nonzero_advantage: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """A policy's share of a shared pool since its optimizer step before, in seconds: each moment counts once.

    ``computing``; ``idle``: on its slots without a computation; ``swapping``: on its way to its slots or from them;
    ``waiting``: a computation was ready, and others had the slots; ``suspended``: without work. ``suspensions``, and
    ``moved_bytes`` of states between slots and the host's memory. ``repeated``: micro-batches that were trained again,
    because a slot worker was lost; each time counts.
    """

    computing_s: float
    idle_s: float
    swapping_s: float
    waiting_s: float
    suspended_s: float
    suspensions: int
    moved_bytes: int
    repeated: int


@dataclass(frozen=True, slots=True)
class AgentShare:
    """One agent's shares of an optimizer step: of the tokens, and of the sum of ``|advantage|`` over the tokens. The
    latter is None if all are 0, and with a critic."""

    tokens: float
    advantages: float | None


@dataclass(frozen=True, slots=True)
class StepStats:
    """Figures of one optimizer step, over all of its micro-batches.

    ``samples`` and ``tokens`` (completion tokens) count all that was accumulated. ``loss`` is the algorithm's mean (by
    default per completion token), ``grad_norm`` the norm of that mean's gradient before clipping, ``lr`` the learning
    rate used. ``clip_fraction`` and ``ratio_deviation`` (mean ``|ratio - 1|``, about 1e-6 if trainer and engine agree)
    are means over the tokens of samples that have a gradient. ``skipped_update``: the optimizer left the weights as
    they were (``OptimizerConfig.zero_gradient``, ``non_finite_gradient``); figures that are not finite are 0 then.
    ``value_loss`` (mean per completion token) and ``explained_variance`` of its returns are a critic's, None without
    one; the latter also if all returns are equal. ``padding_share``: of the positions of all forwards, None without a
    forward. ``entropy``: estimated by the mean ``-log p`` of the tokens that have a gradient, None without any. ``kl``:
    from the reference, the mean of the estimate ``k3`` over all tokens, None if the algorithm has no reference.
    ``advantage_mean`` and ``advantage_std`` are over all tokens. ``unsure_tokens``: tokens of truncated distributions
    whose support may differ by rounding from the engine's, or that are outside of the trainer's. ``agent_shares``:
    empty unless several agents share the policy.
    """

    samples: int
    tokens: int
    loss: float
    grad_norm: float
    clip_fraction: float
    ratio_deviation: float
    lr: float
    skipped_update: bool = False
    padding_share: float | None = None
    value_loss: float | None = None
    explained_variance: float | None = None
    unsure_tokens: int = 0
    entropy: float | None = None
    kl: float | None = None
    advantage_mean: float | None = None
    advantage_std: float | None = None
    agent_shares: dict[AgentName, AgentShare] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PolicyStepped:
    """One optimizer step, with the weights after it.

    ``busy_s``: seconds of the step and of making the weights to publish. ``publish_s``: seconds of publishing them and
    of committing the rows that were used. ``pool``: None if the pool is static.
    """

    published: Published
    stats: StepStats
    busy_s: float
    publish_s: float
    pool: PoolFigures | None = None


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
