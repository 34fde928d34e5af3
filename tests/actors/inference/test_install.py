"""An engine that has loaded weights proves them; its answers are scripted."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flexmarl.actors.errors import EngineFailed, NonFiniteLogits, PromptTooLong
from flexmarl.actors.expert_routes import Routes, SentRoutes
from flexmarl.actors.inference.engines.engine import (
    Engine,
    EngineRequest,
    EngineResult,
    EngineStatistics,
    LoadTimes,
    OnTokens,
)
from flexmarl.actors.inference.engines.tensor_digest import digests_of
from flexmarl.actors.inference.install import Installer
from flexmarl.actors.messages import LikelyTokens, Published
from flexmarl.actors.names import PolicyName, Version
from flexmarl.transport.handle import StateHandle
from flexmarl.transport.state import StateTransport

PROBE = (LikelyTokens((1, 2), (7, 8), (-0.5, -1.0)), LikelyTokens((3, 4), (8, 7), (-0.25, -2.0)))
TENSORS = ("model.embed_tokens.weight", "model.layers.0.weight", "lm_head.weight")
RIGHT = (7, -0.5), (8, -0.25)
WRONG = (7, -0.5), (8, -1.5)
Answer = tuple[int, float] | Exception | None


class ScriptedEngine(Engine):
    """Answers the probe of its n-th load with the n-th ``answers``; None: never. After the loads in ``faulty`` the
    layer's tensor is another one than published."""

    def __init__(
        self, *answers: tuple[Answer, ...], faulty: tuple[int, ...] = (), has_digests: bool = True
    ) -> None:
        self.answers, self.faulty, self.has_digests = answers, faulty, has_digests
        self.loads: list[str] = []
        self.requests: list[EngineRequest] = []
        self.tensors: dict[str, Any] = {}

    async def load(self, handle: StateHandle, transport: StateTransport, adapter: str = "") -> LoadTimes:
        self.tensors = await transport.get(handle)
        self.loads.append(adapter)
        if len(self.loads) in self.faulty:
            self.tensors["model.layers.0.weight"] = torch.zeros(4)
        return LoadTimes(0.25, 0.5)

    async def generate(self, request: EngineRequest, on_tokens: OnTokens | None = None) -> EngineResult:
        self.requests.append(request)
        number = [expected.prompt for expected in PROBE].index(request.prompt_tokens)
        match self.answers[len(self.loads) - 1][number]:
            case (token, logprob):
                return EngineResult(request.request_id, (token,), (logprob,), "length")
            case None:
                await asyncio.Event().wait()
            case error:
                raise error
        raise AssertionError

    async def digests(self) -> Mapping[str, int]:
        return digests_of(self.tensors) if self.has_digests else {}

    async def interrupt(self, adapter: str | None = None) -> None: ...

    def statistics(self) -> EngineStatistics:
        raise NotImplementedError

    async def wait_closed(self) -> None: ...

    async def close(self) -> None: ...


async def run_here(work: Any, *args: Any) -> Any:
    return work(*args)


@pytest.fixture
async def transport(private: Path) -> AsyncIterator[StateTransport]:
    async with StateTransport(private) as opened:
        yield opened


@pytest.fixture
def installer(transport: StateTransport) -> Installer:
    return Installer(transport, run_here)


async def published(transport: StateTransport, probe: tuple[LikelyTokens, ...] = PROBE) -> Published:
    weights = {name: torch.arange(4.0) + number for number, name in enumerate(TENSORS)}
    handle = await transport.set("solver", weights, version=3)
    return Published(PolicyName("solver"), Version(3), handle, probe)


async def test_an_engine_that_agrees_is_proven_by_one_greedy_token_of_each_prompt(
    installer: Installer, transport: StateTransport
) -> None:
    engine = ScriptedEngine(RIGHT)
    installed = await installer.install(engine, await published(transport), "solver", 0.01)
    assert engine.loads == ["solver"]
    assert installed.differences == (0.0, 0.0) and installed.mismatch is None
    assert installed.times == LoadTimes(0.25, 0.5)
    for request in engine.requests:
        assert (request.temperature, request.truncation, request.max_new_tokens) == (0.0, None, 1)
        assert request.adapter == "solver"
    assert len({request.request_id for request in engine.requests}) == len(PROBE)


async def test_without_a_probe_nothing_is_generated(installer: Installer, transport: StateTransport) -> None:
    engine = ScriptedEngine()
    installed = await installer.install(engine, await published(transport, ()), "", 0.01)
    assert not engine.requests and installed.differences == () and installed.mismatch is None


@pytest.mark.parametrize("bad", [(8, -1.5), NonFiniteLogits(("probe",))])
async def test_an_engine_that_differs_loads_once_more_and_the_wrong_tensor_is_named(
    installer: Installer, transport: StateTransport, bad: Answer
) -> None:
    engine = ScriptedEngine(((7, -0.5), bad), RIGHT, faulty=(1,))
    installed = await installer.install(engine, await published(transport), "", 0.01)
    assert len(engine.loads) == 2 and installed.differences == (0.0, 0.0)
    assert installed.times == LoadTimes(0.5, 1.0)
    mismatch = installed.mismatch
    assert mismatch is not None
    assert mismatch.difference == (1.25 if isinstance(bad, tuple) else math.inf) and mismatch.bound == 0.01
    assert mismatch.wrong == "wrong: layer 0 (model.layers.0.weight)"


async def test_an_engine_that_differs_twice_has_failed(
    installer: Installer, transport: StateTransport
) -> None:
    engine = ScriptedEngine(WRONG, WRONG, faulty=(1, 2))
    with pytest.raises(EngineFailed, match=r"version 3.*loaded twice.*1\.25.*bound is 0\.01.*layer 0"):
        await installer.install(engine, await published(transport), "", 0.01)
    assert len(engine.loads) == 2


async def test_an_engine_that_can_not_tell_its_tensors_is_not_guessed_about(
    installer: Installer, transport: StateTransport
) -> None:
    engine = ScriptedEngine(WRONG, WRONG, has_digests=False)
    with pytest.raises(EngineFailed, match="can't be asked which of its tensors are wrong"):
        await installer.install(engine, await published(transport), "", 0.01)


async def test_tensors_that_are_as_published_are_not_blamed(
    installer: Installer, transport: StateTransport
) -> None:
    with pytest.raises(EngineFailed, match="all of its tensors are as they were published"):
        await installer.install(ScriptedEngine(WRONG, WRONG), await published(transport), "", 0.01)


async def test_without_a_bound_differences_are_measured_and_decide_nothing(
    installer: Installer, transport: StateTransport
) -> None:
    engine = ScriptedEngine(WRONG)
    installed = await installer.install(engine, await published(transport), "", None)
    assert installed.differences == (0.0, 1.25) and installed.mismatch is None and len(engine.loads) == 1


async def test_prompts_beyond_the_engines_context_prove_nothing(
    installer: Installer, transport: StateTransport
) -> None:
    too_long = PromptTooLong("probe", 2, 1, 2)
    installed = await installer.install(
        ScriptedEngine((too_long, too_long)), await published(transport), "", 0.01
    )
    assert installed.differences == () and installed.mismatch is None


async def test_an_engine_that_does_not_answer_has_failed(transport: StateTransport) -> None:
    installer = Installer(transport, run_here, probe_timeout_s=0.01)
    with pytest.raises(EngineFailed, match=r"not answered the probe of version 3 in 0\.01 s"):
        await installer.install(ScriptedEngine(((7, -0.5), None)), await published(transport), "", 0.01)


async def test_an_error_of_the_engine_is_raised_as_it_is(
    installer: Installer, transport: StateTransport
) -> None:
    engine = ScriptedEngine(((7, -0.5), EngineFailed("out of memory")))
    with pytest.raises(EngineFailed, match="out of memory"):
        await installer.install(engine, await published(transport), "", 0.01)


ROUTES = np.array([[[0, 3], [1, 2]], [[3, 1], [1, 2]]], np.uint8)
ROUTED = tuple(replace(expected, routes=SentRoutes.of(ROUTES)) for expected in PROBE)


class ReplayingEngine(ScriptedEngine):
    """Answers with the experts of the probe, and would have chosen ``chosen``."""

    def __init__(self, chosen: NDArray[np.uint8], *answers: tuple[Answer, ...]) -> None:
        super().__init__(*answers)
        self.chosen = chosen

    async def replay(self, prompt: tuple[int, ...], routes: Routes) -> EngineResult | None:
        assert np.array_equal(routes, ROUTES)
        result = await super().generate(EngineRequest("probe", prompt, 0, 0.0, 1))
        return replace(result, routes=self.chosen)

    async def generate(self, request: EngineRequest, on_tokens: OnTokens | None = None) -> EngineResult:
        raise AssertionError("it replays")


class RecordingEngine(ReplayingEngine):
    """It can only record."""

    async def replay(self, prompt: tuple[int, ...], routes: Routes) -> EngineResult | None:
        return None

    async def generate(self, request: EngineRequest, on_tokens: OnTokens | None = None) -> EngineResult:
        return replace(await ScriptedEngine.generate(self, request, on_tokens), routes=self.chosen)


async def test_an_engine_that_replays_the_trainers_experts_is_held_against_the_bound(
    installer: Installer, transport: StateTransport
) -> None:
    turned = ROUTES.copy()
    turned[0, 0, 0] = 7
    weights = await published(transport, ROUTED)
    for chosen in (ROUTES, turned):
        installed = await installer.install(ReplayingEngine(chosen, RIGHT), weights, "", 0.01)
        assert installed.differences == (0.0, 0.0) and installed.mismatch is None
    with pytest.raises(EngineFailed, match=r"differs from the trainer's by 1\.25"):
        await installer.install(ReplayingEngine(turned, WRONG, WRONG), weights, "", 0.5)


async def test_an_engine_that_chose_other_experts_and_can_not_replay_has_a_wider_bound(
    installer: Installer, transport: StateTransport
) -> None:
    turned = ROUTES.copy()
    turned[0, 0, 0] = 7
    weights = await published(transport, ROUTED)
    installed = await installer.install(RecordingEngine(turned, WRONG), weights, "", 0.5)
    assert installed.differences == (0.0, 1.25) and installed.mismatch is None
    with pytest.raises(EngineFailed, match=r"by 1\.25, the bound is 0\.5 \(weights\.probe_bound\)"):
        await installer.install(RecordingEngine(ROUTES, WRONG, WRONG), weights, "", 0.5)


async def test_a_router_that_makes_other_choices_is_named_although_the_answers_are_right(
    installer: Installer, transport: StateTransport
) -> None:
    turned = ROUTES.copy()
    turned[:, 1] = 5, 6
    weights = await published(transport, ROUTED)
    with pytest.raises(
        EngineFailed, match="the router of layer 1 makes other choices than the trainer's in 100%"
    ):
        await installer.install(ReplayingEngine(turned, RIGHT, RIGHT), weights, "", 0.01)
    healed = ReplayingEngine(turned, RIGHT, RIGHT)
    load = healed.load

    async def heal(handle: StateHandle, transport: StateTransport, adapter: str = "") -> LoadTimes:
        healed.chosen = ROUTES if healed.loads else turned
        return await load(handle, transport, adapter)

    healed.load = heal  # type: ignore[method-assign]
    installed = await installer.install(healed, weights, "", 0.01)
    assert installed.mismatch is not None and installed.mismatch.difference == 0.0
    assert installed.mismatch.wrong.startswith("the router of layer 1 makes other choices")


class LateEngine(ScriptedEngine):
    """Two newer versions are published when it has loaded twice: the one that it has can't be read any more."""

    async def load(self, handle: StateHandle, transport: StateTransport, adapter: str = "") -> LoadTimes:
        times = await super().load(handle, transport, adapter)
        if len(self.loads) == 2:
            for version in (4, 5):
                await transport.set("solver", dict(self.tensors), version=version)
        return times


async def test_a_version_that_was_replaced_after_it_was_proven_is_installed(
    installer: Installer, transport: StateTransport
) -> None:
    installed = await installer.install(LateEngine(WRONG, RIGHT), await published(transport), "", 0.01)
    assert installed.differences == (0.0, 0.0) and installed.mismatch is not None
    assert "tensors are unknown" in installed.mismatch.wrong and "StaleHandle: " in installed.mismatch.wrong


async def test_an_engine_that_does_not_answer_which_tensors_it_has_has_failed(
    transport: StateTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(WRONG)
    monkeypatch.setattr(engine, "digests", asyncio.Event().wait)
    with pytest.raises(EngineFailed, match=r"not answered which tensors of version 3 it has in 0\.5 s"):
        await Installer(transport, run_here, 0.5).install(engine, await published(transport), "", 0.01)
