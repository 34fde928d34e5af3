"""Actors that implement a protocol and take one typed setup; spawned by class path."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.ref import ActorRef


class Limits(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    max_batch: int = 8
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    limits: Limits
    shares: dict[str, float]
    others: tuple["ActorRef[SumApi]", ...] = ()


class ModelSetup(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    limits: Limits
    others: tuple["ActorRef[SumApi]", ...] = ()


class SumApi(Protocol):
    @endpoint
    async def sum(self, numbers: list[int]) -> int:
        """The sum of ``numbers``, of this actor and of its ``others``."""

    @endpoint
    async def add(self, number: int) -> int:
        """Adds to the total, and returns it."""

    @endpoint
    def count(self, up_to: int) -> AsyncIterator[int]:
        """0 to ``up_to``."""

    async def limits(self) -> Limits:
        """Not marked here, marked in the class."""


class Sum(Actor, SumApi):
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._total = 0

    @endpoint
    async def sum(self, numbers: list[int]) -> int:
        return sum(numbers) + sum([await other.api.sum(numbers) for other in self.setup.others])

    @endpoint
    async def add(self, number: int) -> int:
        self._total += number
        return self._total

    @endpoint
    async def count(self, up_to: int) -> AsyncIterator[int]:
        for number in range(up_to):
            yield number

    @endpoint
    async def limits(self) -> Limits:
        return self.setup.limits


class ModelSum(Sum):
    """Its setup is a pydantic model."""

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(Setup(setup.limits, {}, setup.others))


class Plain(Actor, SumApi):
    """Has no constructor."""

    @endpoint
    async def sum(self, numbers: list[int]) -> int:
        return 0

    @endpoint
    async def add(self, number: int) -> int:
        return number

    @endpoint
    async def count(self, up_to: int) -> AsyncIterator[int]:
        for number in range(0):
            yield number

    @endpoint
    async def limits(self) -> Limits:
        return Limits()
