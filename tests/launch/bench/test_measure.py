import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.launch.bench import measure
from flexmarl.launch.bench.measure import (
    ONE_WAY_BURST,
    calls_in_flight,
    gathered,
    in_turns,
    medians,
    one_after_another,
    one_after_another_blocking,
    one_way,
    percentile,
)
from flexmarl.launch.errors import BenchmarkFailed


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_percentile_is_the_smallest_value_with_enough_below_it(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < max(1, share * len(values))


def test_percentiles_that_people_know() -> None:
    hundred = [float(value) for value in range(100, 0, -1)]
    assert percentile(hundred, 0.5) == 50
    assert percentile(hundred, 0.99) == 99


def test_medians_of_rounds() -> None:
    assert medians([{"a": 1, "b": 9}, {"a": 5, "b": 7}, {"a": 2, "b": 8}]) == {"a": 2, "b": 8}


def test_turns_begin_with_each_equally_often() -> None:
    assert list(in_turns(("ours", "bare"), 3)) == ["ours", "bare", "bare", "ours", "ours", "bare"]


async def test_durations_are_microseconds() -> None:
    async def call() -> None:
        await asyncio.sleep(0.002)

    durations = await one_after_another(call, 0.03)
    assert len(durations) <= 15
    assert min(durations) >= 1900
    blocking = one_after_another_blocking(lambda: time.sleep(0.002), 0.03)
    assert len(blocking) <= 15
    assert min(blocking) >= 1900


async def test_as_many_calls_are_in_flight_as_were_asked_for() -> None:
    under_way, seen, ended = 0, set[int](), 0

    async def call() -> None:
        nonlocal under_way, ended
        under_way += 1
        seen.add(under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        ended += 1

    count, elapsed_s = await calls_in_flight(call, 0.03, 7)
    assert max(seen) == 7 and under_way == 0
    assert count == ended >= 7, "on a busy machine the time is over when the first seven have ended"
    assert elapsed_s >= 0.029
    assert len(asyncio.all_tasks()) == 1


async def test_a_call_that_fails_ends_the_measurement() -> None:
    async def call() -> None:
        raise KeyError("no such actor")

    with pytest.raises(KeyError, match="no such actor"):
        await calls_in_flight(call, 10, 100)
    assert len(asyncio.all_tasks()) == 1


async def test_calls_that_never_end_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MAXIMUM_STALL_S", 0.01)
    with pytest.raises(BenchmarkFailed, match="5 of 5 calls in flight"):
        await calls_in_flight(lambda: asyncio.Event().wait(), 0.01, 5)
    assert len(asyncio.all_tasks()) == 1


async def test_gathered_calls_are_made_in_rounds() -> None:
    rounds = [0]

    async def call() -> None:
        rounds[-1] += 1
        await asyncio.sleep(0.002)
        if rounds[-1]:
            rounds.append(0)

    per_s = await gathered(call, 0.02, 7)
    assert {count for count in rounds if count} == {7}
    assert 0 < per_s <= 7 / 0.002


async def test_one_way_messages_are_counted_where_they_arrive() -> None:
    sent: list[int] = []
    lost = 0

    async def burst(first: int) -> None:
        sent.extend(range(first, first + ONE_WAY_BURST))
        await asyncio.sleep(0.001)

    async def arrived() -> int:
        return len(sent) - lost

    assert 0 < await one_way(burst, arrived, 0.01) < ONE_WAY_BURST / 0.001
    assert sent == list(range(len(sent))) and len(sent) % ONE_WAY_BURST == 0

    async def loses(first: int) -> None:
        nonlocal lost
        await burst(first)
        lost = 3

    with pytest.raises(BenchmarkFailed, match="one-way messages were sent and"):
        await one_way(loses, arrived, 0.01)
