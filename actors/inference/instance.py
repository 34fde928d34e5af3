"""An instance with the embedded engine, whose steps run in a thread of their own."""

import asyncio
from functools import lru_cache
from typing import Any

from ..messages import Published
from ..model_sources import load_tokenizer
from ..pretrained import empty_model
from .base_instance import TRANSFER_TIMEOUT_S, BaseInstance
from .engine_thread import EngineThread
from .engines.engine import Engine, EngineRequest, EngineResult, EngineStatistics
from .engines.huggingface import TransformersEngine
from .instance_setup import InstanceSetup


class Instance(BaseInstance):
    """Serves a Hugging Face causal language model with ``TransformersEngine``."""

    def __init__(self, setup: InstanceSetup) -> None:
        super().__init__(setup)
        self._model = setup.model
        self._config = setup.engine

    async def _start_engine(self) -> None:
        self._tokenizer = load_tokenizer(self._model)
        backend = self._tokenizer.backend_tokenizer

        @lru_cache(maxsize=256)  # the trajectories of a group share their first prompt
        def encode(text: str, first: bool) -> tuple[int, ...]:
            return tuple(backend.encode(text, add_special_tokens=first).ids)

        self._cached_encode = encode
        self._engine = EngineThread(await asyncio.to_thread(self._build))
        self.background(self._watch_engine(), "engine")

    def _build(self) -> Engine:
        model = empty_model(self._model)
        eos = end_tokens(self._tokenizer.eos_token_id, model.generation_config, model.config)
        return TransformersEngine(
            model, eos, max_batch=self._config.max_batch, max_context=self._config.max_context
        )

    async def _watch_engine(self) -> None:
        await self._engine.failure

    async def _stop_engine(self) -> None:
        await self._engine.close()

    async def _install(self, published: Published) -> int:
        self._engine.interrupt_all()
        weights = await self._engine.run(lambda engine: engine.weights())
        await self._transport.get(published.handle, into=weights, timeout_s=TRANSFER_TIMEOUT_S)
        await self._engine.run(lambda engine: engine.weights_loaded())
        return published.handle.version

    async def _generate(self, request: EngineRequest) -> EngineResult:
        return await self._engine.generate(request)

    def _encode(self, text: str, first: bool) -> tuple[int, ...]:
        return self._cached_encode(text, first)

    def _decode(self, tokens: tuple[int, ...]) -> str:
        text: str = self._tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _engine_statistics(self) -> EngineStatistics:
        return self._engine.statistics()


def end_tokens(tokenizer_eos: int | None, *configs: Any) -> set[int]:
    """Every token id that ends a turn: the tokenizer's, and those in the model's own configs (one or a list each)."""
    found = {tokenizer_eos} if tokenizer_eos is not None else set()
    for config in configs:
        named = getattr(config, "eos_token_id", None)
        found |= {named} if isinstance(named, int) else set(named or ())
    return found
