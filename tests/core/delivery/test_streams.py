"""The two ends of a stream."""

import asyncio

import pytest

from flexmarl.core.delivery.streams import StreamReader, StreamWriter
from flexmarl.core.errors import ActorDead

from ...patience import PATIENCE_S


async def test_items_come_in_order_and_then_the_end() -> None:
    reader = StreamReader("far")
    reader.push(0, 1)
    reader.push(1, None)
    reader.set_result(2)
    assert [await reader.wait_item(1.0), await reader.wait_item(1.0)] == [1, None]
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await reader.wait_item(1.0)
    assert reader.done()


async def test_an_error_comes_after_the_items_that_have_arrived() -> None:
    reader = StreamReader("far")
    reader.push(0, "item")
    reader.set_exception(KeyError("late"))
    assert await reader.wait_item(1.0) == "item"
    with pytest.raises(KeyError, match="late"):
        await reader.wait_item(1.0)


async def test_the_reader_waits_for_each_item_only_so_long() -> None:
    reader = StreamReader("far")
    with pytest.raises(TimeoutError):
        await reader.wait_item(0.01)
    reader.push(0, "after all")
    assert await reader.wait_item(0.01) == "after all"


async def test_a_waiting_reader_is_woken_by_an_item_and_by_the_end() -> None:
    reader = StreamReader("far")
    first = asyncio.ensure_future(reader.wait_item(5.0))
    await asyncio.sleep(0)
    reader.push(0, 1)
    assert await first == 1
    second = asyncio.ensure_future(reader.wait_item(5.0))
    await asyncio.sleep(0)
    reader.set_exception(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await second


async def test_a_second_copy_of_an_item_is_ignored() -> None:
    reader = StreamReader("far")
    for number in (0, 0, 1, 0, 1):
        reader.push(number, number)
    reader.set_result(2)
    reader.push(2, "too late")
    reader.set_result(7)
    assert [await reader.wait_item(1.0), await reader.wait_item(1.0)] == [0, 1]
    with pytest.raises(StopAsyncIteration):
        await reader.wait_item(1.0)


@pytest.mark.parametrize("ends", [False, True])
async def test_where_an_item_is_missing_the_stream_ends_with_an_error(ends: bool) -> None:
    reader = StreamReader("far")
    reader.push(0, "first")
    if ends:
        reader.set_result(2)
    else:
        reader.push(2, "third")
    reader.push(1, "second")
    assert reader.done() and await reader.wait_item(1.0) == "first"
    with pytest.raises(ActorDead, match="item 1 of its stream was lost"):
        await reader.wait_item(1.0)


@pytest.mark.parametrize("count", [None, "2", [], 1.5, -1])
async def test_an_end_that_counts_no_items_is_an_error(count: object) -> None:
    reader = StreamReader("far")
    reader.set_result(count)
    with pytest.raises(ActorDead):
        await reader.wait_item(1.0)


async def _has_room(writer: StreamWriter) -> bool:
    waiting = asyncio.ensure_future(writer.wait_room())
    await asyncio.sleep(0)
    if waiting.done():
        return True
    waiting.cancel()
    return False


async def test_the_writer_stops_at_the_window_of_items() -> None:
    writer = StreamWriter(2, 1000)
    for _ in range(2):
        assert await _has_room(writer)
        writer.sent(1)
    assert not await _has_room(writer)
    writer.grant(1)
    assert await _has_room(writer)


async def test_the_writer_stops_at_the_window_of_bytes_and_one_item_larger_than_it_passes() -> None:
    writer = StreamWriter(100, 1000)
    assert await _has_room(writer)
    writer.sent(5000)
    assert not await _has_room(writer)
    writer.grant(1)
    assert await _has_room(writer)


@pytest.mark.parametrize("count", [-5, 0, 10**18])
async def test_a_grant_counts_for_what_was_sent_and_no_more(count: int) -> None:
    writer = StreamWriter(2, 1000)
    for _ in range(2):
        writer.sent(1)
    writer.grant(count)
    writer.grant(count)
    assert await _has_room(writer) is (count > 0)
    if count > 0:
        writer.sent(1)
        writer.sent(1)
        assert not await _has_room(writer)


@pytest.mark.parametrize("window", [-1, 0, 1])
async def test_a_window_of_nothing_is_a_window_of_one(window: int) -> None:
    writer = StreamWriter(window, 1000)
    assert await _has_room(writer)
    writer.sent(1)
    assert not await _has_room(writer)


async def test_a_writer_that_waits_goes_on_as_soon_as_it_may() -> None:
    writer = StreamWriter(1, 1000)
    writer.sent(1)
    waiting = asyncio.ensure_future(writer.wait_room())
    await asyncio.sleep(0)
    writer.grant(1)
    await asyncio.wait_for(waiting, PATIENCE_S)
