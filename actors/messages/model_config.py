"""The model of a policy, as the config, the trainer and the instances know it."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..config_base import Config


class ModelConfig(Config):
    """The source of a policy's weights and architecture: exactly one of ``path`` and ``config``.

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
