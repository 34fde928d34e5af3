"""The contract of engines that have several adapters at the same moment. A new one adds a line to ``ENGINES``."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flexmarl.actors.errors import RequestsInFlight
from flexmarl.actors.inference.engines.engine import Engine, EngineRequest
from flexmarl.actors.inference.engines.simulated_engine import SimulatedEngine
from flexmarl.actors.inference.engines.threaded_engine import ThreadedEngine
from flexmarl.actors.inference.inference_config import SimulatedEngineConfig, VllmEngineConfig
from flexmarl.actors.inference.instance_setup import ServedBase
from flexmarl.actors.messages import LoraConfig, ModelConfig
from flexmarl.actors.pretrained import outline_of
from flexmarl.transport.state import StateTransport

QWEN = {
    "model_type": "qwen3", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 32, "head_dim": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
}  # fmt: skip
LORA = LoraConfig(rank=2)


@dataclass
class Subject:
    """``weights(version)``: of an adapter."""

    engine: Engine
    weights: Callable[[int], dict[str, Tensor]]


async def _simulated() -> Subject:
    config = SimulatedEngineConfig(median_tokens=1e9, sigma=0.0, token_s=1e-3, max_batch=4)
    return Subject(SimulatedEngine(config), lambda version: {"state": torch.tensor([version, 7])})


async def _vllm() -> Subject:
    from flexmarl.actors.inference.engines.vllm_engine import VllmEngine

    model = ModelConfig(config=QWEN, tokenizer="none")
    options = VllmEngineConfig(max_batch=4, kv_cache_bytes=2**24)
    base = (model, ServedBase(1, LORA.rank, adapters=2))
    engine = await ThreadedEngine.open(lambda: VllmEngine(outline_of(model), [], options, base))

    def weights(version: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(version)
        layer = "base_model.model.model.layers.0.self_attn.q_proj"
        shapes = {f"{layer}.lora_A.weight": (LORA.rank, 32), f"{layer}.lora_B.weight": (64, LORA.rank)}
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    return Subject(engine, weights)


ENGINES: dict[str, Callable[[], Awaitable[Subject]]] = {"simulated": _simulated, "vllm": _vllm}


@pytest.fixture(params=["simulated", pytest.param("vllm", marks=pytest.mark.vllm)])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    subject = await ENGINES[request.param]()
    yield subject
    await subject.engine.close()


@pytest.fixture
async def transport(private: Path) -> AsyncIterator[StateTransport]:
    async with StateTransport(private) as opened:
        yield opened


@pytest.fixture
async def engine(subject: Subject, transport: StateTransport) -> Engine:
    """Holds version 1 of the adapters ``one`` and ``two``."""
    for adapter in ("one", "two"):
        await load(subject, transport, adapter, 1)
    return subject.engine


async def load(subject: Subject, transport: StateTransport, adapter: str, version: int) -> None:
    handle = await transport.set(adapter, subject.weights(version), version=version)
    await subject.engine.load(handle, transport, adapter)


def request_of(adapter: str, new: int = 400) -> EngineRequest:
    return EngineRequest(f"of {adapter}, {new}", (1, 1, 1), 0, 1.0, new, adapter=adapter)


async def begun(engine: Engine, *requests: EngineRequest) -> list[asyncio.Task[object]]:
    """Tasks of requests of which each has a token."""
    events = [asyncio.Event() for _ in requests]
    listeners = [lambda _, event=event: event.set() for event in events]
    tasks = [
        asyncio.create_task(engine.generate(request, listener))
        for request, listener in zip(requests, listeners, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in events))
    return tasks  # type: ignore[return-value]


async def test_a_version_of_one_adapter_ends_no_request_of_the_other(
    subject: Subject, engine: Engine, transport: StateTransport
) -> None:
    one, two = await begun(engine, request_of("one"), request_of("two"))
    await engine.interrupt("one")
    await load(subject, transport, "one", 2)
    again = await engine.generate(request_of("one", new=4))
    assert len(again.tokens) == 4 and not two.done()
    found = [await one, await two]
    assert [result.finish_reason for result in found] == ["interrupted", "length"]  # type: ignore[attr-defined]
    assert engine.statistics().interrupted == 1


async def test_only_the_adapter_that_is_replaced_must_be_without_requests(
    subject: Subject, engine: Engine, transport: StateTransport
) -> None:
    (two,) = await begun(engine, request_of("two"))
    with pytest.raises(RequestsInFlight):
        await load(subject, transport, "two", 2)
    await load(subject, transport, "one", 2)
    await engine.interrupt()
    await two
    await load(subject, transport, "two", 3)


async def test_requests_of_all_adapters_run_together(engine: Engine) -> None:
    requests = [replace(request_of(a), request_id=f"{a}{n}") for a in ("one", "two") for n in range(2)]
    turns = await begun(engine, *requests)
    assert engine.statistics().running == 4
    await engine.interrupt()
    assert {(await turn).finish_reason for turn in turns} == {"interrupted"}  # type: ignore[attr-defined]
