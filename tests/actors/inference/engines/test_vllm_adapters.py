"""LoRA policies on vLLM: the base is loaded once, and every version is an adapter."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from flexmarl.actors.errors import InvalidRequest
from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.engines.engine import Engine
from flexmarl.actors.inference.engines.threaded_engine import ThreadedEngine
from flexmarl.actors.inference.instance_setup import ServedBase
from flexmarl.actors.messages import LoraConfig, ModelConfig
from flexmarl.actors.pretrained import empty_model, outline_of
from flexmarl.actors.trainer.backends.torch_policy.torch_policy import TorchPolicy
from flexmarl.transport.state import StateTransport

from .adapter_policies import RUN_SEED, logprobs, policy_of, update
from .vllm_engines import OPTIONS, VOCABULARY, asynchronous, model_of, request_of

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("scheduling")]


@pytest.fixture
async def transport(private: Path) -> AsyncIterator[StateTransport]:
    async with StateTransport(private) as opened:
        yield opened


async def served(model: ModelConfig, most_rank: int, adapters: int = 1) -> Engine:
    from flexmarl.actors.inference.engines.vllm_engine import VllmEngine

    base = ServedBase(model.weights_seed(RUN_SEED), most_rank, adapters)
    return await ThreadedEngine.open(lambda: VllmEngine(outline_of(model), [], OPTIONS, (model, base)))


async def check(
    engine: Engine, policy: TorchPolicy, prompt: tuple[int, ...], adapter: str = "", name: str = ""
) -> float:
    """The largest difference of log-probabilities from the trainer's."""
    request = request_of(name or f"{len(prompt)}", prompt, seed=1, temperature=1.0)
    result = await engine.generate(replace(request, adapter=adapter))
    expected = logprobs(policy, prompt, result.tokens)
    return max(abs(one - other) for one, other in zip(result.logprobs, expected, strict=True))


@pytest.mark.parametrize(
    ("tied", "scheduling"), [(False, "asynchronous"), (True, "at once")], indirect=["scheduling"]
)
async def test_log_probabilities_are_the_trainers_and_the_embedded_engines_through_ten_updates(
    tied: bool, transport: StateTransport
) -> None:
    model, lora = model_of(tied=tied), LoraConfig(rank=3, alpha=7)
    policy = policy_of(model, lora)
    merged = policy_of(model, lora, adapter=False)
    vllm = await served(model, 3)
    embedded: Engine = await ThreadedEngine.open(
        lambda: TransformersEngine(empty_model(model), [], max_batch=4)
    )
    try:
        for version in range(11):
            if version:
                update(policy)
                update(merged)
            await vllm.load(await transport.set("adapter", policy.weights(), version=version), transport)
            await embedded.load(await transport.set("merged", merged.weights(), version=version), transport)
            for engine in (vllm, embedded):
                for prompt in ((1,), tuple(range(1, 40))):
                    assert await check(engine, policy, prompt) < 1e-4
    finally:
        await vllm.close()
        await embedded.close()


@asynchronous
async def test_policies_of_other_ranks_and_layers_take_turns_on_one_base(transport: StateTransport) -> None:
    """No prefix of the other policy is reused: its keys and values are others."""
    model = model_of()
    prompt = tuple(number % VOCABULARY for number in range(300))  # more than two blocks of 128
    one = policy_of(model, LoraConfig(rank=4), "one")
    two = policy_of(model, LoraConfig(rank=2, alpha=9, targets=("q_proj", "down_proj")), "two")
    for _ in range(8):
        update(one)
        two.sft([((1, 2), (30, 31, 32))])
    engine = await served(model, 4)
    try:
        for version in range(2):
            for policy in (one, two):
                handle = await transport.set(policy.name, policy.weights(), version=version)
                await engine.load(handle, transport)
                before = engine.statistics().reused_tokens
                assert await check(engine, policy, prompt) < 1e-4
                assert engine.statistics().reused_tokens == before
                assert await check(engine, policy, prompt) < 1e-4
                assert engine.statistics().reused_tokens > before
        tokens = tuple(range(20, 28))
        assert logprobs(one, prompt, tokens) != pytest.approx(logprobs(two, prompt, tokens), abs=1e-2)
    finally:
        await engine.close()


async def test_two_adapters_in_one_batch_agree_with_their_trainers_through_updates_of_each(
    transport: StateTransport,
) -> None:
    """Every batch has requests of both, with equal prompts of more than two blocks. An update of one leaves the other
    as it is."""
    model = model_of()
    prompt = tuple(number % VOCABULARY for number in range(300))
    policies = {
        "one": policy_of(model, LoraConfig(rank=4), "one"),
        "two": policy_of(model, LoraConfig(rank=2, alpha=9, targets=("q_proj", "down_proj")), "two"),
    }
    engine = await served(model, 4, adapters=2)
    try:
        for version in range(6):
            for number, (name, policy) in enumerate(policies.items()):
                if version and version % 2 != number:  # by turns, after the first version of both
                    continue
                for _ in range(4):
                    policy.sft([((1, 2), (3, 4, 5) if number else (30, 31, 32))])
                handle = await transport.set(name, policy.weights(), version=version)
                await engine.load(handle, transport, name)
            asked = [(name, policy, n) for name, policy in policies.items() for n in range(2)]
            apart = await asyncio.gather(
                *(check(engine, policy, prompt, name, f"{name} {n}") for name, policy, n in asked)
            )
            assert max(apart) < 1e-4, (version, apart)
        tokens = tuple(range(20, 28))
        one, two = (logprobs(policy, prompt, tokens) for policy in policies.values())
        assert one != pytest.approx(two, abs=1e-2)
    finally:
        await engine.close()


@asynchronous
async def test_a_request_of_an_adapter_that_was_not_loaded_is_refused(transport: StateTransport) -> None:
    model = model_of()
    engine = await served(model, 1, adapters=2)
    try:
        policy = policy_of(model, LoraConfig(rank=1), "one")
        await engine.load(await transport.set("one", policy.weights(), version=0), transport, "one")
        with pytest.raises(InvalidRequest, match="there is no adapter two"):
            await check(engine, policy, (1, 2), "two")
        assert await check(engine, policy, (1, 2), "one") < 1e-4
    finally:
        await engine.close()


@asynchronous
def test_only_the_adapter_is_published() -> None:
    model = model_of()
    adapter, merged = (policy_of(model, LoraConfig(rank=1), adapter=each) for each in (True, False))
    one, other = (sum(t.numel() for t in policy.weights().values()) for policy in (adapter, merged))
    assert one == sum(p.numel() for p in adapter.models.parameters.values()) < other / 20
