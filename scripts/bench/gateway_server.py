"""The server of ``gateway.py``: sessions of agents on simulated engines, beside a server that does nothing.

It runs in a process of its own, and answers its parent's requests over a pipe with the processor time that it has used.
"""

import asyncio
import itertools
import random
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

import uvloop

from flexmarl.actors.chat.byte_codec import ByteCodec
from flexmarl.actors.gateway.gateway_config import WAITING_CONNECTIONS
from flexmarl.actors.gateway.http_server import serve
from flexmarl.actors.gateway.server import GatewayServer
from flexmarl.actors.inference.engines.engine import EngineRequest
from flexmarl.actors.inference.engines.simulated_engine import SimulatedEngine
from flexmarl.actors.inference.inference_config import SimulatedEngineConfig
from flexmarl.actors.workflow import Prompt, Turn

AGENT: Final = "solver"
PACED: Final = "paced"
"""An agent whose tokens come at the pace of a real engine, for streams."""
ANSWER_TOKENS: Final = 1024
"""The tokens of the engine are bytes."""
_PACED_TOKEN_S: Final = 1e-3
_NO_TIME_S: Final = 1e-9
_CODEC: Final = ByteCodec("simulated")


class EngineAgent:
    """An agent on a run's simulated engine, which is in this process: so a turn is an engine's alone. ``first_s``: the
    times at which turns with a listener had their first text."""

    def __init__(self, name: str, token_s: float) -> None:
        # Answers as long as their limit.
        config = SimulatedEngineConfig(
            median_tokens=1e9, sigma=0.0, token_s=token_s, prompt_share=0.0, max_batch=1 << 16
        )
        self.first_s: list[float] = []
        self._name = name
        self._engine = SimulatedEngine(config)
        self._numbers = itertools.count()

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Any = (),
        on_text: Any = None,
        max_new_tokens: int | None = None,
        **options: Any,
    ) -> Turn:
        """See ``workflow.Agent``."""
        tokens = _prompt_tokens(prompt)
        number = next(self._numbers)
        length = max_new_tokens or ANSWER_TOKENS
        request = EngineRequest(f"{self._name}-{number}", tokens, number, 1.0, length)
        shown = bytearray()

        def hear(new: tuple[int, ...]) -> None:
            if not shown:
                self.first_s.append(time.monotonic())
            shown.extend(new)
            on_text(shown.decode())

        result = await self._engine.generate(request, None if on_text is None else hear)
        text = _CODEC.decode(result.tokens)
        return Turn(self._name, text, tokens, result.tokens, request.request_id, logprobs=result.logprobs)

    async def close(self) -> None:
        """Ends the engine."""
        await self._engine.close()


def _prompt_tokens(prompt: Prompt) -> tuple[int, ...]:
    """The tokens of a turn that is continued, and of the messages behind it."""
    assert isinstance(prompt, list | tuple)
    tokens: tuple[int, ...] = ()
    messages: list[Any] = []
    for part in prompt:
        if isinstance(part, Turn):
            tokens = part.prompt_tokens + part.tokens
        else:
            messages.append(part)
    return tokens + _CODEC.encode(_CODEC.chat_text(messages, ()), False)


@dataclass(frozen=True, slots=True)
class Place:
    """The address of the gateway, and of the server that does nothing. ``keys``: of the open sessions. ``direct_ms``:
    of a turn without a gateway, one after another. ``direct_cpu_s``: its processor time, of many at once."""

    address: str
    echo: str
    keys: tuple[str, ...]
    direct_ms: float
    direct_cpu_s: float


@dataclass(frozen=True, slots=True)
class Usage:
    """``cpu_s``: processor time of the server. ``counts``: of turns, by their kind, over all sessions. ``first_s``: of
    the paced agent's turns, see ``EngineAgent``."""

    cpu_s: float
    counts: dict[str, int] = field(default_factory=dict)
    first_s: tuple[float, ...] = ()


def serve_sessions(pipe: Connection, sessions: int, turn_s: float, samples: int) -> None:
    """Serves until the pipe is closed. ``turn_s``: of the agent's answers; 0 takes none. ``samples``: turns of the
    agent alone that are measured before."""
    uvloop.run(_serve_sessions(pipe, sessions, turn_s, samples))


async def _serve_sessions(pipe: Connection, sessions: int, turn_s: float, samples: int) -> None:
    agents = {
        AGENT: EngineAgent(AGENT, max(turn_s / ANSWER_TOKENS, _NO_TIME_S)),
        PACED: EngineAgent(PACED, _PACED_TOKEN_S),
    }
    gateway = GatewayServer()
    ends = asyncio.Event()
    async with AsyncExitStack() as stack:
        for agent in agents.values():
            stack.push_async_callback(agent.close)
        stack.push_async_callback(gateway.close)
        entered = [await stack.enter_async_context(gateway.opened(agents, {})) for _ in range(sessions)]
        listening = socket.create_server(("127.0.0.1", 0), backlog=WAITING_CONNECTIONS)
        await stack.enter_async_context(serve(_echo, listening))
        echo = f"http://127.0.0.1:{listening.getsockname()[1]}"

        def answer() -> None:
            try:
                pipe.recv()
                kinds = ("begun", "merged", "branched")
                counts = {kind: sum(session.counts[kind] for session in entered) for kind in kinds}
                pipe.send(Usage(time.process_time(), counts, tuple(agents[PACED].first_s)))
            except (EOFError, OSError):
                asyncio.get_running_loop().remove_reader(pipe.fileno())
                ends.set()

        direct = await _direct_ms(agents[AGENT], samples), await _direct_cpu_s(agents[AGENT], samples)
        pipe.send(Place(gateway.address, echo, tuple(session.key for session in entered), *direct))
        asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
        await ends.wait()


PROMPT: Final = ({"role": "user", "content": "x" * 1024},)
"""The conversation of the turns and calls that are measured."""


def pause() -> None:
    """Blocks for up to two milliseconds, before a turn that is measured alone.

    A loop of uvloop ends its timers at whole milliseconds. Turns that follow each other without a pause begin just
    behind such a moment, and all that a gateway adds would disappear within the engine's first millisecond.
    """
    time.sleep(random.uniform(0.0, 2e-3))


async def _direct_ms(agent: EngineAgent, samples: int) -> float:
    """The ``typical_ms`` of turns without a gateway."""
    times = []
    for _ in range(samples):
        pause()
        began = time.perf_counter()
        await agent.generate(PROMPT)
        times.append(1e3 * (time.perf_counter() - began))
    return typical_ms(times)


def typical_ms(times: Sequence[float]) -> float:
    """The mean without the tenth of the times that is the longest: those had other work of the machine before them."""
    kept = sorted(times)[: max(1, len(times) * 9 // 10)]
    return sum(kept) / len(kept)


async def _direct_cpu_s(agent: EngineAgent, samples: int) -> float:
    """The processor time of a turn without a gateway, of many at once."""
    began_s = time.process_time()
    await asyncio.gather(*(agent.generate(PROMPT) for _ in range(samples)))
    return (time.process_time() - began_s) / samples


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    """Reads a request and answers with one KiB: the least that a server of HTTP does here."""
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", b"1024")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * 1024})
