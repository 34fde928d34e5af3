"""The order of concurrent calls, for every order in which they get ready, fail or are cancelled."""

import asyncio
from enum import Enum

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.trainer.arrival_order import ArrivalOrder

from ...patience import PATIENCE_S


class End(Enum):
    PASSES = "passes"
    FAILS = "fails"
    CANCELLED = "is cancelled"


async def passed(ends: list[End], ready: list[int]) -> list[int]:
    """The calls that passed, in their order; ``ready``: the order in which the calls' own work ends."""
    order, works = ArrivalOrder(), [asyncio.Event() for _ in ends]
    passed: list[int] = []
    works_after = asyncio.Event()

    async def call(number: int) -> None:
        with order.place() as place:
            await works[number].wait()
            if ends[number] is End.FAILS:
                raise ValueError
            await place.wait_turn()
            passed.append(number)
            await works_after.wait()  # the place was left with its turn, not at the end of the block

    tasks = [asyncio.ensure_future(call(number)) for number in range(len(ends))]
    await asyncio.sleep(0)
    for number in ready:
        if ends[number] is End.CANCELLED:
            tasks[number].cancel()
        works[number].set()
        await asyncio.sleep(0)
    while not all(task.done() or number in passed for number, task in enumerate(tasks)):
        await asyncio.sleep(0)
    works_after.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    return passed


@given(st.data())
def test_calls_pass_in_the_order_of_their_arrival(data: st.DataObject) -> None:
    ends = data.draw(st.lists(st.sampled_from(End), max_size=8))
    ready = data.draw(st.permutations(range(len(ends))))
    got = asyncio.run(asyncio.wait_for(passed(ends, ready), PATIENCE_S))
    assert got == [number for number, end in enumerate(ends) if end is End.PASSES]


def test_a_call_alone_does_not_wait() -> None:
    async def alone() -> bool:
        with ArrivalOrder().place() as place:
            waiting = place.wait_turn()
            try:
                waiting.send(None)
            except StopIteration:
                return True
            return False

    assert asyncio.run(alone())
