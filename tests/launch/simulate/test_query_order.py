"""The order of queries of which only some are played at once."""

import asyncio

import pytest

from flexmarl.core.testing import virtual_time
from flexmarl.launch.simulate.query_order import QueryOrder


def played(limit: int | None, *queries: tuple[str, float]) -> dict[str, tuple[float, float]]:
    """Begin of the first and end of the last of two trajectories of each query, which take their seconds and twice."""
    times: dict[str, list[float]] = {query: [] for query, _ in queries}

    async def play(order: QueryOrder, query: str, seconds: float) -> None:
        async with order.place(query, limit):
            times[query].append(asyncio.get_running_loop().time())
            await asyncio.sleep(seconds)
            times[query].append(asyncio.get_running_loop().time())

    async def main() -> float:
        order, began = QueryOrder(), asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for query, seconds in queries:
                for times_longer in (1, 2):
                    tasks.create_task(play(order, query, seconds * times_longer))
        return began

    began = virtual_time.run(main())
    return {query: (min(at) - began, max(at) - began) for query, at in times.items()}


QUERIES = (("a", 5.0), ("b", 1.0), ("c", 1.0))


@pytest.mark.parametrize("limit", [None, 3])
def test_all_queries_are_played_at_once_if_there_is_room(limit: int | None) -> None:
    assert played(limit, *QUERIES) == {"a": (0.0, 10.0), "b": (0.0, 2.0), "c": (0.0, 2.0)}


def test_a_query_begins_when_all_trajectories_of_an_earlier_one_have_ended() -> None:
    assert played(1, *QUERIES) == {"a": (0.0, 10.0), "b": (10.0, 12.0), "c": (12.0, 14.0)}
    assert played(2, *QUERIES) == {"a": (0.0, 10.0), "b": (0.0, 2.0), "c": (2.0, 4.0)}


def test_a_trajectory_that_is_cancelled_or_fails_leaves_its_place() -> None:
    async def main() -> None:
        order = QueryOrder()

        async def fail() -> None:
            async with order.place("a", 1):
                raise ValueError

        async def wait(query: str) -> None:
            async with order.place(query, 1):
                pass

        await asyncio.gather(fail(), return_exceptions=True)
        async with order.place("b", 1):
            waiting = asyncio.create_task(wait("c"))
            await asyncio.sleep(1.0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await wait("d")

    virtual_time.run(main(), limit_s=60.0)
