"""What a run configures about training a policy: optimizer and algorithm."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..config_base import Config, Count, Natural, NonNegative, Positive, Share
from ..messages import ModelConfig
from .algorithms import (
    ALGORITHMS,
    CORRECTION_BOUNDS,
    Aggregation,
    Algorithm,
    AlgorithmName,
    Correction,
    KlEstimator,
    whole_batch_reason,
)

_DEFAULT = ALGORITHMS["grpo"]
Decay = Annotated[NonNegative, Field(lt=1)]


class OptimizerConfig(Config):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101), gradient clipping and the learning-rate schedule.

    ``schedule`` ``linear`` decays from ``lr`` to 0 over the run's steps after ``warmup_steps`` of linear
    increase; ``constant`` stays at ``lr`` after them.
    """

    lr: Positive = 1e-6
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0
    schedule: Literal["constant", "linear"] = "constant"
    warmup_steps: Natural = 0


class CriticConfig(Config):
    """PPO's critic, a second model of the policy's size; what is not said here of its optimizer is the policy's.

    ``lr`` and ``max_grad_norm`` are its own, on the policy's schedule; 9e-6 beside the policy's 1e-6 is OpenRLHF's
    default. ``gamma``, ``lam``: discount and trace of the advantage estimator; 1 and 0.95 are InstructGPT's (Ouyang et
    al., arXiv 2203.02155, appendix C.4).
    """

    lr: Positive = 9e-6
    max_grad_norm: Positive = 1.0
    gamma: Share = 1.0
    lam: Share = 0.95


class AlgorithmConfig(Config):
    """Which algorithm trains the policy; every number left out is the one in `ALGORITHMS`, from its paper.

    ``clip_low``, ``clip_high``: the ratio's range is [1 - clip_low, 1 + clip_high]. ``scale_rewards``: divide the
    group-centred reward by the group's standard deviation. ``aggregation``: what the sum over tokens is divided by
    (`loss.denominator`); ``constant_length`` is ``constant``'s, by default ``sampling.max_new_tokens``.
    ``kl_coefficient``: of the KL to a reference policy, the policy as reinforcement learning found it; 0 does
    without one. ``kl_in_reward``: in the rewards (ppo, rloo and both reinforce_pp), or else a term of the loss.
    ``correction``: for what the trainer's log-probabilities differ from the engine's (`importance_weights.py`), with
    bounds
    of its weight. Under ``async`` it is what makes the objective the decoupled one. ``critic``: ppo's, which has one.
    """

    name: AlgorithmName = "grpo"
    clip_low: Share = _DEFAULT.clip_low
    clip_high: NonNegative = _DEFAULT.clip_high
    scale_rewards: bool = bool(_DEFAULT.scale_rewards)
    aggregation: Aggregation = _DEFAULT.aggregation
    constant_length: Count | None = None
    kl_coefficient: NonNegative = 0.0
    kl_estimator: KlEstimator = _DEFAULT.kl_estimator
    kl_in_reward: bool = _DEFAULT.kl_in_reward
    correction: Correction = "none"
    correction_low: NonNegative | None = None
    correction_high: Positive | None = None
    critic: CriticConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _numbers_of_the_paper(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        row = _DEFAULT
        if isinstance(name := given.get("name"), str):
            row = ALGORITHMS.get(name, row)  # type: ignore[call-overload]  # an unknown name is refused later
        numbers: dict[str, Any] = {
            "clip_low": row.clip_low,
            "clip_high": row.clip_high,
            "scale_rewards": bool(row.scale_rewards),
            "aggregation": row.aggregation,
            "kl_estimator": row.kl_estimator,
            "kl_in_reward": row.kl_in_reward,
        }
        if row.baseline == "critic":
            numbers["critic"] = CriticConfig()
        if isinstance(kind := given.get("correction"), str) and kind in CORRECTION_BOUNDS:
            low, high = CORRECTION_BOUNDS[kind]
            numbers |= {"correction_low": low, "correction_high": high}
        return numbers | given

    @model_validator(mode="after")
    def _fits_the_algorithm(self) -> "AlgorithmConfig":
        row = self.row
        if row.surrogate == "reinforce" and (self.clip_low or self.clip_high):
            raise ValueError(f"{self.name} clips nothing: leave out clip_low and clip_high")
        if row.scale_rewards is None and self.scale_rewards:
            raise ValueError(f"{self.name} does not divide by a group's deviation: leave out scale_rewards")
        if (self.critic is None) == (row.baseline == "critic"):
            raise ValueError("ppo wants a critic" if self.critic is None else f"{self.name} has no critic")
        if self.kl_in_reward and not row.whiten and row.baseline not in ("leave_one_out", "critic"):
            raise ValueError(
                f"{self.name} has its KL in the loss; kl_in_reward is for ppo, rloo and reinforce_pp"
            )
        if self.kl_coefficient and self.kl_estimator == "k1" and not self.kl_in_reward:
            raise ValueError(
                "the gradient of k1 in the loss is zero on average: take k2 or k3, or kl_in_reward"
            )
        if self.constant_length is not None and self.aggregation != "constant":
            raise ValueError("constant_length is for aggregation constant")
        low, high = self.correction_low, self.correction_high
        if self.correction == "none" and not low is high is None:
            raise ValueError(
                "correction_low and correction_high want a correction: truncate, mask or decoupled"
            )
        if self.correction == "truncate" and low is not None:
            raise ValueError("correction truncate has no lower bound: leave out correction_low")
        if low is not None and high is not None and low >= high:
            raise ValueError(f"correction_low={low} must be less than correction_high={high}")
        return self

    @property
    def row(self) -> Algorithm:
        """What the algorithm is made of."""
        return ALGORITHMS[self.name]

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coefficient > 0 and not self.kl_in_reward

    @property
    def whole_batch_reason(self) -> str | None:
        """Why the policy must run ``sync``; None where micro-batches may flow. Words for the user: `sync_warning`."""
        return whole_batch_reason(self.row, self.kl_in_reward and self.kl_coefficient > 0)

    @property
    def compares_within_batch(self) -> bool:
        """Whether all samples of a group must be in the same optimizer step."""
        return self.whole_batch_reason is not None and not self.row.whiten

    @property
    def streams(self) -> bool:
        """Whether a sample can be trained on before the last sample of its step is there."""
        return self.whole_batch_reason is None

    def with_constant_length(self, tokens: int) -> "AlgorithmConfig":
        """The same, divided by ``tokens`` where a constant is wanted and none was given."""
        if self.aggregation != "constant" or self.constant_length is not None:
            return self
        return self.model_copy(update={"constant_length": tokens})


class SftConfig(Config):
    """Supervised batches before reinforcement learning, for recipes that ship examples."""

    lr: Positive = 1e-3
    batches: Natural = 0
    batch_size: Count = 64


class PolicyConfig(Config):
    """What a policy is and how it is trained. ``temperature``: the one its samples are drawn at. ``max_staleness``:
    how many versions older than the policy a sample may be (0 unless the run is ``async``)."""

    model: ModelConfig
    optimizer: OptimizerConfig
    algorithm: AlgorithmConfig
    sft: SftConfig
    temperature: float
    max_staleness: Natural = 0
