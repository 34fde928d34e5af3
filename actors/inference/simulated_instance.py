"""An instance with a simulated engine: the same messages and the same times, without a model, a thread or a GPU.

It waits on the event loop's clock: in virtual time (``core.testing``), hours of rollouts take no real time.
"""

import asyncio
import math

from ..messages import Published
from .base_instance import TRANSFER_TIMEOUT_S, BaseInstance
from .engines.engine import EngineRequest, EngineResult, EngineStatistics
from .engines.simulated_engine import END_OF_SEQUENCE, SimulatedEngine, SimulatedEngineConfig
from .instance_setup import InstanceSetup


class SimulatedInstance(BaseInstance):
    """Serves a model ``{"model_type": "simulated", "engine": {...}}``; ``engine`` is a ``SimulatedEngineConfig``.

    The tokens of a text are its bytes in UTF-8. Turns are served and interrupted as by ``Instance``.
    """

    def __init__(self, setup: InstanceSetup) -> None:
        super().__init__(setup)
        self._simulated = SimulatedEngineConfig.model_validate((setup.model.config or {}).get("engine", {}))
        self._config = setup.engine
        self._turns: dict[str, asyncio.Future[EngineResult]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def _start_engine(self) -> None:
        self._loop = asyncio.get_running_loop()
        config = self._config
        self._engine = SimulatedEngine(
            self._simulated, self._loop.time, max_batch=config.max_batch, max_context=config.max_context
        )

    async def _stop_engine(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _install(self, published: Published) -> int:
        self._interrupt_turns()
        weights = self._engine.weights()
        await self._transport.get(published.handle, into=weights, timeout_s=TRANSFER_TIMEOUT_S)
        self._engine.weights_loaded()
        await asyncio.sleep(self._simulated.install_s)
        return int(weights["state"][0])

    async def _generate(self, request: EngineRequest) -> EngineResult:
        name = request.request_id
        self._engine.add(request)
        turn: asyncio.Future[EngineResult] = self._loop.create_future()
        self._turns[name] = turn
        self._advance()
        try:
            return await turn
        finally:
            if self._turns.pop(name, None) is not None:  # cancelled: neither finished nor interrupted
                self._engine.abort(name)

    def _encode(self, text: str, first: bool) -> tuple[int, ...]:
        return tuple(text.encode())

    def _decode(self, tokens: tuple[int, ...]) -> str:
        return bytes(token for token in tokens if token != END_OF_SEQUENCE).decode()

    def _engine_statistics(self) -> EngineStatistics:
        return self._engine.statistics()

    def _advance(self) -> None:
        """Delivers the results that are due, and sets a timer for the next one."""
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
