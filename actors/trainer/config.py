"""What a run configures about training a policy: optimizer and algorithm."""

from typing import Annotated, Literal

from pydantic import Field

from ...core.config import Config, Count, Natural, NonNegative, Positive, Share
from ..messages import ModelConfig

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


class AlgorithmConfig(Config):
    """GRPO (Shao et al., arXiv 2402.03300) with the asymmetric PPO clip of DAPO (Yu et al., arXiv 2503.14476).

    The ratio is clipped to [1 - clip_low, 1 + clip_high]. ``scale_rewards`` divides the group-centred
    reward by the group's standard deviation (GRPO); without it the advantage is the centred reward
    (Dr.GRPO, arXiv 2503.20783).
    """

    name: Literal["grpo"] = "grpo"
    clip_low: Share = 0.2
    clip_high: NonNegative = 0.28
    scale_rewards: bool = True


class WarmUpConfig(Config):
    """Supervised batches before reinforcement learning, for recipes that ship examples."""

    lr: Positive = 1e-3
    batches: Natural = 0
    batch_size: Count = 64


class PolicyConfig(Config):
    """What a policy is and how it is trained. ``temperature``: the one its samples are drawn at."""

    model: ModelConfig
    optimizer: OptimizerConfig
    algorithm: AlgorithmConfig
    warm_up: WarmUpConfig
    temperature: float
