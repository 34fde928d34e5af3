"""The model of a policy and its adapter, as the config, the trainer and the instances know them."""

import json
from typing import Annotated, Any, Literal

import xxhash
from pydantic import Field, field_validator, model_validator

from ..config_base import Config, Count


class ModelConfig(Config):
    """The source of a policy's weights and architecture: exactly one of ``path`` and ``config``."""

    path: str | None = None
    """Name on the Hugging Face hub, or a folder, relative to the recipe's folder or the working directory."""
    config: dict[str, Any] | None = None
    """Arguments of `AutoConfig.for_model`, `model_type` among them, for a model with random weights."""
    tokenizer: str | None = None
    """Name on the hub, or a folder. `null`: `path`. Required with `config`."""
    renderer: str = "auto"
    """Makes tokens of messages, and content, reasoning and calls of tools of answers. `auto`: the library renderers if
    it knows the tokenizer's name on the hub, otherwise the tokenizer's chat template. `template`: always that one. Or
    the library's name of a family, such as `qwen3`, for a folder or a fine-tuned model with that family's template."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as `{enable_thinking: false}` for Qwen3."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the numbers of weights and activations. `auto`: `bfloat16` on a GPU, `float32` on a CPU; the run's
    configuration has the one that is chosen."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """Device for training and generation: `cpu`, `cuda` or `cuda:0`. With `cuda` each instance has GPUs of its own
    (`tensor_parallel` of them), and so has training; with `cuda:0` all instances of the policy share that one, and so
    does training in the pool `static`: see [Places of actors](operating.md#places-of-actors)."""

    router_replay: bool = False
    """Replay of the engine's experts in the trainer (R3), for a [mixture of experts](algorithms.md#router-replay): its
    routers take those that the engine chose for each token."""

    @model_validator(mode="before")
    @classmethod
    def _choose_dtype(cls, section: Any) -> Any:
        """Here, so that a model has a type wherever it is read, and a run keeps the type that it began with."""
        if not isinstance(section, dict) or section.get("dtype", "auto") != "auto":
            return section
        on_gpu = str(section.get("device")).startswith("cuda")
        return {**section, "dtype": "bfloat16" if on_gpu else "float32"}

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

    def weights_seed(self, run_seed: int) -> int:
        """The seed of random weights that policies with this same ``config`` share, the same in every process of a run
        and wherever its recipe lies."""
        return xxhash.xxh3_64_intdigest(f"{run_seed}/{json.dumps(self.config, sort_keys=True)}".encode()) >> 1

    @property
    def tokenizer_source(self) -> str:
        """Hub name or folder of the tokenizer: ``tokenizer``, by default ``path``."""
        source = self.tokenizer or self.path
        assert source is not None  # checked above
        return source


class LoraConfig(Config):
    """A policy that is a LoRA adapter (Hu et al., arXiv 2106.09685) over its model, which stays as it is.

    A layer with the weight ``W`` computes ``W x + alpha / rank * B A x``: ``A`` ``[rank, in]`` and ``B`` ``[out,
    rank]`` are trained. Policies with the same ``model`` share one base in memory."""

    rank: Count = 8
    """Columns of the adapter's matrices."""
    alpha: Count = 16
    """Numerator of the adapter's factor, `alpha / rank`."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Ends of the names of the linear layers that are adapted, such as `[q_proj, v_proj]`; `all-linear`: all but the
    output layer."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_dropout(cls, section: Any) -> Any:
        """The key that other trainers' configs have: the gradient must be that of the policy that generated."""
        if isinstance(section, dict) and "dropout" in section:
            raise ValueError(
                f"dropout={section['dropout']!r}: trainer and engine compute the same probabilities, so that an "
                "adapter has no dropout: leave it out"
            )
        return section

    @field_validator("targets")
    @classmethod
    def _names_layers(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        names = () if targets == "all-linear" else targets
        if not targets or "" in names or len(set(names)) < len(names):
            raise ValueError("names of linear layers, at least one and each once, or all-linear")
        return targets
