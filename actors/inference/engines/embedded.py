"""The embedded engine of a policy: ``TransformersEngine``, whose steps run in a thread of their own."""

import asyncio
from typing import Any

from ...messages import ModelConfig
from ...model_sources import architecture_of, load_tokenizer
from ...pretrained import empty_model
from ..inference_config import EmbeddedEngineConfig
from ..tokenizer_codec import TokenizerCodec
from .engine import Engine
from .engine_factory import EngineFactory
from .huggingface import TransformersEngine
from .step_engine import StepEngine
from .threaded_engine import ThreadedEngine

_NAMES = ("_name_or_path", "transformers_version")


class EmbeddedFactory(EngineFactory):
    """Serves a Hugging Face causal language model. Its constructor reads files: see ``open``."""

    def __init__(self, model: ModelConfig, options: EmbeddedEngineConfig) -> None:
        tokenizer = load_tokenizer(model)
        config = architecture_of(model).to_dict()
        self.codec = TokenizerCodec(tokenizer)
        self.architecture = (
            {key: value for key, value in config.items() if key not in _NAMES},
            (model.dtype, model.device, tokenizer.eos_token_id),
            options,
        )
        self._eos: int | None = tokenizer.eos_token_id
        self._model = model
        self._options = options

    @classmethod
    async def open(cls, model: ModelConfig, options: EmbeddedEngineConfig) -> "EmbeddedFactory":
        return await asyncio.to_thread(cls, model, options)

    async def build(self) -> Engine:
        return ThreadedEngine(await asyncio.to_thread(self._build))

    def _build(self) -> StepEngine:
        model = empty_model(self._model)
        eos = end_tokens(self._eos, model.generation_config, model.config)
        options = self._options
        return TransformersEngine(
            model,
            eos,
            max_batch=options.max_batch,
            max_context=options.max_context,
            prefill_chunk=options.prefill_chunk,
            kv_cache_bytes=options.kv_cache_bytes,
            prefix_reuse=options.prefix_reuse,
        )


def end_tokens(tokenizer_eos: int | None, *configs: Any) -> set[int]:
    """Every token id that ends a turn: the tokenizer's, and those in the model's own configs (one or a list each)."""
    found = {tokenizer_eos} if tokenizer_eos is not None else set()
    for config in configs:
        named = getattr(config, "eos_token_id", None)
        found |= {named} if isinstance(named, int) else set(named or ())
    return found
