"""An instance with a simulated engine: the same messages and the same time, without a model, thread or GPU.

It sleeps on the event loop's clock, so under ``core.virtual_time`` hours of rollouts take no real time.
"""

import asyncio
import math
from pathlib import Path

from ...core.actor import Actor, endpoint
from ...transport.state import StateTransport
from ..errors import WrongVersion
from ..messages import GenerateRequest, Generation, ModelConfig, Published
from .engine_requests import engine_request, generation_of
from .engines.engine import EngineResult
from .engines.simulated_engine import END_OF_SEQUENCE, SimulatedEngine, SimulatedEngineConfig
from .inference_config import EngineConfig

_TRANSFER_TIMEOUT_S = 60.0


class SimulatedInstance(Actor):
    """Fulfils ``InstanceApi``, for a model ``{"model_type": "simulated", "engine": {...}}``.

    Text is its bytes of UTF-8. Turns are served and interrupted as ``Instance`` does.
    """

    def __init__(self, agent: str, model: ModelConfig, engine: EngineConfig, directory: str) -> None:
        """``model.config["engine"]`` is a ``SimulatedEngineConfig``; ``directory`` as for ``Instance``."""
        self._agent = agent
        self._simulated = SimulatedEngineConfig.model_validate((model.config or {}).get("engine", {}))
        self._config = engine
        self._transport = StateTransport(Path(directory))
        self._version: int | None = None
        self._turns: dict[str, asyncio.Future[EngineResult]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def on_start(self) -> None:
        self._loop = asyncio.get_running_loop()
        config = self._config
        self._engine = SimulatedEngine(
            self._simulated, self._loop.time, max_batch=config.max_batch, max_context=config.max_context
        )
        await self._transport.__aenter__()

    async def on_stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._transport.__aexit__(None, None, None)

    @endpoint
    async def apply_weights(self, published: Published) -> int:
        """Turns still under way are interrupted. Raises WrongVersion where the weights are of another version."""
        self._version = None
        self._interrupt_turns()
        weights = self._engine.weights()
        await self._transport.get(published.handle, into=weights, timeout_s=_TRANSFER_TIMEOUT_S)
        self._engine.weights_loaded()
        await asyncio.sleep(self._simulated.install_s)
        if (version := int(weights["state"][0])) != published.version:
            raise WrongVersion(self._agent, published.version, version)
        self._version = version
        return version

    @endpoint
    async def generate(self, request: GenerateRequest) -> Generation:
        """Raises WrongVersion, PromptTooLong, InvalidRequest, or TurnAborted where new weights came in meanwhile."""
        if request.policy_version != self._version:
            raise WrongVersion(self._agent, request.policy_version, self._version)
        name = request.sample_id
        prompt = tuple(t for p in request.prompt for t in (p.encode() if isinstance(p, str) else p))
        self._engine.add(engine_request(request, prompt))
        turn = self._turns[name] = self._loop.create_future()
        self._advance()
        try:
            result = await turn
        finally:
            if self._turns.pop(name, None) is not None:  # cancelled, not ended or dropped
                self._engine.abort(name)
        tokens = request.completion + result.tokens
        text = bytes(token for token in tokens if token != END_OF_SEQUENCE).decode()
        return generation_of(request, prompt, result, text)

    def _advance(self) -> None:
        """Hands out what is finished by now, and comes back when there will be more."""
        for result in self._engine.step():
            turn = self._turns.pop(result.request_id)
            if not turn.done():
                turn.set_result(result)
        if self._timer is not None:
            self._timer.cancel()
        due_s = self._engine.due_s
        self._timer = None if due_s == math.inf else self._loop.call_at(due_s, self._advance)

    def _interrupt_turns(self) -> None:
        for name, turn in self._turns.items():
            result = self._engine.abort(name)
            if result is not None and not turn.done():
                turn.set_result(result)
        self._turns.clear()
