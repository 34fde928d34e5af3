"""vLLM behind its thread: versions, whole weights or none, and requests that fail alone. These tests share one
engine, in a file of their own: a process can have one engine of vLLM at a time."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flexmarl.actors.errors import NonFiniteLogits
from flexmarl.actors.inference.engines.engine import Engine, EngineRequest, EngineResult
from flexmarl.actors.inference.engines.threaded_engine import ThreadedEngine
from flexmarl.transport.errors import CorruptState, StateMismatch
from flexmarl.transport.handle import ShmSource
from flexmarl.transport.host_memory.block import Block
from flexmarl.transport.state import StateTransport

from ....fake_devices import FakeDevices
from .vllm_engines import VOCABULARY, Learner, far_apart, lend, load, model_of, request_of

pytestmark = pytest.mark.vllm


@pytest.fixture
async def engine(shared: Any) -> AsyncIterator[Engine]:
    engine = await ThreadedEngine.open(lambda: lend(shared))
    yield engine
    await engine.close()


@pytest.fixture
async def transport(private: Path) -> AsyncIterator[StateTransport]:
    async with StateTransport(private) as opened:
        yield opened


async def test_an_interrupted_turn_keeps_its_tokens_and_is_continued_by_other_weights(
    engine: Engine, transport: StateTransport
) -> None:
    old, new = Learner(model_of(), seed=1), Learner(model_of(), seed=2)
    await load(engine, old, transport, 1)
    request = request_of("a", new=400)
    turn = asyncio.ensure_future(engine.generate(request))
    await engine.generate(request_of("meanwhile", new=8))
    await engine.interrupt()
    part = await turn
    assert part.finish_reason == "interrupted" and 0 < len(part.tokens) < 400
    assert far_apart(old, request, part) < 1e-4
    await load(engine, new, transport, 2)
    done = len(part.tokens)
    rest_of = EngineRequest("a", request.prompt_tokens + part.tokens, 0, 1.0, 400 - done, done)
    rest = await engine.generate(rest_of)
    assert rest.finish_reason == "length" and done + len(rest.tokens) == 400
    assert far_apart(new, rest_of, rest) < 1e-4 < far_apart(old, rest_of, rest)


async def test_keys_and_values_are_reused_but_never_those_of_former_weights(
    engine: Engine, transport: StateTransport
) -> None:
    prompt = tuple(n % VOCABULARY for n in range(300))
    reused = []
    for version in (1, 2):
        learner = Learner(model_of(), seed=version)
        await load(engine, learner, transport, version)
        for name in "abc":
            request = request_of(name, prompt)
            assert far_apart(learner, request, await engine.generate(request)) < 1e-4
            reused.append(engine.statistics().reused_tokens)
    first, second, third, after_load, *_ = reused
    assert first == 0 < second < third == after_load < reused[-1]


async def test_weights_are_read_in_the_memory_of_a_device(engine: Engine, private: Path) -> None:
    devices = [FakeDevices(private, {"GPU-a": 1 << 26}) for _ in range(2)]
    async with (
        StateTransport(private, devices[0]) as trainer,
        StateTransport(private, devices[1], "cuda_ipc") as transport,
    ):
        for version in range(4):
            learner = Learner(model_of(), seed=version)
            handle = await trainer.set("solver", learner.weights(), version=version)
            await engine.load(handle, transport)
            request = request_of(f"{version}")
            assert far_apart(learner, request, await engine.generate(request)) < 1e-4
        chosen = transport.chosen("solver")
        assert chosen is not None and chosen.path == "cuda_ipc"
        assert transport.statistics().arena_bytes == 0, "nothing went through the host"


async def test_weights_with_other_names_are_refused_before_any_is_replaced(
    engine: Engine, transport: StateTransport
) -> None:
    learner = Learner(model_of())
    weights = learner.weights()
    removed = weights.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(StateMismatch, match=r"up_proj.weight: not in the state"):
        await engine.load(await transport.set("solver", weights, version=1), transport)
    await engine.load(
        await transport.set("solver", weights | {"model.layers.1.mlp.up_proj.weight": removed}, version=2),
        transport,
    )
    request = request_of("a")
    assert far_apart(learner, request, await engine.generate(request)) < 1e-4


async def test_weights_with_another_digest_are_refused_before_any_is_replaced(
    engine: Engine, transport: StateTransport, private: Path
) -> None:
    learner = Learner(model_of())
    handle = await transport.set("solver", learner.weights(), version=1)
    source = handle.source("shm")
    assert isinstance(source, ShmSource)
    Block.open(private, source.block).payload[0] ^= 1
    with pytest.raises(CorruptState):
        await engine.load(handle, transport)
    await load(engine, learner, transport, 2)
    request = request_of("a")
    assert far_apart(learner, request, await engine.generate(request)) < 1e-4


async def test_a_turn_whose_logits_are_not_finite_fails_alone(
    engine: Engine, transport: StateTransport
) -> None:
    learner = Learner(model_of())
    weights = {name: tensor.clone() for name, tensor in learner.weights().items()}
    weights["model.embed_tokens.weight"][7] = torch.nan
    await engine.load(await transport.set("solver", weights, version=1), transport)
    asked = [
        request_of("a", (2, 3)),
        request_of("nan", (2, 7)),
        request_of("last", (7,), new=1),
        request_of("b"),
    ]
    results = await asyncio.gather(*(engine.generate(one) for one in asked), return_exceptions=True)
    for one, found in zip(asked, results, strict=True):
        if 7 in one.prompt_tokens:
            assert isinstance(found, NonFiniteLogits) and found.request_ids == (one.request_id,)
        elif isinstance(found, EngineResult):  # it may have drawn the broken token itself
            assert far_apart(learner, one, found) < 1e-4
        else:
            assert isinstance(found, NonFiniteLogits)
    assert (engine.statistics().running, engine.statistics().waiting) == (0, 0)
    await load(engine, learner, transport, 2)
    healed = await asyncio.gather(*(engine.generate(one) for one in asked))
    assert max(far_apart(learner, *pair) for pair in zip(asked, healed, strict=True)) < 1e-4
