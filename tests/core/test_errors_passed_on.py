"""Errors that pass through several actors: the first one is named, once."""

import pytest

from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.errors import ActorFailed, Origin, RemoteError, origin_of
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem


class First(Actor):
    @endpoint
    async def work(self) -> None:
        raise KeyError("no such row")


class Later(Actor):
    def __init__(self, other: ActorRef[object]) -> None:
        self._other = other

    @endpoint
    async def work(self) -> None:
        await self._other.ask("work")


async def test_an_error_keeps_its_name_through_a_chain_of_calls(system: ActorSystem) -> None:
    ref: ActorRef[object] = await system.add(First(), "first")
    for name in ("second", "third"):
        ref = await system.add(Later(ref), name)
    with pytest.raises(RemoteError) as caught:
        await ref.ask("work")
    error = caught.value
    assert (error.actor, error.kind, error.message) == ("third", "KeyError", "'no such row'")
    assert str(error) == "third.work raised KeyError: 'no such row'"
    assert 'raise KeyError("no such row")' in error.remote_traceback, "the frames of all of them are kept"


def test_the_origin_of_an_error_is_the_actor_that_answered_with_it() -> None:
    answer = RemoteError("store", "put", "StoreFull", "no room", "frames", declared="OSError")
    assert origin_of(answer, "trainer") == Origin("store", "StoreFull", "no room")
    declared = OSError("no room")
    declared.__cause__ = answer
    assert origin_of(declared, "trainer") == Origin("store", "OSError", "no room")
    other = ValueError("no plan")
    other.__cause__ = answer
    assert origin_of(other, "trainer") == Origin("trainer", "ValueError", "no plan")


def test_a_failed_actor_names_the_one_that_raised_and_the_error_once() -> None:
    failed = ActorFailed("orchestrator", "no room", "frames", kind="StoreFull", raised_in="store")
    assert str(failed) == "actor store failed: StoreFull: no room"
    assert (failed.actor, failed.raised_in, failed.kind, failed.error) == (
        "orchestrator",
        "store",
        "StoreFull",
        "no room",
    )
    assert str(ActorFailed("echo", "ValueError: no", "frames")) == "actor echo failed: ValueError: no"
