"""An instance that serves several policies in turn, and engines that break."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flexmarl.actors.errors import (
    EngineFailed,
    LoadFailed,
    NonFiniteLogits,
    ReadFailed,
    WrongPolicy,
    WrongVersion,
)
from flexmarl.actors.inference.engines.embedded import embedded_factory as embedded
from flexmarl.actors.inference.engines.embedded.huggingface import TransformersEngine
from flexmarl.actors.inference.inference_config import EmbeddedEngineConfig
from flexmarl.actors.inference.instance import Instance
from flexmarl.actors.inference.instance_setup import InstanceSetup, ServedPolicy
from flexmarl.actors.messages import GenerateRequest, Generation, ModelConfig, Published, VersionRange
from flexmarl.actors.names import PolicyName, Version
from flexmarl.actors.pretrained import empty_model
from flexmarl.core.errors import ActorDead
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.transport.state import StateTransport

from ...patience import PATIENCE_S

SOLVER, JUDGE, CRITIC = PolicyName("solver"), PolicyName("judge"), PolicyName("critic")
ARCHITECTURE = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 12,
    "tie_word_embeddings": False, "max_position_embeddings": 512,
}  # fmt: skip
DEEPER = {**ARCHITECTURE, "num_hidden_layers": 2}


def model(folder: Path, architecture: dict[str, Any], vocabulary: str = "0123456789") -> ModelConfig:
    tokens = {c: n for n, c in enumerate(vocabulary)} | {"<pad>": 10, "<eos>": 11}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast: Any = PreTrainedTokenizerFast  # untyped
    fast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
    return ModelConfig(config=architecture, tokenizer=str(folder))


@pytest.fixture
def policies(tmp_path: Path) -> dict[PolicyName, ServedPolicy]:
    """Two of one architecture, with tokenizers of their own, and a deeper one."""
    options = EmbeddedEngineConfig(max_batch=4)
    return {
        SOLVER: ServedPolicy(model(tmp_path / "solver", ARCHITECTURE), options),
        JUDGE: ServedPolicy(model(tmp_path / "judge", ARCHITECTURE, "9876543210"), options),
        CRITIC: ServedPolicy(model(tmp_path / "critic", DEEPER), options),
    }


class FakeCluster:
    """An instance, and a trainer's part: the weights of a version are those of its number as a seed."""

    def __init__(
        self, actor: Instance, ref: ActorRef[Instance], transport: StateTransport, setup: InstanceSetup
    ) -> None:
        self.actor, self.instance, self._transport, self._setup = actor, ref, transport, setup

    async def publish(self, policy: PolicyName, version: int, scale: float = 0.5) -> Published:
        served = self._setup.policies[policy].model
        assert served is not None
        generator = torch.Generator().manual_seed(version)
        weights = {
            name: torch.randn(tensor.shape, generator=generator) * scale
            for name, tensor in empty_model(served).state_dict().items()
        }
        handle = await self._transport.set(policy, weights, version=version)
        return Published(policy, Version(version), handle)

    async def load(self, policy: PolicyName, version: int) -> None:
        loaded = await self.instance.api.load(await self.publish(policy, version))
        assert (loaded.policy, loaded.version) == (policy, version)
        assert loaded.pause_s >= loaded.transfer_s + loaded.load_s
        assert loaded.transfer_s > 0 and loaded.load_s > 0

    async def generate(
        self, policy: PolicyName, version: int, name: str = "q", length: int = 9
    ) -> Generation:
        versions = VersionRange.exactly(Version(version))
        request = GenerateRequest(name, policy, ("3141",), versions, 7, 1.0, length)
        return await self.instance.within(PATIENCE_S).generate(request)


@pytest.fixture
async def cluster(
    policies: dict[PolicyName, ServedPolicy], private: Path, system: ActorSystem
) -> AsyncIterator[FakeCluster]:
    setup = InstanceSetup(SOLVER, policies)
    actor = Instance(setup)
    async with StateTransport(private) as transport:
        yield FakeCluster(actor, await system.add(actor, "solver-0"), transport, setup)


async def test_a_policy_of_the_same_architecture_takes_over_the_engine(cluster: FakeCluster) -> None:
    await cluster.load(SOLVER, 3)
    engine, first = cluster.actor._engine, await cluster.generate(SOLVER, 3)
    await cluster.load(JUDGE, 3)
    assert cluster.actor._engine is engine
    judged = await cluster.generate(JUDGE, 3)
    assert (first.prompt_tokens, judged.prompt_tokens) == ((3, 1, 4, 1), (6, 8, 5, 8)), (
        "each has its tokenizer"
    )
    with pytest.raises(WrongPolicy, match="policy judge was asked for policy solver"):
        await cluster.generate(SOLVER, 3)
    await cluster.load(SOLVER, 3)
    assert await cluster.generate(SOLVER, 3) == first


async def test_a_frozen_policy_in_an_engine_that_records_experts_sends_none(
    private: Path, tmp_path: Path, system: ActorSystem
) -> None:
    mixture = ARCHITECTURE | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    replaying = model(tmp_path, mixture | {"moe_intermediate_size": 16})
    served = ServedPolicy(
        replaying.model_copy(update={"router_replay": True}), EmbeddedEngineConfig(max_batch=4)
    )
    setup = InstanceSetup(SOLVER, {SOLVER: served, JUDGE: replace(served, drops_routes=True)})
    actor = Instance(setup)
    async with StateTransport(private) as transport:
        cluster = FakeCluster(actor, await system.add(actor, "solver-0"), transport, setup)
        await cluster.load(SOLVER, 3)
        engine, first = actor._engine, await cluster.generate(SOLVER, 3)
        await cluster.load(JUDGE, 3)
        assert actor._engine is engine
        second = await cluster.generate(JUDGE, 3)
        assert first.tokens == second.tokens
        assert first.routes is not None and first.routes.shape[0] == 4 + len(first.tokens) - 1
        assert second.routes is None


async def test_the_turns_of_the_former_policy_are_interrupted(cluster: FakeCluster) -> None:
    await cluster.load(SOLVER, 0)
    turn = asyncio.ensure_future(cluster.generate(SOLVER, 0, length=500))
    await cluster.generate(SOLVER, 0, "meanwhile")
    await cluster.load(JUDGE, 5)
    part = await turn
    assert (part.finish_reason, part.policy_version) == ("interrupted", 0) and 0 < len(part.tokens) < 500


async def test_another_architecture_is_built_after_the_memory_of_the_former_one_was_freed(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[bool] = []
    made: list[weakref.ref[PreTrainedModel]] = []

    def build(config: ModelConfig) -> PreTrainedModel:
        alive.extend(former() is not None for former in made)
        new = empty_model(config)
        made.append(weakref.ref(new))
        return new

    monkeypatch.setattr(embedded, "empty_model", build)
    await cluster.load(CRITIC, 1)
    assert len((await cluster.generate(CRITIC, 1)).tokens) == 9
    await cluster.load(SOLVER, 2)
    assert len((await cluster.generate(SOLVER, 2)).tokens) == 9
    assert len(made) == 2 and alive == [False]
    statistics = cluster.actor.statistics()
    assert statistics["engine_generated_tokens"] == 18, "of both engines"
    assert cluster.actor.progress() == 2 * (1 + 1 + 9 + 4), "a load, a turn and its tokens"


async def test_an_unknown_policy_changes_nothing(cluster: FakeCluster) -> None:
    await cluster.load(SOLVER, 0)
    published = await cluster.publish(JUDGE, 1)
    with pytest.raises(WrongPolicy, match="policy solver was asked for policy other"):
        await cluster.instance.api.load(Published(PolicyName("other"), Version(1), published.handle))
    assert (await cluster.generate(SOLVER, 0)).policy_version == 0


async def test_a_load_that_fails_half_way_serves_nothing_until_one_succeeds(cluster: FakeCluster) -> None:
    await cluster.load(SOLVER, 0)
    stale = await cluster.publish(SOLVER, 1)
    for version in (2, 3):  # a transport keeps two versions
        newest = await cluster.publish(SOLVER, version)
    with pytest.raises(
        ReadFailed, match="version 1 of policy solver could not be loaded: StaleHandle: "
    ) as raised:
        await cluster.instance.api.load(stale)
    assert (raised.value.policy, raised.value.version) == ("solver", 1)
    for version in (0, 1):
        with pytest.raises(WrongVersion, match="version None is served"):
            await cluster.generate(SOLVER, version)
    assert await cluster.instance.api.served_version(SOLVER) is None
    await cluster.instance.api.load(newest)
    assert (await cluster.generate(SOLVER, 3)).policy_version == 3


async def test_an_engine_that_can_not_be_built_is_built_by_a_later_load(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.load(SOLVER, 0)

    def out_of_memory(config: ModelConfig) -> PreTrainedModel:
        raise torch.OutOfMemoryError("no memory for 7 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "empty_model", out_of_memory)
        with pytest.raises(
            LoadFailed, match="version 1 of policy critic .*: OutOfMemoryError: no memory for 7"
        ):
            await cluster.load(CRITIC, 1)
    with pytest.raises(WrongVersion, match="version None is served"):
        await cluster.generate(SOLVER, 0)
    assert cluster.actor.statistics() == {}
    await cluster.load(CRITIC, 1)
    assert len((await cluster.generate(CRITIC, 1)).tokens) == 9


async def test_weights_that_are_not_finite_fail_turns_and_not_the_engine(cluster: FakeCluster) -> None:
    await cluster.instance.api.load(await cluster.publish(SOLVER, 0, scale=float("nan")))
    failed = await asyncio.gather(
        *(cluster.generate(SOLVER, 0, name) for name in "ab"), return_exceptions=True
    )
    assert [type(error) for error in failed] == [NonFiniteLogits] * 2
    await cluster.load(SOLVER, 1)
    assert len((await cluster.generate(SOLVER, 1)).tokens) == 9


async def test_an_engine_that_breaks_ends_its_turns_and_then_the_instance(
    cluster: FakeCluster, system: ActorSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.load(SOLVER, 0)
    step = TransformersEngine.step

    def broken(engine: TransformersEngine) -> Any:
        if engine.statistics().running:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return step(engine)

    monkeypatch.setattr(TransformersEngine, "step", broken)
    ended = await asyncio.gather(
        *(cluster.generate(SOLVER, 0, name, 400) for name in "abc"), return_exceptions=True
    )
    text = "the engine has failed: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert [(type(error), str(error)) for error in ended] == [(EngineFailed, text)] * 3
    failure = await asyncio.wait_for(asyncio.shield(system.failure), PATIENCE_S)
    assert str(failure) == text
    with pytest.raises(ActorDead, match="solver-0 died"):
        await cluster.generate(SOLVER, 0)
