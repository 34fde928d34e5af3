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
from .weights_proof import (
    Answer,
    are_proven,
    choice_problem,
    diagnosis,
    failure,
    least_difference,
    other_choices,
)

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
        times, answers = await self._load(engine, published, adapter)
        if bound is None or are_proven(answers, bound):
            return Installed(times, _differences(answers))
        before = await self._digests(engine, published.version)
        again, second = await self._load(engine, published, adapter)
        originals, problem = await self._published_digests(published) if before else ({}, "")
        words = diagnosis(originals, before, await self._digests(engine, published.version), problem)
        if not are_proven(second, bound):
            raise EngineFailed(failure(published.version, second, bound, words))
        times = LoadTimes(times.transfer_s + again.transfer_s, times.load_s + again.load_s)
        wrong = "; ".join(filter(None, (choice_problem(answers), words)))
        mismatch = WeightsMismatch(max(_differences(answers)), bound, wrong)
        return Installed(times, _differences(second), mismatch)

    async def _load(
        self, engine: Engine, published: Published, adapter: str
    ) -> tuple[LoadTimes, list[Answer]]:
        times = await engine.load(published.handle, self._transport, adapter)
        async with self._answer_in_time(f"the probe of version {published.version}"):
            return times, await _answers(engine, published.probe, adapter)

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


def _differences(answers: Sequence[Answer]) -> tuple[float, ...]:
    return tuple(answer.difference for answer in answers)


async def _answers(engine: Engine, probe: Sequence[LikelyTokens], adapter: str) -> list[Answer]:
    """The answer to each prompt; none if the prompts are too long for the engine."""
    with first_error():
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_answer(engine, number, expected, adapter))
                for number, expected in enumerate(probe)
            ]
    return [answer for task in tasks if (answer := task.result()) is not None]


async def _answer(engine: Engine, number: int, expected: LikelyTokens, adapter: str) -> Answer | None:
    # Greedy: its log-probability is that at temperature 1, which no agent's sampling changes.
    request = EngineRequest(f"probe {number} {adapter}", expected.prompt, 0, 0.0, 1, adapter=adapter)
    routes = None if expected.routes is None else expected.routes.array()
    try:
        replayed = None if routes is None else await engine.replay(expected.prompt, routes)
        result = replayed or await engine.generate(request)
    except NonFiniteLogits:  # the trainer's are finite
        return Answer(math.inf)
    except PromptTooLong:
        return None
    choices = () if routes is None or result.routes is None else other_choices(routes, result.routes)
    difference = least_difference(expected, result.tokens[0], result.logprobs[0])
    return Answer(difference, choices, replayed is not None)
