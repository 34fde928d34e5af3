"""Versions that hosts pass on to each other: once out of each host, whole, and from the owner if a copy fails."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.transport.errors import TransferTimeout
from flexmarl.transport.handle import StateHandle
from flexmarl.transport.host_memory.block import CHUNK_BYTES
from flexmarl.transport.remote import remote
from flexmarl.transport.remote.bulk import Bulk
from flexmarl.transport.remote.relays import Arrival, Chain, Relay
from flexmarl.transport.remote.server import BulkServer
from flexmarl.transport.state import StateTransport

from ...patience import PATIENCE_S
from .hosts import ELEMENTS, Hosts, link_to, network, same, weights
from .link import Link

SIZE = 4 * ELEMENTS + 4  # with the gap before the second tensor

# ----------------------------------------------------------------------- the order


def test_each_reader_gets_the_version_from_the_one_before_it() -> None:
    chain = Chain[str]()
    assert [chain.join(reader) for reader in "abc"] == [None, "a", "b"]


def test_nobody_is_sent_to_a_reader_that_has_left() -> None:
    chain = Chain[str]()
    for reader in "ab":
        chain.join(reader)
    chain.leave("b")
    chain.leave("unknown")
    assert chain.join("c") == "a"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5))))
def test_no_reader_waits_for_itself(moves: list[tuple[bool, int]]) -> None:
    """Reads come from the owner if one begins again while others read from it."""
    chain, reads_from = Chain[int](), dict[int, int | None]()
    for joins, reader in moves:
        if not joins:
            chain.leave(reader)
            # Its readers, and itself, go to the owner: the next time it is another copy.
            reads_from = {
                name: None if reader in (name, source) else source for name, source in reads_from.items()
            }
            continue
        reads_from[reader] = chain.join(reader)
        way, source = {reader}, reads_from[reader]
        while source is not None:
            assert source not in way
            way.add(source)
            source = reads_from[source]


# ----------------------------------------------------------------------- several hosts


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes no relay late."""
    monkeypatch.setattr(remote, "RELAY_S", PATIENCE_S)
    monkeypatch.setattr("flexmarl.transport.remote.relays._WAIT_S", PATIENCE_S)


@pytest.fixture
async def readers(hosts: Hosts, bulk: Bulk) -> AsyncIterator[list[StateTransport]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(hosts.open(f"far {number}", bulk)) for number in range(4)]


async def test_the_owner_sends_a_version_once_to_all_hosts(
    owner: StateTransport, readers: list[StateTransport]
) -> None:
    expected = weights()
    handle = await owner.set("weights", expected, version=1)
    assert all(await asyncio.gather(*(same(reader, handle, expected) for reader in readers)))
    assert network(owner).sent_bytes == SIZE
    assert sorted(network(reader).relayed_bytes for reader in readers) == [0, SIZE, SIZE, SIZE]
    assert sorted(network(reader).sent_bytes for reader in readers) == [0, SIZE, SIZE, SIZE]
    assert sum(network(reader).relays_left for reader in readers) == 0


async def test_a_host_that_comes_later_reads_the_whole_copy_of_another_one(
    owner: StateTransport, readers: list[StateTransport]
) -> None:
    for version in (1, 2, 3):  # into blocks that are used again
        expected = weights(version)
        handle = await owner.set("weights", expected, version=version)
        for reader in readers[: version + 1]:
            assert await same(reader, handle, expected)
    assert network(owner).sent_bytes == 3 * SIZE
    assert network(readers[3]).relayed_bytes == SIZE


def stop_at_half(link: Link) -> asyncio.Event:
    """Has ``link`` pass half of the version and then nothing; the result is set from there on."""
    stopped = asyncio.Event()

    def stop() -> None:
        link.up.clear()
        stopped.set()

    link.at = (SIZE // 2, stop)
    return stopped


async def test_a_copy_passes_on_what_has_arrived_while_the_rest_is_on_its_way(
    owner: StateTransport, readers: list[StateTransport], bulk: Bulk
) -> None:
    expected = weights()
    handle = await owner.set("weights", expected, version=1)
    async with link_to(handle) as (link, linked):
        stopped = stop_at_half(link)
        first = asyncio.create_task(same(readers[0], linked, expected))
        async with asyncio.timeout(PATIENCE_S):
            await stopped.wait()
            second = asyncio.create_task(same(readers[1], handle, expected))
            while not network(readers[1]).relayed_bytes:
                await asyncio.sleep(0.005)
            assert not first.done()
            link.up.set()
            assert await first
            assert await second
    assert network(readers[1]).relayed_bytes == SIZE


async def test_few_changes_come_from_the_owner_to_each_host(
    owner: StateTransport, readers: list[StateTransport]
) -> None:
    before = weights()
    handle = await owner.set("weights", before, version=1)
    for reader in readers[:2]:
        assert await same(reader, handle, before)
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["w"][::1000] += 1
    relayed = network(readers[1]).relayed_bytes
    handle = await owner.set("weights", after, version=2)
    for reader in readers[:2]:
        assert await same(reader, handle, after)
    assert network(readers[1]).relayed_bytes == relayed == SIZE
    assert network(readers[1]).got_delta_bytes > 0
    # All values are new: no host gets them as changes, and the second host reads from the first again.
    last = weights(9)
    handle = await owner.set("weights", last, version=3)
    for reader in readers[:2]:
        assert await same(reader, handle, last)
    assert network(readers[1]).relayed_bytes == 2 * SIZE


async def test_small_states_come_from_the_owner(owner: StateTransport, readers: list[StateTransport]) -> None:
    small = {name: tensor[:CHUNK_BYTES] for name, tensor in weights().items()}
    handle = await owner.set("weights", small, version=1)
    for reader in readers:
        assert await same(reader, handle, small)
    assert network(owner).sent_bytes == 4 * handle.size_bytes


# ----------------------------------------------------------------------- copies that fail


@contextmanager
def answers(monkeypatch: pytest.MonkeyPatch, relay: Relay) -> Iterator[None]:
    """The owner sends all readers to ``relay``."""
    with monkeypatch.context() as patched:
        patched.setattr(BulkServer, "join", lambda server, request: relay)
        yield


async def relay_of(readers: list[StateTransport], handle: StateHandle, number: int = 0) -> Relay:
    """The copy of a version on the host of a reader, which fetches it."""
    await readers[number].get(handle)
    copy = readers[number]._remote.find(handle)  # type: ignore[union-attr]
    assert copy is not None
    door = readers[number]._host._blocks.open_door()
    return Relay(door.address, copy.block, copy.generation)


async def test_a_copy_that_has_gone_is_given_up_for_the_owner_and_nobody_else_is_sent_there(
    owner: StateTransport, readers: list[StateTransport]
) -> None:
    expected = weights()
    handle = await owner.set("weights", expected, version=1)
    await readers[0].get(handle)
    await readers[0].close()
    assert await same(readers[1], handle, expected)
    assert network(readers[1]).relays_left == 1
    assert network(owner).sent_bytes == 2 * SIZE
    assert await same(readers[2], handle, expected), "it is sent to the second"
    assert network(readers[2]).relays_left == 0
    assert network(readers[2]).relayed_bytes == SIZE


@pytest.mark.parametrize("lie", ["another version", "no such block"])
async def test_a_copy_that_does_not_have_the_version_is_given_up(
    owner: StateTransport, readers: list[StateTransport], monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    other = await owner.set("weights", weights(1), version=1)
    expected = weights(2)
    relay = await relay_of(readers, other)
    handle = await owner.set("weights", expected, version=2)
    if lie == "no such block":
        relay = replace(relay, block="copy-0-nobody-0.arena")
    with answers(monkeypatch, relay):
        assert await same(readers[1], handle, expected)
    assert network(readers[1]).relays_left == 1
    assert network(readers[1]).relayed_bytes == 0


async def test_wrong_bytes_of_a_copy_are_noticed_and_come_from_the_owner(
    hosts: Hosts, owner: StateTransport, readers: list[StateTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights()
    handle = await owner.set("weights", expected, version=1)
    relay = await relay_of(readers, handle)
    block, _ = readers[0]._host._blocks.find_block(relay.block)
    block.payload[SIZE // 2] ^= 1
    with answers(monkeypatch, relay):
        assert await same(readers[1], handle, expected)
    assert network(readers[1]).relays_left == 1


async def test_a_copy_that_brings_nothing_costs_the_deadline(
    owner: StateTransport, readers: list[StateTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RELAY_S", 0.2)
    expected = weights()
    handle = await owner.set("weights", expected, version=1)
    relay = await relay_of(readers, handle)
    async with Link(relay.address) as link:
        link.at = (SIZE // 2, link.up.clear)
        with answers(monkeypatch, replace(relay, address=link.address)):
            assert await same(readers[1], handle, expected)
        link.up.set()
    assert network(readers[1]).relays_left == 1
    assert network(readers[1]).relayed_bytes < SIZE


async def test_a_deadline_that_ends_before_a_copy_is_given_up_names_the_copy(
    owner: StateTransport, readers: list[StateTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await owner.set("weights", weights(), version=1)
    relay = await relay_of(readers, handle)
    async with Link(relay.address) as link:
        link.up.clear()
        with (
            answers(monkeypatch, replace(relay, address=link.address)),
            pytest.raises(TransferTimeout, match=f"0 bytes came from a copy at {link.address}, range 0"),
        ):
            await readers[1].get(handle, timeout_s=0.5)
        link.up.set()


async def test_a_process_that_has_given_a_copy_up_reads_from_owners_alone_for_a_while(
    owner: StateTransport, readers: list[StateTransport]
) -> None:
    handle = await owner.set("weights", weights(), version=1)
    await readers[0].get(handle)
    await readers[0].close()
    await readers[1].get(handle)
    assert network(readers[1]).relays_left == 1
    expected = weights(2)
    handle = await owner.set("weights", expected, version=2)
    await readers[2].get(handle)
    assert await same(readers[1], handle, expected)
    assert network(readers[1]).relayed_bytes == 0


async def test_a_fetch_that_ends_sends_its_readers_to_the_owner(
    owner: StateTransport, readers: list[StateTransport]
) -> None:
    expected = weights()
    handle = await owner.set("weights", expected, version=1)
    async with link_to(handle) as (link, linked):
        stopped = stop_at_half(link)
        first = asyncio.create_task(readers[0].get(linked))
        async with asyncio.timeout(PATIENCE_S):
            await stopped.wait()
            second = asyncio.create_task(same(readers[1], handle, expected))
            while not network(readers[1]).relayed_bytes:
                await asyncio.sleep(0.005)
            first.cancel()
            assert await second
            await asyncio.wait([first])
    assert network(readers[1]).relays_left == 1


def test_a_chunk_is_waited_for_no_longer_than_the_deadline(
    owner: StateTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexmarl.transport.remote.relays._WAIT_S", 0.01)
    block = owner._arena.take(SIZE, "weights")
    assert block.begin(1, SIZE)
    arrival = Arrival(block)
    assert not arrival.wait_table()
    assert not arrival.wait(0)
    arrival.table_came()
    arrival.chunk_came(0)
    assert arrival.wait_table()
    assert arrival.wait(0)
    assert not arrival.wait(1)
    block.end()


def test_the_end_of_an_arrival_wakes_those_that_wait_for_it(owner: StateTransport) -> None:
    block = owner._arena.take(SIZE, "weights")
    assert block.begin(1, SIZE)
    arrival, answers = Arrival(block), list[bool]()
    waiting = threading.Thread(target=lambda: answers.append(arrival.wait(0)))
    waiting.start()
    arrival.end()
    waiting.join(PATIENCE_S)
    assert answers == [False]
    block.end()
