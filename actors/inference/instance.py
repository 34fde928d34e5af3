"""An instance: one engine serving one version of one policy at a time."""

import asyncio
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...core.actor import Actor, endpoint
from ...transport.state import StateTransport
from ..errors import WrongVersion
from ..messages import GenerateRequest, Generation, ModelConfig, Published
from ..pretrained import empty_model, load_tokenizer
from .engine_requests import engine_request, generation_of
from .engine_thread import EngineThread
from .engines.engine import Engine
from .engines.huggingface import TransformersEngine
from .inference_config import EngineConfig

# Long enough for the largest models over the slowest path: it catches what hangs.
_TRANSFER_TIMEOUT_S = 3600.0


class Instance(Actor):
    """Fulfils ``InstanceApi``."""

    def __init__(self, agent: str, model: ModelConfig, engine: EngineConfig, directory: str) -> None:
        """``directory``: where this run's transport keeps its shared memory."""
        self._agent = agent
        self._model = model
        self._config = engine
        self._transport = StateTransport(Path(directory))
        self._version: int | None = None

    async def on_start(self) -> None:
        self._tokenizer = load_tokenizer(self._model)
        backend = self._tokenizer.backend_tokenizer

        @lru_cache(maxsize=256)  # the trajectories of a group share their first prompt
        def encode(text: str, first: bool) -> tuple[int, ...]:
            return tuple(backend.encode(text, add_special_tokens=first).ids)

        self._encode = encode
        await self._transport.__aenter__()
        self._engine = EngineThread(await asyncio.to_thread(self._build))
        self.background(self._watch_engine(), "engine")

    def _build(self) -> Engine:
        model = empty_model(self._model)
        eos = _end_tokens(self._tokenizer.eos_token_id, model.generation_config, model.config)
        return TransformersEngine(
            model, eos, max_batch=self._config.max_batch, max_context=self._config.max_context
        )

    async def _watch_engine(self) -> None:
        await self._engine.failure

    async def on_stop(self) -> None:
        await self._engine.close()
        await self._transport.__aexit__(None, None, None)

    @endpoint
    async def apply_weights(self, published: Published) -> int:
        """Turns still under way end with what they have where they are resumable. The others are dropped: the
        trajectories they belong to were given up."""
        self._version = None
        self._engine.interrupt_all()
        weights = await self._engine.run(lambda engine: engine.weights())
        await self._transport.get(published.handle, into=weights, timeout_s=_TRANSFER_TIMEOUT_S)
        await self._engine.run(lambda engine: engine.weights_loaded())
        self._version = published.version
        return published.version

    @endpoint
    async def generate(self, request: GenerateRequest) -> Generation:
        """Raises WrongVersion, PromptTooLong, or TurnAborted where new weights came in meanwhile."""
        if request.policy_version != self._version:
            raise WrongVersion(self._agent, request.policy_version, self._version)
        prompt = self._prompt_tokens(request)
        result = await self._engine.generate(engine_request(request, prompt))
        tokens = request.completion + result.tokens
        text = self._tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=True)
        return generation_of(request, prompt, result, text)

    def _prompt_tokens(self, request: GenerateRequest) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        for number, part in enumerate(request.prompt):
            tokens += self._encode(part, number == 0) if isinstance(part, str) else part
        return tokens


def _end_tokens(tokenizer_eos: int | None, *configs: Any) -> set[int]:
    """Every token id that ends a turn: the tokenizer's, and those the model's own configs name (one or a list)."""
    found = {tokenizer_eos} if tokenizer_eos is not None else set()
    for config in configs:
        named = getattr(config, "eos_token_id", None)
        found |= {named} if isinstance(named, int) else set(named or ())
    return found
