"""An instance with a simulated engine in virtual time: exact times, and no real ones."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexmarl.actors.errors import EngineFailed, WrongPolicy, WrongVersion
from flexmarl.actors.inference.engines.engine import Engine
from flexmarl.actors.inference.inference_config import SimulatedEngineConfig
from flexmarl.actors.inference.install import Installed, Installer
from flexmarl.actors.inference.instance import END_TIMEOUT_S, Instance
from flexmarl.actors.inference.instance_setup import InstanceSetup, ServedBase, ServedPolicy
from flexmarl.actors.messages import (
    GenerateRequest,
    LikelyTokens,
    Loaded,
    Published,
    VersionRange,
    WeightsConfig,
)
from flexmarl.actors.names import PolicyName, Version
from flexmarl.core.errors import ActorDead
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.core.testing import virtual_time
from flexmarl.core.wire.memory import MemoryNetwork
from flexmarl.transport.state import StateTransport
from flexmarl.transport.statistics import Chosen

from ...core.span_batches import rows_of

TOKEN_S = 60.0
WRONG_PROBE = (LikelyTokens((1, 2), (7,), (-99.0,)),)
SOLVER, JUDGE = PolicyName("solver"), PolicyName("judge")


class FakeCluster:
    def __init__(self, actor: Instance, instance: ActorRef[Instance], transport: StateTransport) -> None:
        self.actor, self.instance = actor, instance
        self._transport = transport

    async def apply(
        self,
        version: int,
        label: int | None = None,
        policy: PolicyName = SOLVER,
        probe: tuple[LikelyTokens, ...] = (),
    ) -> Loaded:
        weights = {"state": torch.tensor([version, 77])}
        handle = await self._transport.set(policy, weights, version=version)
        published = Published(policy, Version(version if label is None else label), handle, probe)
        return await self.instance.within(1e6).load(published)

    async def generate(
        self, name: str, tokens: int, version: int = 0, policy: PolicyName = SOLVER
    ) -> tuple[str, float]:
        """Its text, and when it came."""
        versions = VersionRange.exactly(Version(version))
        request = GenerateRequest(name, policy, ("ask ", (98, 99)), versions, 5, 1.0, tokens)
        generation = await self.instance.within(1e6).generate(request)
        assert generation.prompt_tokens == tuple(b"ask bc") and generation.policy_version == version
        return generation.text, asyncio.get_running_loop().time()


@asynccontextmanager
async def cluster(folder: Path, *policies: PolicyName) -> AsyncIterator[FakeCluster]:
    """``policies``: adapters over one base, served at the same time."""
    folder.chmod(0o700)
    engine = SimulatedEngineConfig(
        median_tokens=1e9, sigma=0.0, token_s=TOKEN_S, prompt_share=0.0, install_s=5.0, max_batch=2
    )
    wire = MemoryNetwork().wire("node")
    async with ActorSystem("node", folder, wire=wire) as system, StateTransport(folder) as transport:
        base = ServedBase(seed=0, most_rank=8, adapters=len(policies)) if policies else None
        served = dict.fromkeys(policies or (SOLVER,), ServedPolicy(None, engine, base))
        weights = WeightsConfig(probe_bound=0.01)
        actor = Instance(InstanceSetup(SOLVER, served, weights=weights, beside=policies[1:]))
        yield FakeCluster(actor, await system.add(actor, "solver-0"), transport)


def in_virtual_time(
    folder: Path, case: Callable[[FakeCluster], Awaitable[None]], *policies: PolicyName
) -> None:
    async def main() -> None:
        async with cluster(folder, *policies) as made:
            await case(made)

    virtual_time.run(main())


def test_turns_take_their_time_and_no_other(tmp_path: Path) -> None:
    async def case(cluster: FakeCluster) -> None:
        assert await cluster.apply(0) == Loaded(
            SOLVER, Version(0), 5.0, 0.0, 5.0, Chosen("shm", "the same node: shared memory", {})
        )
        start = asyncio.get_running_loop().time()
        assert start == pytest.approx(5.0)  # install_s
        turns = [cluster.generate(name, tokens) for name, tokens in (("a", 3), ("b", 5), ("c", 4))]
        answers = await asyncio.gather(*turns)
        # two at once: c begins when a has ended
        assert [at - start for _, at in answers] == pytest.approx([3 * TOKEN_S, 5 * TOKEN_S, 7 * TOKEN_S])
        assert [len(text) for text, _ in answers] == [3, 5, 4]

    in_virtual_time(tmp_path, case)


def test_the_spans_of_a_turn_are_its_prompt_and_its_answer(tmp_path: Path) -> None:
    async def case(cluster: FakeCluster) -> None:
        await cluster.apply(0)
        start = asyncio.get_running_loop().time()
        names = ("1:q_0_0", 3), ("1:q_0_1", 5), ("1:q_0_2", 4), ("1:q_0_3", 1)
        turns = [asyncio.ensure_future(cluster.generate(name, tokens)) for name, tokens in names]
        await asyncio.sleep(5.5 * TOKEN_S)
        await cluster.apply(1)
        await asyncio.gather(*turns)
        rows = rows_of(cluster.actor.system.spans.take(1.0, 0))
        spans = sorted(
            (
                row.numbers[0],
                row.label[1],
                (row.begin - start) / TOKEN_S,
                (row.end - start) / TOKEN_S,
                row.numbers[5],
            )
            for row in rows
            if row.name == "q"
        )
        # Two at once. The third begins when the first has ended, and is interrupted with two tokens; the fourth takes
        # the place of the second.
        expected = [
            (0, "decode", 1, 3, 3), (0, "prefill", 0, 1, 6), (1, "decode", 1, 5, 5), (1, "prefill", 0, 1, 6),
            (2, "decode", 4, 5.5, 2), (2, "prefill", 3, 4, 6), (3, "prefill", 5, 5.5, 6),
        ]  # fmt: skip
        assert [span[:2] for span in spans] == [span[:2] for span in expected]
        assert [span[2:] for span in spans] == [pytest.approx(span[2:]) for span in expected]
        assert {row.label[0] for row in rows} == {"solver-0"}

    in_virtual_time(tmp_path, case)


def test_new_weights_drop_what_is_under_way(tmp_path: Path) -> None:
    async def case(cluster: FakeCluster) -> None:
        await cluster.apply(0)
        turn = asyncio.ensure_future(cluster.generate("a", 100))
        await asyncio.sleep(10)
        assert (await cluster.apply(1)).version == 1
        text, ended_s = await turn
        assert text == "" and ended_s == pytest.approx(15.0)
        with pytest.raises(WrongVersion, match="version 0 of solver, version 1 is served"):
            await cluster.generate("b", 1, version=0)
        await cluster.generate("a", 1, version=1)  # its id is free again

    in_virtual_time(tmp_path, case)


def test_a_turn_that_may_go_on_comes_back_with_what_it_has(tmp_path: Path) -> None:
    async def case(cluster: FakeCluster) -> None:
        await cluster.apply(0)
        request = GenerateRequest("a", SOLVER, ("ask ",), VersionRange(Version(0), None), 5, 1.0, 100)
        turn = asyncio.ensure_future(cluster.instance.within(1e6).generate(request))
        await asyncio.sleep(2.5 * TOKEN_S)
        await cluster.apply(1)
        part = await turn
        assert (part.finish_reason, part.policy_version, len(part.tokens)) == ("interrupted", 0, 2)
        again = replace(request, prompt=(part.prompt_tokens,), completion=part.tokens)
        start = asyncio.get_running_loop().time()
        rest = await cluster.instance.within(1e6).generate(again)
        assert asyncio.get_running_loop().time() - start == pytest.approx(98 * TOKEN_S)
        assert rest.prompt_tokens == tuple(b"ask ") and len(rest.tokens) == 98
        assert rest.text == bytes(part.tokens + rest.tokens).decode() and rest.text.startswith(part.text)

    in_virtual_time(tmp_path, case)


def test_a_label_that_is_ahead_of_its_weights_is_noticed(tmp_path: Path) -> None:
    async def case(cluster: FakeCluster) -> None:
        with pytest.raises(WrongVersion):
            await cluster.apply(0, label=1)
        with pytest.raises(WrongVersion, match="version None is served"):
            await cluster.generate("a", 1, version=1)

    in_virtual_time(tmp_path, case)


def test_a_turn_that_is_asked_for_again_is_served_beside_the_first(tmp_path: Path) -> None:
    """Another rollout worker begins it again, while the turn of the lost one still runs."""

    async def case(cluster: FakeCluster) -> None:
        await cluster.apply(0)
        first = asyncio.ensure_future(cluster.generate("a", 2))
        await asyncio.sleep(1)
        again = await cluster.generate("a", 2)
        assert again[0] == (await first)[0]

    in_virtual_time(tmp_path, case)


def test_adapters_are_served_at_the_same_time_each_in_its_own_version(tmp_path: Path) -> None:
    async def case(cluster: FakeCluster) -> None:
        await cluster.apply(0)
        with pytest.raises(WrongVersion, match="version None is served"):
            await cluster.generate("early", 1, policy=JUDGE)
        await cluster.apply(4, policy=JUDGE)
        start = asyncio.get_running_loop().time()
        turns = [
            asyncio.ensure_future(cluster.generate("a", 3)),
            asyncio.ensure_future(cluster.generate("b", 5, 4, JUDGE)),
        ]
        await asyncio.sleep(1.5 * TOKEN_S)
        await cluster.apply(1)  # ends the turn of the solver alone
        (part, ended_s), (whole, at_s) = await asyncio.gather(*turns)
        assert (len(part), len(whole)) == (1, 5)
        assert ended_s - start == pytest.approx(1.5 * TOKEN_S) and at_s - start == pytest.approx(5 * TOKEN_S)
        with pytest.raises(WrongVersion, match="version 0 of solver, version 1 is served"):
            await cluster.generate("c", 1)
        assert await cluster.instance.api.served_version(SOLVER) == 1
        assert await cluster.instance.api.served_version(JUDGE) == 4
        await asyncio.gather(cluster.generate("c", 1, 1), cluster.generate("d", 1, 4, JUDGE))

    in_virtual_time(tmp_path, case, SOLVER, JUDGE)


def test_a_version_that_can_not_be_loaded_leaves_the_other_adapter_served(tmp_path: Path) -> None:
    async def case(cluster: FakeCluster) -> None:
        for policy in (SOLVER, JUDGE):
            await cluster.apply(0, policy=policy)
        with pytest.raises(WrongVersion):
            await cluster.apply(1, label=2)
        assert await cluster.instance.api.served_version(SOLVER) == 0, "nothing was changed"
        with pytest.raises(WrongPolicy):
            await cluster.generate("a", 1, policy=PolicyName("other"))
        await cluster.generate("a", 1, policy=JUDGE)

    in_virtual_time(tmp_path, case, SOLVER, JUDGE)


@pytest.mark.parametrize("tokens", [3, 1000])
def test_an_engine_that_is_alive_and_not_proven_serves_no_adapter_until_its_instance_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    installs: list[Version] = []
    install = Installer.install

    async def count(
        installer: Installer, engine: Engine, published: Published, adapter: str, bound: float | None
    ) -> Installed:
        installs.append(published.version)
        return await install(installer, engine, published, adapter, bound)

    monkeypatch.setattr(Installer, "install", count)

    async def case(cluster: FakeCluster) -> None:
        for policy in (SOLVER, JUDGE):
            await cluster.apply(0, policy=policy)
        loop = asyncio.get_running_loop()
        turn = asyncio.ensure_future(cluster.generate("long", tokens, policy=JUDGE))
        failing = asyncio.ensure_future(cluster.apply(1, probe=WRONG_PROBE))
        with pytest.raises(EngineFailed, match="version 1, which it has loaded twice"):
            await failing
        failed_s = loop.time()
        for ask in (
            lambda: cluster.apply(1, probe=WRONG_PROBE),
            lambda: cluster.apply(1, policy=JUDGE),
            lambda: cluster.generate("next", 1, policy=JUDGE),
            lambda: cluster.instance.api.served_version(SOLVER),
            lambda: cluster.instance.api.served_version(JUDGE),
        ):
            with pytest.raises(EngineFailed, match="version 1, which it has loaded twice"):
                await ask()
        assert loop.time() == failed_s and installs == [0, 0, 1], "nothing was loaded again"
        assert [wait.text for wait in cluster.actor.waits() if "before the instance ends" in wait.text] == [
            "the turns under way, before the instance ends: its engine has failed"
        ]
        if tokens == 1000:
            with pytest.raises(ActorDead, match="solver-0 died"):
                await turn
            assert loop.time() - failed_s == pytest.approx(END_TIMEOUT_S)
        else:
            assert len((await turn)[0]) == tokens
            assert loop.time() - failed_s < END_TIMEOUT_S
            with pytest.raises(ActorDead, match="solver-0 died"):
                await cluster.generate("next", 1, policy=JUDGE)

    in_virtual_time(tmp_path, case, SOLVER, JUDGE)
