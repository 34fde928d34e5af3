"""The items that the readers of a run get."""

import asyncio
import gc

import pytest

from flexmarl.launch.run.run_feed import Feed


def nothing() -> None: ...


async def test_each_reader_has_all_that_came_after_it_was_made() -> None:
    feed = Feed[int](nothing)
    first = feed.reader()
    feed.put(1)
    second = feed.reader()
    feed.put(2)
    feed.end()
    assert [item async for item in first] == [1, 2]
    assert [item async for item in second] == [2]
    assert [item async for item in feed.reader()] == []


async def test_a_reader_waits_for_the_next_one_and_for_the_end() -> None:
    feed = Feed[int](nothing)
    reader = feed.reader()
    waiting = asyncio.create_task(anext(reader))
    await asyncio.sleep(0)
    assert not waiting.done()
    feed.put(1)
    assert await waiting == 1
    ending = asyncio.create_task(anext(reader, None))
    await asyncio.sleep(0)
    feed.end()
    assert await ending is None


async def test_two_tasks_may_share_a_reader() -> None:
    feed = Feed[int](nothing)
    reader = feed.reader()
    waiting = [asyncio.create_task(anext(reader, None)) for _ in range(3)]
    await asyncio.sleep(0)
    feed.put(1)
    feed.put(2)
    feed.end()
    assert sorted(await asyncio.gather(*waiting), key=str) == [1, 2, None]


async def test_the_error_comes_behind_the_last_item_and_each_time() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    feed = Feed[int](fail)
    reader = feed.reader()
    feed.put(1)
    feed.end()
    assert await anext(reader) == 1
    for each in (reader, reader, feed.reader()):
        with pytest.raises(ZeroDivisionError):
            await anext(each)


async def test_a_reader_that_was_dropped_gets_nothing() -> None:
    feed = Feed[int](nothing)
    feed.reader()
    kept = feed.reader()
    gc.collect()
    feed.put(1)
    assert list(feed._readers) == [kept]
