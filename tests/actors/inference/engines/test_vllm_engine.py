"""vLLM as an engine: the distribution that it draws from, and loads that end it. Each test has an engine of its own."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.errors import EngineFailed
from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.engines.engine import Engine, EngineRequest, EngineResult
from flexmarl.actors.inference.engines.threaded_engine import ThreadedEngine
from flexmarl.actors.inference.inference_config import VllmEngineConfig
from flexmarl.actors.inference.install import Installer
from flexmarl.actors.messages import Published
from flexmarl.actors.names import AgentName, PolicyName, Version
from flexmarl.actors.pretrained import empty_model
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.actors.trainer.trainer_setup import PolicySetup
from flexmarl.transport.state import StateTransport

from .vllm_engines import VOCABULARY, Learner, asynchronous, far_apart, load, made, model_of, request_of

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("scheduling")]


@pytest.fixture
async def transport(private: Path) -> AsyncIterator[StateTransport]:
    async with StateTransport(private) as opened:
        yield opened


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = await ThreadedEngine.open(lambda: made(model_of()))
    yield engine
    await engine.close()


def requests(version: int) -> list[EngineRequest]:
    temperatures = (1.0, 0.6, 0.0, 1.0)
    return [
        request_of(f"{version}-{n}", tuple(range(1, 2 + 3 * n)), seed=n, temperature=temperature)
        for n, temperature in enumerate(temperatures)
    ]


@pytest.mark.parametrize(
    ("tied", "scheduling"), [(False, "at once"), (True, "asynchronous")], indirect=["scheduling"]
)
async def test_log_probabilities_are_the_trainers_and_the_embedded_engines_through_ten_updates(
    tied: bool, transport: StateTransport
) -> None:
    model = model_of(tied=tied)
    learner = Learner(model)
    vllm: Engine = await ThreadedEngine.open(lambda: made(model))
    embedded: Engine = await ThreadedEngine.open(
        lambda: TransformersEngine(empty_model(model), [], max_batch=4)
    )
    before: list[tuple[int, ...]] = []
    try:
        for version in range(11):
            for engine in (vllm, embedded):
                await load(engine, learner, transport, version)
                asked = requests(version)
                results = await asyncio.gather(*(engine.generate(request) for request in asked))
                apart = [far_apart(learner, one, found) for one, found in zip(asked, results, strict=True)]
                assert max(apart) < 1e-4, (version, engine, apart)
            rows = [(one.prompt_tokens, found.tokens) for one, found in zip(asked, results, strict=True)]
            before = before or [found.tokens for found in results]
            learner.update(rows)
        assert [found.tokens for found in results] != before, "the updates changed something"
    finally:
        await vllm.close()
        await embedded.close()


def drained(engine: Any, asked: list[EngineRequest]) -> dict[str, EngineResult]:
    for request in asked:
        engine.add(request)
    results: list[EngineResult] = []
    while engine.pending:
        results += engine.step()
    return {result.request_id: result for result in results}


def test_prompts_that_are_more_than_a_step_takes_change_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 20 batches has more tokens than vLLM's step, 2048, and in the end more keys and values than the cache
    holds, so that requests begin again. Each turn draws what it draws alone."""
    options = VllmEngineConfig(max_batch=64, max_context=256, kv_cache_bytes=2**22)
    engine = made(model_of(), options)
    scheduler: Any = type(engine._llm.engine_core.engine_core.scheduler)
    begun_again, preempt = [], scheduler._preempt_request

    def noted(self: Any, request: Any, *more: Any, **others: Any) -> None:
        begun_again.append(request.request_id)
        preempt(self, request, *more, **others)

    monkeypatch.setattr(scheduler, "_preempt_request", noted)
    try:
        for seed in range(20):
            rng = random.Random(seed)
            asked = [
                request_of(
                    f"{seed}-{number}",
                    tuple(rng.randrange(VOCABULARY) for _ in range(rng.randrange(40, 140))),
                    seed=seed + number,
                    new=rng.randrange(2, 12),
                )
                for number in range(64)
            ]
            assert sum(len(request.prompt_tokens) for request in asked) > 2048
            together = drained(engine, asked)
            assert all(len(together[one.request_id].tokens) == one.max_new_tokens for one in asked)
            for one in rng.sample(asked, 4):
                assert drained(engine, [one])[one.request_id].tokens == together[one.request_id].tokens
        assert begun_again
    finally:
        engine.close()


@asynchronous
@pytest.mark.parametrize("call", ["start_weight_update", "receive_weights", "finish_weight_update"])
async def test_an_error_in_the_middle_of_an_update_ends_the_engine(
    engine: Engine, transport: StateTransport, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    from flexmarl.actors.inference.engines.vllm_weights import WeightReader

    learner = Learner(model_of())
    await load(engine, learner, transport, 1)
    whole = getattr(WeightReader, call)

    def torn(worker: Any, *arguments: Any) -> None:
        whole(worker, *arguments)
        raise OSError("out of memory")

    monkeypatch.setattr(WeightReader, call, torn)
    with pytest.raises(EngineFailed, match="may hold a part of them: out of memory"):
        await load(engine, learner, transport, 2)
    with pytest.raises(EngineFailed, match="out of memory"):
        await engine.wait_closed()
    with pytest.raises(EngineFailed, match="out of memory"):
        await engine.generate(request_of("a"))


@asynchronous
async def test_a_weight_of_vllms_that_the_policy_lacks_ends_the_engine(
    engine: Engine, transport: StateTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flexmarl.actors.inference.engines.vllm_weights import WeightReader

    whole = WeightReader.receive_weights

    def without_the_last(worker: Any, update: Any) -> None:
        whole(worker, replace(update, tensors=dict(list(update.tensors.items())[:-1])))

    monkeypatch.setattr(WeightReader, "receive_weights", without_the_last)
    with pytest.raises(EngineFailed, match=r"no weight of the policy is for vLLM's lm_head\.weight"):
        await load(engine, Learner(model_of()), transport, 1)


async def run_here(work: Any, *args: Any) -> Any:
    return work(*args)


@asynchronous
@pytest.mark.parametrize("tied", [False, True])
async def test_a_probe_proves_the_weights_and_a_tensor_that_is_lost_is_loaded_again(
    transport: StateTransport, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    from flexmarl.actors.inference.engines.vllm_weights import WeightReader

    model = model_of(tied=tied)
    setup = PolicySetup(model=model, credit={AgentName("solver"): CreditConfig()}, probe_every=1)
    policy = TorchPolicy(PolicyName("solver"), setup, seed=0, total_steps=1)
    handle = await transport.set("solver", policy.weights(), version=0)
    published = Published(PolicyName("solver"), Version(0), handle, policy.probe())
    installer = Installer(transport, run_here)
    engine = await ThreadedEngine.open(lambda: made(model))
    whole = WeightReader.receive_weights

    def without_one(worker: Any, update: Any) -> None:
        monkeypatch.setattr(WeightReader, "receive_weights", whole)
        name = "model.layers.1.mlp.down_proj.weight"
        whole(worker, replace(update, tensors={**update.tensors, name: update.tensors[name] * 0}))

    try:
        installed = await installer.install(engine, published, "", 0.01)
        assert installed.mismatch is None and max(installed.differences) < 1e-4, installed
        monkeypatch.setattr(WeightReader, "receive_weights", without_one)
        installed = await installer.install(engine, published, "", 0.01)
        assert max(installed.differences) < 1e-4 and installed.mismatch is not None
        assert installed.mismatch.difference > 0.01
        # On a CPU the matrices are packed, out of reach.
        assert "are unknown" in installed.mismatch.wrong
    finally:
        await engine.close()


@asynchronous
def test_a_model_that_vllm_has_no_kernel_for_is_refused_at_the_start() -> None:
    with pytest.raises(RuntimeError, match="Unsupported CPU attention configuration: head_dim=16"):
        made(model_of(head_dim=16))
