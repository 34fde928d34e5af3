"""Every instance: whose weights it takes, and the numbers it reports."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgpack
import pytest
import torch
from pydantic import TypeAdapter

from flexmarl.actors.errors import LoadFailed, NonFiniteLogits, WrongPolicy, WrongVersion
from flexmarl.actors.inference.engines.engine import EngineRequest, EngineResult, OnTokens
from flexmarl.actors.inference.inference_config import SimulatedEngineConfig
from flexmarl.actors.inference.instance import Instance
from flexmarl.actors.inference.instance_setup import InstanceSetup, ServedPolicy
from flexmarl.actors.messages import GenerateRequest, Published, VersionRange, WeightsConfig
from flexmarl.actors.names import PolicyName, Version
from flexmarl.core.protocol import codec
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.curve import Keys
from flexmarl.core.wire.zeromq import Tcp
from flexmarl.transport.remote.bulk import Bulk
from flexmarl.transport.state import StateTransport

SOLVER = PolicyName("solver")
SERVED = ServedPolicy(
    None,
    SimulatedEngineConfig(median_tokens=1e9, sigma=0.0, token_s=1e-4, max_batch=2),
)


@pytest.fixture
def setup(private: Path) -> InstanceSetup:
    return InstanceSetup(SOLVER, {SOLVER: SERVED})


@pytest.fixture
async def transport(private: Path) -> AsyncIterator[StateTransport]:
    async with StateTransport(private) as opened:
        yield opened


@pytest.fixture
async def instance(setup: InstanceSetup, system: ActorSystem) -> Instance:
    actor = Instance(setup)
    await system.add(actor, "solver-0")
    return actor


async def published(transport: StateTransport, policy: str = "solver", version: int = 0) -> Published:
    weights = {"state": torch.tensor([version, 77])}
    handle = await transport.set(policy, weights, version=version)
    return Published(PolicyName(policy), Version(version), handle)


def turn(version: int) -> GenerateRequest:
    return GenerateRequest("q_0_0", SOLVER, ("ask",), VersionRange.exactly(Version(version)), 5, 1.0, 20)


def test_a_setup_survives_a_message(setup: InstanceSetup) -> None:
    received = TypeAdapter(InstanceSetup).validate_python(msgpack.unpackb(codec.Encoder().pack(setup)))
    assert received == setup


async def test_weights_of_another_policy_are_refused_and_change_nothing(
    instance: Instance, transport: StateTransport
) -> None:
    await instance.load(await published(transport, version=3))
    with pytest.raises(WrongPolicy, match="policy solver was asked for policy verifier") as raised:
        await instance.load(await published(transport, "verifier", version=4))
    assert (raised.value.policy, raised.value.requested) == ("solver", "verifier")
    assert (await instance.generate(turn(3))).policy_version == 3


async def test_weights_of_another_version_are_not_served(
    instance: Instance, transport: StateTransport
) -> None:
    mislabelled = Published(PolicyName("solver"), Version(1), (await published(transport, version=0)).handle)
    with pytest.raises(WrongVersion, match="version 1 of solver, version 0 is served"):
        await instance.load(mislabelled)
    with pytest.raises(WrongVersion, match="version None is served"):
        await instance.generate(turn(1))


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
async def test_a_log_probability_that_is_not_finite_fails_its_turn(
    instance: Instance, transport: StateTransport, monkeypatch: pytest.MonkeyPatch, logprob: float
) -> None:
    await instance.load(await published(transport))
    assert instance._engine is not None
    generate = instance._engine.generate

    async def broken(request: EngineRequest, on_tokens: OnTokens | None = None) -> EngineResult:
        result = await generate(request, on_tokens)
        return replace(result, logprobs=(*result.logprobs[:-1], logprob))

    with monkeypatch.context() as patch:
        patch.setattr(instance._engine, "generate", broken)
        with pytest.raises(NonFiniteLogits, match="q_0_0"):
            await instance.generate(turn(0))
    assert len((await instance.generate(turn(0))).tokens) == 20


async def test_numbers_of_engine_and_transport(
    setup: InstanceSetup, instance: Instance, transport: StateTransport
) -> None:
    assert Instance(setup).statistics() == {}, "not started"
    await instance.load(await published(transport))
    await instance.generate(turn(0))
    numbers = instance.statistics()
    assert all(type(value) in (int, float) for value in numbers.values())
    assert (numbers["engine_prompt_tokens"], numbers["engine_generated_tokens"]) == (3, 20)
    assert (numbers["engine_running"], numbers["engine_batch_occupancy"]) == (0, 0.5)
    assert (numbers["transport_shm_gets"], numbers["transport_shm_get_bytes"]) == (1, 16)


# ----------------------------------------------------------------------- other hosts


@pytest.mark.parametrize("encrypted", [True, False], ids=["encrypted", "trusted"])
async def test_weights_go_over_the_network_once_for_all_instances_of_a_host(
    setup: InstanceSetup, private: Path, tmp_path: Path, encrypted: bool
) -> None:
    tcp = Tcp(keys=Keys.make())
    far = tmp_path / "far"
    far.mkdir(mode=0o700)
    async with (
        ActorSystem("trainer", private, tcp=tcp) as near,
        ActorSystem("node", far, tcp=tcp) as node,
        StateTransport(private, bulk=Bulk.of(near, encrypted=encrypted)) as transport,
    ):
        instances = [Instance(replace(setup, encrypted=encrypted)) for _ in range(3)]
        for number, one in enumerate(instances):
            await node.add(one, f"solver-{number}")
        for version in range(2):
            weights = await published(transport, version=version)
            await asyncio.gather(*(one.load(weights) for one in instances))
        network = transport.statistics().network
        assert network is not None and network.sent_bytes == 2 * weights.handle.size_bytes
        assert (await instances[2].generate(turn(1))).policy_version == 1


@pytest.mark.parametrize("path", ["tcp", "shm"])
async def test_a_path_that_does_not_reach_an_instance_of_another_host_is_not_taken(
    setup: InstanceSetup, private: Path, tmp_path: Path, path: Literal["tcp", "shm"]
) -> None:
    tcp = Tcp(keys=Keys.make())
    (tmp_path / "far").mkdir(mode=0o700)
    async with (
        ActorSystem("trainer", private, tcp=tcp) as near,
        ActorSystem("node", tmp_path / "far", tcp=tcp) as node,
        StateTransport(private, path=path, bulk=Bulk.of(near, encrypted=True)) as transport,
    ):
        instance = Instance(replace(setup, weights=WeightsConfig(path=path)))
        await node.add(instance, "solver-0")
        weights = await published(transport)
        if path == "tcp":
            chosen = (await instance.load(weights)).chosen
            assert chosen is not None and chosen.path == "tcp"
        else:
            with pytest.raises(LoadFailed, match="does not leave its node"):
                await instance.load(weights)
