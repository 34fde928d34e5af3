"""Bytes that a process serves by name: fetched whole, or refused with the reason."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from flexmarl.transport.errors import ForeignHandle, RangesLost
from flexmarl.transport.remote.bulk import Bulk
from flexmarl.transport.remote.frames import MOST_RANGE_BYTES, REPLY_BYTES, NamedRange
from flexmarl.transport.remote.named_ranges import fetch_ranges
from flexmarl.transport.remote.server import BulkServer
from flexmarl.transport.statistics import NetworkStatistics

from .hosts import KEYS
from .link import Link

CONTENT = bytes(range(256)) * 64
RANGES = [NamedRange("content", start, start + 1000) for start in range(0, 15000, 500)]


def serve_content(request: NamedRange) -> memoryview:
    if request.name != "content" or request.end > len(CONTENT):
        raise ForeignHandle(request.name, "a test", "there is no such range")
    return memoryview(CONTENT)[request.start : request.end]


@pytest.fixture
def server(bulk: Bulk) -> Iterator[BulkServer]:
    server = BulkServer(bulk, NetworkStatistics(), named_bytes=serve_content)
    yield server
    server.close()


async def fetch(bulk: Bulk, address: str, ranges: list[NamedRange], timeout_s: float = 30.0) -> bool:
    """True if all ranges have come whole."""
    contents = await asyncio.to_thread(fetch_ranges, bulk, address, ranges, timeout_s, threading.Event())
    return contents == {request: CONTENT[request.start : request.end] for request in ranges}


async def test_ranges_come_as_they_are_served_and_are_counted(bulk: Bulk, server: BulkServer) -> None:
    assert await fetch(bulk, server.address, [*RANGES, RANGES[0]])
    assert server.statistics.sent_bytes == 1000 * len(RANGES)
    assert await fetch(bulk, server.address, [])


@pytest.mark.parametrize("request_", [NamedRange("other", 0, 10), NamedRange("content", 0, MOST_RANGE_BYTES)])
async def test_an_unknown_name_and_a_range_outside_are_refused(
    bulk: Bulk, server: BulkServer, request_: NamedRange
) -> None:
    with pytest.raises(RangesLost, match="1 range of bytes .*it is not there"):
        await fetch(bulk, server.address, [RANGES[0], request_])
    assert await fetch(bulk, server.address, RANGES), "the other readers are served as before"


async def test_a_process_that_serves_states_alone_refuses_every_name(bulk: Bulk) -> None:
    server = BulkServer(bulk, NetworkStatistics())
    with pytest.raises(RangesLost, match="it is not there"):
        await fetch(bulk, server.address, RANGES)
    server.close()


async def test_an_owner_that_has_left_is_reported_at_once(bulk: Bulk, server: BulkServer) -> None:
    server.close()
    with pytest.raises(RangesLost, match="refused"):
        await fetch(bulk, server.address, RANGES)


def flip_first(times: int) -> Callable[[int, bytearray], None]:
    """Changes the first byte of the first range, in as many connections. The plain proof is 64 bytes long."""
    before = 0
    flipped = 0

    def change(passed: int, received: bytearray) -> None:
        nonlocal before, flipped
        place = before + 64 + REPLY_BYTES - passed
        if flipped < times and 0 <= place < len(received):
            received[place] ^= 1
            flipped += 1
            before += 64 + len(RANGES) * (REPLY_BYTES + 1000)

    return change


@pytest.mark.parametrize(("times", "arrives"), [(1, True), (2, False)])
async def test_bytes_that_come_wrong_are_fetched_once_more(times: int, arrives: bool) -> None:
    bulk = Bulk("127.0.0.1", KEYS, encrypted=False)
    server = BulkServer(bulk, NetworkStatistics(), named_bytes=serve_content)
    async with Link(server.address) as link:
        link.change = flip_first(times)
        if arrives:
            assert await fetch(bulk, link.address, RANGES)
        else:
            with pytest.raises(RangesLost, match="another digest"):
                await fetch(bulk, link.address, RANGES)
    await asyncio.to_thread(server.close)


async def test_a_connection_that_ends_is_made_again_and_what_has_come_stays(
    bulk: Bulk, server: BulkServer
) -> None:
    cut = asyncio.Event()
    async with Link(server.address) as link:

        def end_connection() -> None:
            cut.set()
            link.reset()

        link.at = (8000, end_connection)
        assert await fetch(bulk, link.address, RANGES)
        assert cut.is_set()
    await asyncio.to_thread(server.close)


async def test_it_gives_up_at_the_deadline(bulk: Bulk, server: BulkServer) -> None:
    async with Link(server.address) as link:

        def cut(passed: int, received: bytearray) -> None:
            link.reset()

        link.change = cut
        with pytest.raises(RangesLost, match=r"for 0\.2 s"):
            await fetch(bulk, link.address, RANGES, timeout_s=0.2)
    await asyncio.to_thread(server.close)
