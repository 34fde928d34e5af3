"""New weights for a running engine, beside a bare copy of as many bytes: actors of ``scripts/bench/run rollout``."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.engines.engine import EngineRequest
from flexmarl.actors.inference.engines.threaded_engine import ThreadedEngine
from flexmarl.actors.messages import ModelConfig
from flexmarl.actors.pretrained import empty_model
from flexmarl.core.actor import Actor, endpoint
from flexmarl.transport.handle import StateHandle
from flexmarl.transport.state import StateTransport

_RUNNING = 16
_KEY = "weights"


def model_of(layers: int) -> ModelConfig:
    """About 12.6 MB of weights per layer; 100 MB with 8."""
    sizes: dict[str, Any] = {
        "model_type": "qwen3", "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1536,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "max_position_embeddings": 1024, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    return ModelConfig(config=sizes, tokenizer="none")


@dataclass(frozen=True, slots=True)
class Update:
    """Seconds. ``pause_s``: from the last token of the interrupted requests until the engine takes others.
    ``copy_s``: of a copy of as many bytes between two buffers of this process."""

    pause_s: float
    transfer_s: float
    load_s: float
    copy_s: float
    size_bytes: int


class WeightSource(Actor):
    """Sets weights, as a trainer does."""

    def __init__(self, runtime_dir: str, layers: int) -> None:
        self._transport = StateTransport(Path(runtime_dir))
        self._model = model_of(layers)

    async def on_start(self) -> None:
        torch.set_num_threads(1)
        await self._transport.__aenter__()
        model = empty_model(self._model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.02)
        self._weights = dict(model.named_parameters())

    async def on_stop(self) -> None:
        await self._transport.close()

    @endpoint
    async def publish(self, version: int) -> StateHandle:
        return await self._transport.set(_KEY, self._weights, version=version)


class UpdatedEngine(Actor):
    """The embedded engine, that generates and gets new weights."""

    def __init__(self, runtime_dir: str, layers: int) -> None:
        self._transport = StateTransport(Path(runtime_dir))
        self._layers = layers

    async def on_start(self) -> None:
        torch.set_num_threads(1)
        await self._transport.__aenter__()
        self._engine = await ThreadedEngine.open(
            lambda: TransformersEngine(empty_model(model_of(self._layers)), [], max_batch=_RUNNING)
        )

    async def on_stop(self) -> None:
        await self._engine.close()
        await self._transport.close()

    @endpoint
    async def update(self, handle: StateHandle, seconds: float) -> Update:
        """Replaces the weights after ``seconds`` of generating."""
        requests = [EngineRequest(str(n), (n + 1,) * 8, n, 1.0, 900) for n in range(_RUNNING)]
        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(self._engine.generate(request))
            await asyncio.sleep(seconds)
            await self._engine.interrupt()  # waits for the step under way
            interrupted = time.perf_counter()
            times = await self._engine.load(handle, self._transport)
            pause_s = time.perf_counter() - interrupted
        copy_s = await asyncio.to_thread(_copy_s, handle.size_bytes)
        return Update(pause_s, times.transfer_s, times.load_s, copy_s, handle.size_bytes)


def _copy_s(size_bytes: int) -> float:
    """Seconds of a copy between two buffers whose pages exist, allocated like weights."""
    source, target = (torch.full((size_bytes,), number, dtype=torch.uint8) for number in (1, 2))
    started = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started
