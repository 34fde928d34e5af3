"""Brings a published version into an engine, and has the engine prove it."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from ...core.base.task_groups import first_error
from ...transport.errors import TransportError
from ...transport.state import StateTransport
from ..errors import EngineFailed, NonFiniteLogits, PromptTooLong
from ..messages import LikelyTokens, Published, WeightsMismatch
from .engines.engine import TRANSFER_TIMEOUT_S, Engine, EngineRequest, LoadTimes
from .weights_proof import are_proven, diagnosis, failure, least_difference

PROBE_TIMEOUT_S: Final = 600.0
"""Beside the turns of other adapters, and with kernels that are compiled at their first use."""


@dataclass(frozen=True, slots=True)
class Installed:
    """``times``: of one load, or the sums of two. ``differences``, ``mismatch``: see ``Loaded``."""

    times: LoadTimes
    differences: tuple[float, ...] = ()
    mismatch: WeightsMismatch | None = None


class Installer:
    """Loads versions that ``transport`` reads. ``run_blocking``: as of ``ActorSystem``."""

    def __init__(
        self,
        transport: StateTransport,
        run_blocking: Callable[..., Awaitable[Any]],
        probe_timeout_s: float = PROBE_TIMEOUT_S,
    ) -> None:
        self._transport = transport
        self._run_blocking = run_blocking
        self._probe_timeout_s = probe_timeout_s

    async def install(
        self, engine: Engine, published: Published, adapter: str, bound: float | None
    ) -> Installed:
        """Loads the version as ``Engine.load`` does. If the engine's answers then differ from the trainer's probe by
        more than ``bound``, loads it once more. Raises EngineFailed if that was in vain, and as ``Engine.load``."""
        times, differences = await self._load(engine, published, adapter)
        if are_proven(differences, bound):
            return Installed(times, differences)
        before = await self._digests(engine, published.version)
        again, second = await self._load(engine, published, adapter)
        originals, problem = await self._published_digests(published) if before else ({}, "")
        words = diagnosis(originals, before, await self._digests(engine, published.version), problem)
        if not are_proven(second, bound):
            raise EngineFailed(failure(published.version, max(second), bound, words))
        assert bound is not None, "without a bound nothing is decided"
        times = LoadTimes(times.transfer_s + again.transfer_s, times.load_s + again.load_s)
        return Installed(times, second, WeightsMismatch(max(differences), bound, words))

    async def _load(
        self, engine: Engine, published: Published, adapter: str
    ) -> tuple[LoadTimes, tuple[float, ...]]:
        times = await engine.load(published.handle, self._transport, adapter)
        async with self._answer_in_time(f"the probe of version {published.version}"):
            return times, await _differences(engine, published.probe, adapter)

    async def _digests(self, engine: Engine, version: int) -> Mapping[str, int]:
        async with self._answer_in_time(f"which tensors of version {version} it has"):
            return await engine.digests()

    @asynccontextmanager
    async def _answer_in_time(self, question: str) -> AsyncIterator[None]:
        """Raises EngineFailed if the engine has not answered within the deadline."""
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                yield
        except TimeoutError as error:
            raise EngineFailed(f"it has not answered {question} in {self._probe_timeout_s:g} s") from error

    async def _published_digests(self, published: Published) -> tuple[Mapping[str, int], str]:
        """Empty, with the reason, if the version can't be read from here any more: the engine may have loaded it all
        the same, and is not given up because a diagnosis lacks names."""
        # Imported here: an instance with an engine of another kind has no torch.
        from .engines.tensor_digest import digests_of

        try:
            async with self._transport.mapped(published.handle, timeout_s=TRANSFER_TIMEOUT_S) as tensors:
                digests: Mapping[str, int] = await self._run_blocking(digests_of, tensors)
                return digests, ""
        except TransportError as error:
            return {}, f"{type(error).__name__}: {error}"


async def _differences(engine: Engine, probe: Sequence[LikelyTokens], adapter: str) -> tuple[float, ...]:
    """Differences of each prompt's answer from the trainer's; empty if the prompts are too long for the engine."""
    with first_error():
        async with asyncio.TaskGroup() as group:
            answers = [
                group.create_task(_difference(engine, number, expected, adapter))
                for number, expected in enumerate(probe)
            ]
    return tuple(difference for answer in answers if (difference := answer.result()) is not None)


async def _difference(engine: Engine, number: int, expected: LikelyTokens, adapter: str) -> float | None:
    # Greedy: its log-probability is that at temperature 1, which no agent's sampling changes.
    request = EngineRequest(f"probe {number} {adapter}", expected.prompt, 0, 0.0, 1, adapter=adapter)
    try:
        result = await engine.generate(request)
    except NonFiniteLogits:  # the trainer's are finite
        return math.inf
    except PromptTooLong:
        return None
    return least_difference(expected, result.tokens[0], result.logprobs[0])
