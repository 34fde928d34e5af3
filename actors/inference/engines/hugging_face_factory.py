"""The factory of step engines that serve a Hugging Face causal language model."""

import asyncio
from abc import abstractmethod
from typing import Any, Generic, Self, TypeVar

from transformers import PreTrainedModel

from ...chat.model_codec import model_codec
from ...messages import ModelConfig
from ...model_sources import architecture_of, load_tokenizer
from ..inference_config import EngineOptions
from ..instance_setup import ServedBase
from .engine import Engine
from .engine_factory import EngineFactory
from .step_engine import StepEngine
from .threaded_engine import ThreadedEngine

_NAMES = ("_name_or_path", "transformers_version")

Options = TypeVar("Options", bound=EngineOptions)


class HuggingFaceFactory(EngineFactory, Generic[Options]):
    """Its constructor reads files: see ``open``."""

    def __init__(self, model: ModelConfig, options: Options, base: ServedBase | None = None) -> None:
        self._tokenizer = tokenizer = load_tokenizer(model)
        config = architecture_of(model).to_dict()
        self.codec = model_codec(model, tokenizer)
        self.architecture = (
            {key: value for key, value in config.items() if key not in _NAMES},
            (model.dtype, model.device, model.router_replay, tokenizer.eos_token_id),
            options,
            base and (base, model.path),
        )
        self._eos: int | None = tokenizer.eos_token_id
        self._model = model
        self._options = options
        self._base = base

    @classmethod
    async def open(cls, model: ModelConfig | None, options: Options, base: ServedBase | None) -> Self:
        assert model is not None, "only simulated policies and those of endpoints have no model"
        return await asyncio.to_thread(cls, model, options, base)

    async def build(self) -> Engine:
        return await ThreadedEngine.open(self._build)

    @abstractmethod
    def _build(self) -> StepEngine:
        """Called in the engine's thread."""

    def _end_tokens(self, model: PreTrainedModel) -> set[int]:
        return end_tokens(self._eos, model.generation_config, model.config)


def end_tokens(tokenizer_eos: int | None, *configs: Any) -> set[int]:
    """Every token id that ends a turn: the tokenizer's, and those in the model's own configs (one or a list each)."""
    end_ids = {tokenizer_eos} if tokenizer_eos is not None else set()
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        end_ids |= {ids} if isinstance(ids, int) else set(ids or ())
    return end_ids
