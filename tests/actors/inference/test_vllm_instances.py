"""Instances with vLLM in processes of their own: several policies at once, other weights, and kill -9."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from flexmarl.actors.inference.inference_config import VllmEngineConfig
from flexmarl.actors.inference.instance import Instance
from flexmarl.actors.inference.instance_setup import InstanceSetup, ServedBase, ServedPolicy
from flexmarl.actors.messages import GenerateRequest, Generation, LoraConfig, Published, VersionRange
from flexmarl.actors.names import PolicyName, Version
from flexmarl.core.errors import ActorDead
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.process_node import ProcessNode
from flexmarl.core.supervision.restart_policy import Intensity
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.launch.hosts import env
from flexmarl.transport.state import StateTransport

from ...patience import PATIENCE_S
from .engines.adapter_policies import RUN_SEED, logprobs, policy_of, update
from .engines.vllm_engines import VOCABULARY, Learner, model_of

pytestmark = pytest.mark.vllm

TIED, UNTIED = PolicyName("tied"), PolicyName("untied")
ENGINE = VllmEngineConfig(max_batch=4, kv_cache_bytes=2**24)
INSTANCE = f"{Instance.__module__}:{Instance.__qualname__}"
SOURCE = Path(__file__).parents[3] / "scripts" / "src"


@pytest.fixture
def served(tmp_path: Path) -> dict[PolicyName, ServedPolicy]:
    vocabulary = {f"t{n}": n for n in range(VOCABULARY)}
    fast: Any = PreTrainedTokenizerFast  # untyped
    folder = str(tmp_path / "tokenizer")
    fast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))).save_pretrained(folder)
    return {
        name: ServedPolicy(model_of(tied=name == TIED, tokenizer=folder), ENGINE) for name in (TIED, UNTIED)
    }


@pytest.fixture
async def transport(private: Path) -> AsyncIterator[StateTransport]:
    async with StateTransport(private) as opened:
        yield opened


@asynccontextmanager
async def instances(
    system: ActorSystem,
    private: Path,
    tmp_path: Path,
    served: dict[PolicyName, ServedPolicy],
    *names: PolicyName,
    beside: tuple[PolicyName, ...] = (),
) -> AsyncIterator[tuple[Supervisor, list[ActorRef[Instance]]]]:
    environment = {**env.actor_environment(), "PYTHONPATH": str(SOURCE)}
    restarts = Intensity(max_restarts=2, period_s=3600.0)
    node = ProcessNode(system, private, tmp_path, environment)
    async with Supervisor(system, node, intensity=restarts) as supervisor:
        setups = [InstanceSetup(name, served, beside=beside) for name in names]
        await asyncio.gather(
            *(supervisor.spawn(INSTANCE, f"{one.policy}-0", one, env=one.environment()) for one in setups)
        )
        yield supervisor, [supervisor.reference(f"{name}-0", Instance) for name in names]


def turn(policy: PolicyName, version: int, number: int = 0, length: int = 24) -> GenerateRequest:
    prompt = ((1, 2 + number, 3),)
    versions = VersionRange.exactly(Version(version))
    return GenerateRequest(f"q_{number}", policy, prompt, versions, number, 1.0, length)


def apart(learner: Learner, answer: Generation) -> float:
    expected = learner.logprobs(answer.prompt_tokens, answer.tokens)
    return max(abs(a - b) for a, b in zip(expected, answer.logprobs, strict=True))


async def test_two_policies_at_once_agree_with_their_trainers_through_ten_updates(
    system: ActorSystem,
    private: Path,
    tmp_path: Path,
    served: dict[PolicyName, ServedPolicy],
    transport: StateTransport,
) -> None:
    learners = {
        name: Learner(policy.model, seed)
        for seed, (name, policy) in enumerate(served.items())
        if policy.model
    }

    async def publish(name: PolicyName, version: int) -> Published:
        handle = await transport.set(name, learners[name].weights(), version=version)
        return Published(name, Version(version), handle)

    async def step(ref: ActorRef[Instance], name: PolicyName, version: int) -> None:
        api, learner = ref.within(PATIENCE_S), learners[name]
        loaded = await api.load(await publish(name, version))
        assert (loaded.policy, loaded.version) == (name, version)
        assert loaded.pause_s >= loaded.transfer_s + loaded.load_s > 0
        answers = await asyncio.gather(*(api.generate(turn(name, version, n)) for n in range(4)))
        assert {answer.policy_version for answer in answers} == {version}
        assert max(apart(learner, answer) for answer in answers) < 1e-4
        learner.update([(answer.prompt_tokens, answer.tokens) for answer in answers])

    async with instances(system, private, tmp_path, served, TIED, UNTIED) as (_, (tied, untied)):
        for version in range(11):
            await asyncio.gather(step(tied, TIED, version), step(untied, UNTIED, version))
        # another architecture: the instance makes a new engine
        await step(tied, UNTIED, 11)


async def test_an_instance_that_is_killed_is_restarted_and_serves_again(
    system: ActorSystem,
    private: Path,
    tmp_path: Path,
    served: dict[PolicyName, ServedPolicy],
    transport: StateTransport,
) -> None:
    learner = Learner(model_of())
    async with instances(system, private, tmp_path, served, UNTIED) as (supervisor, (ref,)):
        api = ref.within(PATIENCE_S)
        handle = await transport.set(UNTIED, learner.weights(), version=1)
        await api.load(Published(UNTIED, Version(1), handle))
        under_way = asyncio.ensure_future(api.generate(turn(UNTIED, 1, length=500)))
        await api.generate(turn(UNTIED, 1, 1, length=1))  # the other one has begun
        process = psutil.Process((await supervisor.process_statistics())["untied-0"].pid)
        assert process.environ()["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert process.children(recursive=True) == [], "one process: what is killed is all of it"
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ActorDead, match="signal 9"):
            await under_way
        assert await api.served_version(UNTIED) is None, "a restarted instance serves nothing before a load"
        await api.load(Published(UNTIED, Version(1), handle))
        assert apart(learner, await api.generate(turn(UNTIED, 1))) < 1e-4


async def test_one_instance_serves_two_adapters_at_the_same_time_and_both_again_after_it_was_killed(
    system: ActorSystem,
    private: Path,
    tmp_path: Path,
    served: dict[PolicyName, ServedPolicy],
    transport: StateTransport,
) -> None:
    one, two = PolicyName("one"), PolicyName("two")
    model, lora = served[UNTIED].model, LoraConfig(rank=2)
    assert model is not None
    base = ServedBase(model.weights_seed(RUN_SEED), lora.rank, adapters=2)
    adapters = {name: ServedPolicy(model, ENGINE, base) for name in (one, two)}
    policies = {name: policy_of(model, lora, name) for name in adapters}
    update(policies[two])

    async def load(ref: ActorRef[Instance], name: PolicyName, version: int) -> None:
        handle = await transport.set(name, policies[name].weights(), version=version)
        await ref.within(PATIENCE_S).load(Published(name, Version(version), handle))

    async def check(ref: ActorRef[Instance], version: int) -> None:
        """Turns of both at once."""
        asked = [turn(name, version, number) for name in adapters for number in range(2)]
        answers = await asyncio.gather(*(ref.within(PATIENCE_S).generate(each) for each in asked))
        for request, answer in zip(asked, answers, strict=True):
            expected = logprobs(policies[request.policy], answer.prompt_tokens, answer.tokens)
            assert answer.logprobs == pytest.approx(expected, abs=1e-4)

    async with instances(system, private, tmp_path, adapters, one, beside=(two,)) as (supervisor, (ref,)):
        for name in adapters:
            await load(ref, name, 1)
        await check(ref, 1)
        long = asyncio.ensure_future(ref.within(PATIENCE_S).generate(turn(two, 1, length=300)))
        await ref.within(PATIENCE_S).generate(turn(two, 1, 1, length=1))  # the other one has begun
        update(policies[one])
        await load(ref, one, 2)
        assert (await long).finish_reason == "length", "the other adapter's turn was not interrupted"
        under_way = asyncio.ensure_future(ref.within(PATIENCE_S).generate(turn(one, 2, length=400)))
        os.kill((await supervisor.process_statistics())["one-0"].pid, signal.SIGKILL)
        with pytest.raises(ActorDead, match="signal 9"):
            await under_way
        for name in adapters:
            await load(ref, name, 3)
        await check(ref, 3)
