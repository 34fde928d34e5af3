"""Actors that implement protocols, and their typed setups."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.ref import ActorRef
from flexmarl.core.signature import signature_of
from flexmarl.core.system import ActorSystem

from .typed_roles import Limits, ModelSetup, ModelSum, Plain, Setup, Sum, SumApi


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[ActorSystem]:
    async with ActorSystem("tests") as system:
        yield system


LIMITS = Limits(max_batch=3, folder=Path("/some/where"))


@pytest.mark.parametrize("process", [False, True])
async def test_an_actor_with_a_typed_setup_is_called_through_its_protocol(
    system: ActorSystem, process: bool
) -> None:
    plain = await system.spawn(Plain, "plain", process=process)
    first = await system.spawn(Sum, "first", Setup(LIMITS, {"a": 0.5}, (plain,)), process=process)
    second: ActorRef[SumApi] = await system.spawn(
        ModelSum, "second", ModelSetup(limits=LIMITS, others=(first,)), process=process
    )
    assert await second.api.sum([1, 2]) == 6
    assert [await second.api.add(2), await second.api.add(3)] == [2, 5]
    assert [number async for number in second.api.count(3)] == [0, 1, 2]
    assert await first.api.limits() == LIMITS
    by_name = await system.lookup("first", SumApi)
    assert await by_name.api.sum([4]) == 4


async def test_a_setup_is_given_by_path_and_by_keyword_too(system: ActorSystem) -> None:
    path = f"{Sum.__module__}:Sum"
    await system.spawn(path, "one", Setup(LIMITS, {}), process=True)
    await system.spawn(path, "two", {"setup": Setup(LIMITS, {})}, process=True)
    for name in ("one", "two"):
        assert await (await system.lookup(name, SumApi)).api.limits() == LIMITS


def test_the_signature_is_the_implementations() -> None:
    for owner in (Sum, SumApi):
        signatures = [signature_of(owner, name) for name in ("sum", "add", "count")]
        assert [(s.is_endpoint, s.streams) for s in signatures if s is not None] == [
            (True, False), (True, False), (True, True),
        ]  # fmt: skip


class OneApi(Protocol):
    @endpoint
    async def one(self) -> int: ...


class UnmarkedApi(Protocol):
    async def two(self) -> int: ...


class Both(OneApi, UnmarkedApi, Protocol):
    """A protocol of protocols."""


def test_a_class_that_lacks_a_method_of_its_protocol_is_refused() -> None:
    with pytest.raises(TypeError, match="Lacking does not implement UnmarkedApi.two"):

        class Lacking(Actor, UnmarkedApi):
            pass

    with pytest.raises(TypeError, match="Half does not implement OneApi.one"):

        class Half(Actor, Both):
            @endpoint
            async def two(self) -> int:
                return 2


def test_a_class_that_lacks_a_mark_of_its_protocol_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Unmarked.one must be marked as in OneApi: @endpoint"):

        class Unmarked(Actor, OneApi):
            async def one(self) -> int:
                return 1


def test_a_method_inherited_from_another_actor_implements_the_protocol() -> None:
    class Base(Actor):
        @endpoint
        async def one(self) -> int:
            return 1

    class Derived(Base, OneApi):
        pass

    assert signature_of(Derived, "one") is not None
