"""Waits of actors, as they are listed for people."""

import asyncio

import pytest

from flexmarl.core.testing import virtual_time
from flexmarl.core.waits import OpenWaits, Wait, group_waits


def test_open_waits_are_listed_the_oldest_first_with_their_time() -> None:
    async def main() -> None:
        waits = OpenWaits()
        assert waits.current() == []
        with waits.open("a lease", "store.lease_s=5 ends it"):
            await asyncio.sleep(2.0)
            with waits.open("a turn", actor="solver-0"):
                await asyncio.sleep(1.0)
                assert waits.current() == [
                    Wait("a lease", 3.0, "store.lease_s=5 ends it"),
                    Wait("a turn", 1.0, actor="solver-0"),
                ]
            assert [wait.text for wait in waits.current()] == ["a lease"]
        assert waits.current() == []

    virtual_time.run(main())


def test_a_wait_that_began_earlier_has_all_of_its_time() -> None:
    async def main() -> None:
        waits, began = OpenWaits(), asyncio.get_running_loop().time()
        for _ in range(3):
            with waits.open("a column", since=began):
                await asyncio.sleep(10.0)
                (wait,) = waits.current()
        assert wait.seconds == 30.0

    virtual_time.run(main())


async def test_a_wait_that_fails_or_is_cancelled_is_not_open_any_more() -> None:
    waits = OpenWaits()
    with pytest.raises(ValueError, match="on purpose"), waits.open("a turn"):
        raise ValueError("on purpose")

    async def waiting() -> None:
        with waits.open("another turn"):
            await asyncio.Event().wait()

    task = asyncio.create_task(waiting())
    await asyncio.sleep(0)
    assert [wait.text for wait in waits.current()] == ["another turn"]
    task.cancel()
    await asyncio.wait([task])
    assert waits.current() == []


def test_equal_waits_are_one_with_the_time_of_the_oldest() -> None:
    turn, other = "a turn of solver", "rollout.turn_timeout_s ends it"
    waits = [Wait(turn, 1.0, other), Wait("a load", 2.0), Wait(turn, 3.0, other), Wait(turn, 2.5)]
    assert group_waits(waits) == [
        Wait(f"{turn} (2 times)", 3.0, other),
        Wait(turn, 2.5),
        Wait("a load", 2.0),
    ], "with another limit it is another wait"
    assert group_waits([]) == []
