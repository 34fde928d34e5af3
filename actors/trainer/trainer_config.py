"""Settings of training: a policy's optimizer, loss and supervised batches; an agent's credit assignment."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..config_base import Config, Count, Natural, NonNegative, Positive, Share, Unit
from ..credit.algorithms import ALGORITHMS, Aggregation, Algorithm, AlgorithmName, KlEstimator
from ..credit.credit_config import CreditConfig, Decay, row_of
from .objective.transforms import KL_TRANSFORMS, Critic, RoleBaseline, Transform, Whiten, whole_batch_reason

Correction = Literal["none", "tis", "icepop", "decoupled"]
OldPolicy = Literal["proximal", "behaviour"]

CORRECTION_BOUNDS: dict[Correction, tuple[float | None, float | None]] = {
    "none": (None, None),
    "tis": (None, 2.0),
    "icepop": (0.5, 5.0),
    "decoupled": (None, 5.0),
}
"""Default bounds of the weight, low and high; ``importance_weights.correction_weights`` has the sources."""

DEFAULT_CORRECTION: Correction = "tis"
_DEFAULT = ALGORITHMS["grpo"]


class OptimizerConfig(Config):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101), gradient clipping and the learning-rate schedule.

    The schedule's position is the run's step, so that it ends with the run also for a policy that steps less often. A
    skipped step counts as one: its samples are used up."""

    lr: Positive = 1e-6
    """Learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: Positive = 1e-8
    """Term that is added to the denominator."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of matrices. Norms and biases have none."""
    max_grad_norm: Positive = 1.0
    """Norm that the gradient is scaled down to."""
    schedule: Literal["constant", "linear"] = "constant"
    """Schedule of the learning rate after the warm-up: `constant`, or `linear`, which falls to 0 over the run's
    steps."""
    warmup_steps: Annotated[Natural, Unit("steps")] = 0
    """Steps in which the learning rate rises linearly to `lr`."""
    zero_gradient: Literal["skip", "step"] = "skip"
    """Treatment of a step whose gradient is exactly zero, as with equal rewards in every group: `skip` leaves the
    weights and the moments as they are, `step` moves the weights by the momentum of earlier steps."""
    non_finite_gradient: Literal["end", "skip"] = "end"
    """Treatment of a gradient that is infinite or not a number: `end` the run with NonFiniteGradient, or `skip` the
    update."""
    max_non_finite_steps: Annotated[Count, Unit("steps")] = 3
    """Most such updates in a row that `skip` leaves out before the run ends."""


class CriticConfig(Config):
    """PPO's critic, a second model of the policy's size. Settings of its optimizer that are not here are the policy's.

    9e-6 beside the policy's 1e-6 is OpenRLHF's default; a discount of 1 and a trace of 0.95 are InstructGPT's (Ouyang
    et al., arXiv 2203.02155, appendix C.4)."""

    lr: Positive = 9e-6
    """Learning rate of the critic, on the policy's schedule."""
    max_grad_norm: Positive = 1.0
    """Norm that the critic's gradient is scaled down to."""
    gamma: Share = 1.0
    """Discount of the advantage estimator."""
    lam: Share = 0.95
    """Trace of the advantage estimator."""


class LossConfig(Config):
    """The loss of one policy. Part of the policy's ``algorithm`` section; numbers left out are the paper's.

    ``name`` chooses the row of ``ALGORITHMS``, and with it the surrogate. The default correction is ``tis`` in
    every mode: rounding changes a weight as little as a log-probability, staleness is corrected, and one token can't
    have the weight of many (``importance_weights.py``). The default bound of the warning is 10 times the rounding."""

    name: AlgorithmName = "grpo"
    """Algorithm of the loss: see [Algorithms](algorithms.md)."""
    loss: Annotated[str, Field(pattern=r"^[\w./-]+:\w+$")] | None = None
    """Function of the user's in the place of the algorithm's surrogate: `file.py:function` of the recipe's folder, or
    `module:function`. See [A loss of your own](custom-losses.md)."""
    loss_columns: tuple[str, ...] = ()
    """Declared columns of the agents' samples that the user's loss gets, token by token. See
    [Columns](custom-losses.md#columns)."""
    clip_low: Share = _DEFAULT.clip_low
    """Distance of the ratio's lower bound from 1: the ratio is clipped to at least `1 - clip_low`."""
    clip_high: NonNegative = _DEFAULT.clip_high
    """Distance of the ratio's upper bound from 1: the ratio is clipped to at most `1 + clip_high`."""
    options: dict[str, float] = Field(default_factory=dict)
    """Numbers of the loss by name, for the algorithms that have [their own](algorithms.md#losses-with-options), and for
    a loss of the user's. Those that are left out have the defaults of that table."""
    aggregation: Aggregation = _DEFAULT.aggregation
    """Divisor of the sum over tokens."""
    constant_length: Annotated[Count, Unit("tokens")] | None = None
    """Divisor of `constant`. `null`: the largest `sampling.max_new_tokens` of the policy's agents, so that a token
    weighs the same whichever agent generated it."""
    kl_coefficient: NonNegative = 0.0
    """Weight of the KL to the policy that reinforcement learning began with. 0 needs no reference policy."""
    kl_estimator: KlEstimator = _DEFAULT.kl_estimator
    """Estimator of the KL."""
    kl_in_reward: bool = _DEFAULT.kl_in_reward
    """`true`: the KL lowers the rewards (ppo, rloo and both reinforce_pp) instead of being a term of the loss."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus, the exact entropy of each token's distribution: see
    [Entropy bonus](algorithms.md#entropy-bonus)."""
    old_policy: OldPolicy = "proximal"
    """Policy that the ratio of the clip is taken against. `proximal`: the trainer's own at the start of the step;
    `behaviour`: the engine's, which generated the sample, without a correction: see
    [The old policy](algorithms.md#the-old-policy)."""
    correction: Correction = DEFAULT_CORRECTION
    """Correction of differences between the log-probabilities of trainer and engine: see
    [Corrections](algorithms.md#corrections)."""
    correction_low: NonNegative | None = CORRECTION_BOUNDS[DEFAULT_CORRECTION][0]
    """Lower bound of the correction's weight."""
    correction_high: Positive | None = CORRECTION_BOUNDS[DEFAULT_CORRECTION][1]
    """Upper bound of the correction's weight."""
    ratio_deviation_warning: Positive | None = None
    """Bound of `ratio_deviation` above which a step without stale samples logs a warning. `null`: 0.01 in float32, 0.1
    in bfloat16."""
    critic: CriticConfig | None = None
    """Critic of `ppo`."""

    @model_validator(mode="before")
    @classmethod
    def _numbers_of_the_paper(cls, section: Any) -> Any:
        if not isinstance(section, dict):
            return section
        row = row_of(section)
        numbers: dict[str, Any] = {
            "clip_low": row.clip_low,
            "clip_high": row.clip_high,
            "aggregation": row.aggregation,
            "kl_estimator": row.kl_estimator,
            "kl_in_reward": row.kl_in_reward,
        }
        if row.critic:
            numbers["critic"] = CriticConfig()
        if section.get("old_policy") == "behaviour":
            numbers["correction"] = "none"
        if isinstance(options := section.get("options", {}), dict):
            section = section | {"options": {**dict(row.options), **options}}
        kind = section.get("correction", numbers.get("correction", DEFAULT_CORRECTION))
        if isinstance(kind, str) and kind in CORRECTION_BOUNDS:
            low, high = CORRECTION_BOUNDS[kind]
            numbers |= {"correction_low": low, "correction_high": high}
        return numbers | section

    @model_validator(mode="after")
    def _fits_the_loss(self) -> "LossConfig":
        for refused, message in _LOSS_REFUSALS:
            if refused(self):
                raise ValueError(message.format(loss=self))
        if problem := _option_problem(self):
            raise ValueError(problem)
        return self

    @property
    def row(self) -> Algorithm:
        """The algorithm that ``name`` chooses."""
        return ALGORITHMS[self.name]

    @property
    def has_ratio(self) -> bool:
        """True if the loss may compare the policy with an older one."""
        return self.loss is not None or self.row.has_ratio

    @property
    def kl_in_loss(self) -> bool:
        """True if a KL to the reference policy is a term of the loss: each sample needs a forward of the reference."""
        return self.kl_coefficient > 0 and not self.kl_in_reward

    @property
    def needs_references(self) -> bool:
        """True if each forward needs the reference: for a KL in the loss, or in the rewards of a critic."""
        return self.kl_coefficient > 0 and (self.kl_in_loss or self.critic is not None)

    @property
    def trains_without_advantage(self) -> bool:
        """True if a sample has a gradient also if its advantage is 0: by a KL, an entropy bonus, a critic, the
        algorithm's loss, or perhaps a user's."""
        return (
            self.kl_in_loss
            or self.entropy_coefficient > 0
            or self.critic is not None
            or self.loss is not None
            or not self.row.needs_advantage
        )

    @property
    def penalises_rewards(self) -> bool:
        """True if a KL to the reference policy lowers the rewards."""
        return self.kl_coefficient > 0 and self.kl_in_reward

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The changes that the policy makes to the advantages of its samples, in order."""
        return (
            RoleBaseline(),
            *(
                [KL_TRANSFORMS[self.row.kl_rewards]()]
                if self.penalises_rewards and self.row.kl_rewards
                else []
            ),
            *([Whiten()] if self.row.whiten else []),
            *([Critic(self.critic.gamma, self.critic.lam)] if self.critic else []),
        )

    @property
    def whole_batch_reason(self) -> str | None:
        """The reason why the policy must run ``sync``; None if micro-batches may flow. For users: ``sync_warning``."""
        return whole_batch_reason(self.transforms)

    @property
    def compares_within_batch(self) -> bool:
        """True if all samples of a group must be in the same optimizer step."""
        return any(transform.compares for transform in self.transforms)

    @property
    def streams(self) -> bool:
        """True if a sample can be trained before the last sample of its step is there."""
        return self.whole_batch_reason is None

    def deviation_bound(self, dtype: str) -> float:
        """The ``ratio_deviation`` from which on a step with the model's ``dtype`` logs a warning."""
        if self.ratio_deviation_warning is not None:
            return self.ratio_deviation_warning
        return 0.1 if dtype == "bfloat16" else 0.01

    def with_constant_length(self, tokens: int) -> "LossConfig":
        """The same, divided by ``tokens`` if the aggregation is ``constant`` and no constant was given."""
        if self.aggregation != "constant" or self.constant_length is not None:
            return self
        return self.model_copy(update={"constant_length": tokens})


def _option_problem(loss: LossConfig) -> str:
    """The reason why ``options`` do not fit the loss, or empty."""
    names, signed = dict(loss.row.options), loss.row.signed_options
    for name, value in loss.options.items():
        if loss.loss is not None:  # the user's, who knows what they mean
            continue
        if name not in names:
            choice = f"there are: {', '.join(names)}" if names else "leave options out"
            return f"options.{name}: {loss.name} has no such option; {choice}"
        if value <= 0 and name not in signed:
            return f"options.{name}={value:g} must be greater than 0"
    if loss.options.get("least", 0.0) > loss.options.get("greatest", math.inf):
        return f"options.least={loss.options['least']:g} is greater than options.greatest={loss.options['greatest']:g}"
    return ""


_LOSS_REFUSALS: tuple[tuple[Callable[[LossConfig], bool], str], ...] = (
    (
        lambda loss: not loss.has_ratio and bool(loss.clip_low or loss.clip_high),
        "{loss.name} clips nothing: leave out clip_low and clip_high",
    ),
    (
        lambda loss: loss.loss is None
        and bool(loss.row.options)
        and bool(loss.clip_low or loss.clip_high),
        "{loss.name} has options in place of clip_low and clip_high: leave these out",
    ),
    (
        lambda loss: loss.old_policy == "behaviour" and not loss.has_ratio,
        "{loss.name} has no ratio to another policy: leave out old_policy",
    ),
    (
        lambda loss: loss.old_policy == "behaviour" and loss.correction != "none",
        "old_policy behaviour has the engine's probabilities in its ratio: leave out correction",
    ),
    (
        lambda loss: bool(loss.loss_columns) and loss.loss is None,
        "loss_columns are for a loss of your own: write loss, or leave them out",
    ),
    (lambda loss: loss.critic is None and loss.row.critic, "{loss.name} wants a critic"),
    (lambda loss: loss.critic is not None and not loss.row.critic, "{loss.name} has no critic"),
    (
        lambda loss: loss.kl_in_reward and loss.row.kl_rewards is None,
        "{loss.name} has its KL in the loss; kl_in_reward is for ppo, rloo and reinforce_pp",
    ),
    (
        lambda loss: loss.kl_in_loss and loss.kl_estimator == "k1",
        "the gradient of k1 in the loss is zero on average: take k2 or k3, or kl_in_reward",
    ),
    (
        lambda loss: loss.constant_length is not None and loss.aggregation != "constant",
        "constant_length is for aggregation constant",
    ),
    (
        lambda loss: loss.correction == "none" and (loss.correction_low, loss.correction_high) != (None, None),
        "correction_low and correction_high want a correction: tis, icepop or decoupled",
    ),
    (
        lambda loss: loss.correction == "tis" and loss.correction_low is not None,
        "correction tis has no lower bound: leave out correction_low",
    ),
    (
        lambda loss: None not in (loss.correction_low, loss.correction_high)
        and loss.correction_low >= loss.correction_high,  # type: ignore[operator]
        "correction_low={loss.correction_low} must be less than correction_high={loss.correction_high}",
    ),
)  # fmt: skip
"""Combinations that a loss refuses, in the order in which they are checked."""

_CREDIT_REFUSALS: tuple[tuple[Callable[[Algorithm, LossConfig], bool], str], ...] = (
    (
        lambda credit, loss: credit.critic and loss.critic is None,
        "takes its advantages from a critic, and the policy's {loss.name} has none",
    ),
    (
        lambda credit, loss: not credit.critic and loss.critic is not None,
        "does not take its advantages from the critic that the policy's {loss.name} trains",
    ),
    (
        lambda credit, loss: credit.whiten and not loss.row.whiten,
        "wants advantages normalised over the policy's step, which the policy's {loss.name} does not do",
    ),
    (
        lambda credit, loss: not credit.whiten and loss.row.whiten,
        "wants advantages that are not normalised over the policy's step, as the policy's {loss.name} does",
    ),
    (
        lambda credit, loss: loss.penalises_rewards and credit.kl_rewards is None,
        "has no place for the KL that the policy's {loss.name} puts into the rewards (kl_in_reward)",
    ),
)
"""Credit assignments that a loss can't train with, in the order in which they are checked."""


def credit_problem(credit: CreditConfig, loss: LossConfig) -> str | None:
    """The reason why an agent with ``credit`` can't use a policy with ``loss``, as a predicate; None if it can.

    Most pairs fit. Three traits are of both halves, and the policy and all of its agents must agree on them: the critic
    (it learns from every sample of the policy), the normalisation over the policy's step, and a KL in the rewards.
    """
    return next(
        (text.format(loss=loss) for refused, text in _CREDIT_REFUSALS if refused(credit.row, loss)), None
    )


class SftConfig(Config):
    """Supervised batches before reinforcement learning, for recipes that ship examples."""

    lr: Positive = 1e-3
    """Learning rate."""
    batches: Annotated[Natural, Unit("batches")] = 0
    """Number of supervised batches. 0 leaves them out."""
    batch_size: Annotated[Count, Unit("examples")] = 64
    """Examples of one batch."""
