"""Models made from configs, their policies and samples: nothing is downloaded.

The shapes are those of Qwen2.5 (arXiv 2412.15115, table 1; the configs of its checkpoints), with random weights.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import ModelConfig, Sample
from flexmarl.actors.names import AgentName
from flexmarl.actors.trainer.backends.backend_config import TorchTrainerConfig
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from flexmarl.launch.config.config_reading import RECIPES

AGENT: Final = AgentName("solver")
TOKENIZER: Final = str(RECIPES / "sort_digits" / "tokenizer")
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder. ``tied``: input and output embedding are one matrix."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    tied: bool

    def config(self) -> dict[str, Any]:
        """The arguments of ``AutoConfig.for_model``."""
        return {
            "model_type": "qwen2", "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads, "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied, "max_position_embeddings": 32768, "rope_theta": 1e6,
            "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        }  # fmt: skip

    def with_layers(self, layers: int) -> "Shape":
        return replace(self, layers=layers)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, biases and norms included."""
        head = self.hidden // self.heads
        keys = 2 * self.key_heads * head
        matrices = self.hidden * (self.hidden + keys) + self.hidden * self.hidden
        return matrices + 3 * self.hidden * self.intermediate + self.hidden + keys + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of one embedding matrix."""
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.layers * self.layer_parameters + (2 - self.tied) * self.embedding_parameters + self.hidden

    def training_flops(self, prompt: int, completion: int) -> float:
        """Operations of the forward and backward of one sample: three times its forward; recomputation does not count.

        2 for each weight and token; the output layer sees completion tokens alone; causal attention is half of a full
        one. Source: Narayanan et al., arXiv 2104.04473, appendix, and PaLM, arXiv 2204.02311, appendix B.
        """
        tokens = prompt + completion - 1  # the last token is a target alone
        forward = 2.0 * self.layers * self.layer_parameters * tokens
        forward += 2 * self.embedding_parameters * completion
        forward += self.layers * 4 * self.hidden * tokens * tokens / 2
        return 3.0 * forward


@dataclass(frozen=True, slots=True)
class Mixture(Shape):
    """The sizes of a Qwen3 mixture of experts (arXiv 2505.09388, table 2). ``intermediate``: of each of the ``experts``
    of a layer; ``active``: those that compute a token."""

    experts: int
    active: int

    def config(self) -> dict[str, Any]:
        return Shape.config(self) | {
            "model_type": "qwen3_moe", "moe_intermediate_size": self.intermediate, "num_experts": self.experts,
            "num_experts_per_tok": self.active, "norm_topk_prob": True, "head_dim": self.hidden // self.heads,
        }  # fmt: skip

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, router and norms included; it has no biases."""
        head = self.hidden // self.heads
        attention = 2 * self.hidden * (self.hidden + self.key_heads * head) + 2 * head
        experts = self.experts * (3 * self.hidden * self.intermediate + self.hidden)
        return attention + experts + 2 * self.hidden


HALF_BILLION: Final = Shape(896, 4864, 24, 14, 2, 151936, tied=True)
SEVEN_BILLION: Final = Shape(3584, 18944, 28, 28, 4, 152064, tied=False)
MIXTURE: Final = Mixture(1024, 384, 12, 16, 4, 32768, tied=False, experts=64, active=8)
"""1.0B parameters: a third of the columns of Qwen3-30B-A3B, half of its experts, a fourth of its layers."""
TINY_MIXTURE: Final = Mixture(128, 64, 4, 4, 2, 512, tied=False, experts=16, active=4)
TINY: Final = Shape(64, 128, 2, 4, 2, 512, tied=False)
"""For CPUs, and for gradients that are compared with float64."""


def model_of(shape: Shape, device: str, dtype: Dtype) -> ModelConfig:
    """The model's config for trainer and engine."""
    return ModelConfig(config=shape.config(), tokenizer=TOKENIZER, dtype=dtype, device=device)


def setup_of(
    shape: Shape,
    device: str,
    dtype: Dtype,
    *,
    tokens_per_forward: int = 16384,
    checkpointing: bool = False,
    packing: bool = True,
    ranks: int = 1,
    compilation: bool | None = None,
) -> PolicySetup:
    """A GRPO policy of that shape."""
    trainer = TorchTrainerConfig(
        tokens_per_forward=tokens_per_forward,
        activation_checkpointing=checkpointing,
        packing=packing,
        ranks=ranks,
        compilation=compilation,
    )
    return PolicySetup(model=model_of(shape, device, dtype), trainer=trainer, credit={AGENT: CreditConfig()})


def make_samples(
    count: int, prompt: int, completion: int, vocabulary: int, logprobs: Sequence[float] = ()
) -> list[Sample]:
    """Samples of equal length with random tokens, and advantages of both signs. ``logprobs``: of the engine, for each
    completion token; empty: those of a uniform distribution."""
    rng = random.Random(0)
    samples = []
    for number in range(count):
        tokens = [rng.randrange(vocabulary) for _ in range(prompt + completion)]
        reward = float(number % 2)
        samples.append(
            Sample(
                f"1:q_0_{number}", AGENT, 1, 0, "1:q", reward, reward - 0.5, tuple(tokens[:prompt]),
                tuple(tokens[prompt:]), tuple(logprobs) or (-6.0,) * completion, count,
            )
        )  # fmt: skip
    return samples


@dataclass(frozen=True, slots=True)
class CardRate:
    """``flops``: bf16 with float32 sums, dense, by the vendor's data sheet."""

    words: str
    flops: float


# In this order: the first whose words are in the name of the device.
_RATES: Final = (
    CardRate("B200", 2250e12),
    CardRate("H100 PCIe", 756e12),
    CardRate("H100 NVL", 835e12),
    CardRate("H200", 989e12),
    CardRate("H100", 989e12),
    CardRate("A100", 312e12),
    CardRate("L40S", 362e12),
    CardRate("L40", 181e12),
    CardRate("A10G", 70e12),
    CardRate("A10", 125e12),
    CardRate("L4", 121e12),
    CardRate("RTX 4090", 165e12),
    CardRate("RTX 3090", 71e12),
)


def peak_flops(name: str) -> float | None:
    """The peak rate of a device by its name; None for one that is not in the table."""
    return next((rate.flops for rate in _RATES if rate.words in name), None)
