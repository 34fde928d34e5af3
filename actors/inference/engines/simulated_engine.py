"""The engine without a model: it answers with random letters, after the time that a real engine would take.

It waits on the event loop's clock, without a thread: in virtual time (``core.testing``), hours of rollouts take no real
time. The tokens of a text are its bytes in UTF-8. A policy that has a model is answered for with its tokenizer: with
random tokens of it.
"""

import asyncio
import math
from functools import lru_cache
from typing import Self

from ....transport.handle import StateHandle
from ....transport.state import StateTransport
from ...chat.byte_codec import ByteCodec
from ...chat.text_codec import TextCodec
from ...errors import EngineFailed, WrongVersion
from ...messages import ModelConfig
from ..inference_config import SimulatedEngineConfig
from ..instance_setup import ServedBase
from .alphabet import LETTERS, Alphabet, alphabet_of
from .engine import (
    TRANSFER_TIMEOUT_S,
    Engine,
    EngineRequest,
    EngineResult,
    EngineStatistics,
    LoadTimes,
    OnTokens,
    Pending,
)
from .engine_factory import EngineFactory
from .simulated_step_engine import SimulatedStepEngine


class SimulatedEngine(Engine):
    """Takes its steps at the times at which they are due."""

    def __init__(self, config: SimulatedEngineConfig, alphabet: Alphabet = LETTERS) -> None:
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._steps = SimulatedStepEngine(config, self._loop.time, alphabet)
        self._turns: dict[str, Pending] = {}
        self._listeners: dict[str, OnTokens] = {}
        self._token_counts: dict[str, int] = {}
        """The number of tokens that each of them has got."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()

    async def generate(self, request: EngineRequest, on_tokens: OnTokens | None = None) -> EngineResult:
        if self._closed.done():
            raise EngineFailed("it is closed")
        name = request.request_id
        self._steps.add(request)
        turn: asyncio.Future[EngineResult] = self._loop.create_future()
        self._turns[name] = pending = Pending(request.adapter, turn)
        if on_tokens is not None:
            self._listeners[name], self._token_counts[name] = on_tokens, 0
        self._advance()
        try:
            return await turn
        finally:
            if self._turns.get(name) is pending:  # cancelled: neither finished nor interrupted
                del self._turns[name]
                self._steps.abort(name)
            if on_tokens is not None and self._listeners.get(name) is on_tokens:
                del self._listeners[name], self._token_counts[name]

    async def interrupt(self, adapter: str | None = None) -> None:
        for name, pending in list(self._turns.items()):
            if adapter in (None, pending.adapter):
                self._interrupt(name)
        self._advance()

    def _interrupt(self, name: str) -> None:
        pending, result = self._turns.pop(name), self._steps.abort(name)
        if result is not None and not pending.result.done():
            pending.result.set_result(result)

    async def load(self, handle: StateHandle, transport: StateTransport, adapter: str = "") -> LoadTimes:
        started = self._loop.time()
        weights = self._steps.weights()
        await transport.get(handle, into=weights, timeout_s=TRANSFER_TIMEOUT_S)
        if (version := int(weights["state"][0])) != handle.version:
            raise WrongVersion(handle.key, handle.version, version)
        copied = self._loop.time()
        await asyncio.sleep(self._config.install_s)
        self._steps.weights_loaded(weights, adapter)
        return LoadTimes(copied - started, self._loop.time() - copied)

    def statistics(self) -> EngineStatistics:
        return self._steps.statistics()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)  # a waiter that is cancelled must not end it for the others

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for name, pending in self._turns.items():
            self._steps.abort(name)
            if not pending.result.done():
                pending.result.set_exception(EngineFailed("it was closed"))
        self._turns.clear()
        if not self._closed.done():
            self._closed.set_result(None)

    def _advance(self) -> None:
        """Delivers the results that are due, and sets a timer for the next one."""
        for result in self._steps.step():
            turn = self._turns.pop(result.request_id).result
            if not turn.done():
                turn.set_result(result)
        if self._timer is not None:
            self._timer.cancel()
        if self._listeners:
            self._hand_out()
        due_s = self._steps.due_s
        if self._listeners:
            due_s = min(due_s, self._steps.token_due_s)
        self._timer = None if due_s == math.inf else self._loop.call_at(due_s, self._advance)

    def _hand_out(self) -> None:
        for name, tokens in self._steps.new_tokens(self._token_counts).items():
            self._token_counts[name] += len(tokens)
            if self._listeners[name](tokens) is True:
                self._interrupt(name)


class SimulatedFactory(EngineFactory):
    """Serves any policy: no weights are computed with."""

    def __init__(
        self,
        config: SimulatedEngineConfig,
        base: ServedBase | None,
        codec: TextCodec,
        alphabet: Alphabet = LETTERS,
    ) -> None:
        self.codec = codec
        self.architecture = (config, base, codec.name)
        self.clock = asyncio.get_running_loop().time
        self._config = config
        self._alphabet = alphabet

    @classmethod
    async def open(
        cls, model: ModelConfig | None, options: SimulatedEngineConfig, base: ServedBase | None
    ) -> Self:
        if model is None:
            return cls(options, base, ByteCodec("simulated"))
        return cls(options, base, *await asyncio.to_thread(_codec_and_alphabet, model.model_dump_json()))

    async def build(self) -> Engine:
        return SimulatedEngine(self._config, self._alphabet)


@lru_cache(maxsize=8)  # policies often share a model, and a large tokenizer takes a second
def _codec_and_alphabet(model_json: str) -> tuple[TextCodec, Alphabet]:
    # Imported here: transformers takes seconds, and a simulated run needs nothing of it.
    from ...chat.model_codec import model_codec
    from ...model_sources import architecture_of, load_tokenizer

    model = ModelConfig.model_validate_json(model_json)
    tokenizer = load_tokenizer(model)
    vocabulary = architecture_of(model).get_text_config(decoder=True).vocab_size
    return model_codec(model, tokenizer), alphabet_of(tokenizer, vocabulary)
