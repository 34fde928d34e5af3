"""Path ``tcp``: once per host, deltas, strangers, cut links, killed owners, changed bytes, versions that change.

All hosts are this one: a reader of another host has another directory and another name for its host. A ``Link`` stands
between it and the owner.
"""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from flexmarl.core import Keys
from flexmarl.core.errors import InvalidKeys
from flexmarl.transport import state as state_module
from flexmarl.transport.block import CHUNK_BYTES
from flexmarl.transport.errors import (
    CorruptState,
    FetchFailed,
    NoPath,
    PeerRefused,
    StaleHandle,
    StateMismatch,
    TransferTimeout,
    TransportClosed,
)
from flexmarl.transport.handle import StateHandle, TcpSource
from flexmarl.transport.network import fetch
from flexmarl.transport.network.bulk import Bulk
from flexmarl.transport.network.copies import LOCK_FILE
from flexmarl.transport.state import StateTransport
from flexmarl.transport.statistics import NetworkStatistics

from ...processes import process
from ..network.link import Link

KEYS = Keys.make()
ELEMENTS = 3 << 20  # float32: 12 chunks
SIZE = 4 * ELEMENTS


@pytest.fixture(params=[True, False], ids=["encrypted", "trusted"])
def bulk(request: pytest.FixtureRequest) -> Bulk:
    return Bulk("127.0.0.1", KEYS, encrypted=request.param)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "BUCKET_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(fetch, "_SILENCE_S", 0.5)


class Hosts:
    """Transports on hosts, each of which has a directory."""

    def __init__(self, base: Path, patch: pytest.MonkeyPatch) -> None:
        self._base = base
        self._patch = patch

    @asynccontextmanager
    async def open(self, host: str, bulk: Bulk | None) -> AsyncIterator[StateTransport]:
        directory = self._base / host
        directory.mkdir(mode=0o700, exist_ok=True)
        self._patch.setattr(state_module, "this_host", lambda: host)
        async with StateTransport(directory, bulk=bulk) as transport:
            yield transport
        assert {path.name for path in directory.iterdir()} <= {LOCK_FILE} or host in self.shared

    shared: tuple[str, ...] = ("far",)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(tmp_path, monkeypatch)


@pytest.fixture
async def owner(hosts: Hosts, bulk: Bulk) -> AsyncIterator[StateTransport]:
    async with hosts.open("near", bulk) as transport:
        yield transport


@pytest.fixture
async def reader(hosts: Hosts, bulk: Bulk) -> AsyncIterator[StateTransport]:
    async with hosts.open("far", bulk) as transport:
        yield transport


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.rand(ELEMENTS - 1, generator=generator), "b": torch.rand(1, generator=generator)}


def network(transport: StateTransport) -> NetworkStatistics:
    found = transport.statistics().network
    assert found is not None
    return found


def source_of(handle: StateHandle) -> TcpSource:
    source = handle.source("tcp")
    assert isinstance(source, TcpSource)
    return source


def through(handle: StateHandle, address: str) -> StateHandle:
    """The handle, with another address of its owner."""
    return replace(handle, sources=(replace(source_of(handle), address=address),))


@asynccontextmanager
async def link_to(handle: StateHandle) -> AsyncIterator[tuple[Link, StateHandle]]:
    async with Link(source_of(handle).address) as link:
        yield link, through(handle, link.address)


async def same(transport: StateTransport, handle: StateHandle, expected: dict[str, Any]) -> bool:
    into = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    await transport.get(handle, into=into)
    return all(torch.equal(into[name], tensor) for name, tensor in expected.items())


# ----------------------------------------------------------------------- once per host


async def test_a_state_goes_over_the_network_once_for_all_readers_of_a_host(
    hosts: Hosts, owner: StateTransport, reader: StateTransport, bulk: Bulk
) -> None:
    expected = weights()
    handle = await owner.set("weights", expected, version=1)
    assert {source.path for source in handle.sources} == {"shm", "tcp"}
    async with hosts.open("far", bulk) as second, hosts.open("far", bulk) as third:
        readers = (reader, second, third)
        assert all(await asyncio.gather(*(same(one, handle, expected) for one in readers)))
        assert (
            sum(network(one).got_bytes for one in readers) == handle.size_bytes == network(owner).sent_bytes
        )
        assert await same(third, handle, expected)
        assert third.statistics().chosen["weights"].path == "shm"
        async with second.mapped(handle) as tensors:
            assert torch.equal(tensors["w"], expected["w"])


async def test_the_owner_copies_a_state_once_for_both_paths(owner: StateTransport) -> None:
    handle = await owner.set("weights", weights(), version=1)
    assert owner.statistics().by_path.keys() == {"tcp"}
    assert owner.statistics().arena_bytes < 1.1 * handle.size_bytes
    assert (await owner.get(handle))["b"] == weights()["b"]
    assert owner.statistics().chosen["weights"].path == "shm"
    assert network(owner).sent_bytes == 0


async def test_copies_go_with_their_process_and_their_key(
    hosts: Hosts, owner: StateTransport, reader: StateTransport, bulk: Bulk, tmp_path: Path
) -> None:
    handles = [await owner.set(key, weights(), version=1) for key in "ab"]
    for handle in handles:
        await reader.get(handle)
    assert len(list((tmp_path / "far").glob("copy-*"))) == 2
    await reader.drop("a")
    assert len(list((tmp_path / "far").glob("copy-*"))) == 1
    await reader.close()
    assert not list((tmp_path / "far").glob("copy-*"))


async def test_two_blocks_are_enough_for_many_versions(
    owner: StateTransport, reader: StateTransport, tmp_path: Path
) -> None:
    for version in range(5):
        expected = weights(version)
        assert await same(reader, await owner.set("weights", expected, version=version), expected)
    assert len(list((tmp_path / "far").glob("copy-*"))) == 2


# ----------------------------------------------------------------------- deltas


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
async def test_few_changed_values_arrive_as_a_delta(
    owner: StateTransport, reader: StateTransport, dtype: torch.dtype
) -> None:
    size = 5_000_003
    expected = {"w": torch.randint(0, 100, (size,)).to(dtype)}
    await same(reader, await owner.set("weights", expected, version=0), expected)
    for version in range(1, 4):
        before = network(reader).got_bytes
        expected["w"][torch.randint(0, size, (size // 300,))] += 1
        handle = await owner.set("weights", expected, version=version)
        assert await same(reader, handle, expected)
        assert 0 < network(reader).got_bytes - before < 0.05 * handle.size_bytes
    assert network(reader).got_delta_bytes == network(owner).sent_delta_bytes > 0


async def test_many_changed_values_arrive_as_a_whole(owner: StateTransport, reader: StateTransport) -> None:
    for version in range(2):
        expected = weights(version)
        handle = await owner.set("weights", expected, version=version)
        assert await same(reader, handle, expected)
    assert network(reader).got_bytes == 2 * handle.size_bytes
    assert network(reader).got_delta_bytes == 0


async def test_a_version_that_the_owner_no_longer_has_is_no_base(
    owner: StateTransport, reader: StateTransport
) -> None:
    expected = weights()
    await same(reader, await owner.set("weights", expected, version=0), expected)
    for version in range(1, 4):
        expected["w"][version] += 1
        handle = await owner.set("weights", expected, version=version)
    assert await same(reader, handle, expected)
    assert network(reader).got_delta_bytes == 0


async def test_a_damaged_base_is_noticed_and_the_bytes_are_fetched(
    owner: StateTransport, reader: StateTransport, tmp_path: Path
) -> None:
    expected = weights()
    await same(reader, await owner.set("weights", expected, version=0), expected)
    (copy,) = (tmp_path / "far").glob("copy-*")
    with copy.open("r+b") as file:
        file.seek(4096 + 5000)
        file.write(b"damage")
    expected["w"][7] += 1
    handle = await owner.set("weights", expected, version=1)
    assert await same(reader, handle, expected)
    assert network(reader).got_delta_bytes > 0
    assert CHUNK_BYTES <= network(reader).got_bytes - handle.size_bytes < 2 * CHUNK_BYTES


# ----------------------------------------------------------------------- strangers


async def test_a_stranger_gets_nothing(hosts: Hosts, owner: StateTransport, bulk: Bulk) -> None:
    handle = await owner.set("weights", weights(), version=1)
    stranger_bulk = replace(bulk, keys=Keys.make())
    async with hosts.open("far", stranger_bulk) as stranger:
        into = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
        with pytest.raises(PeerRefused) as raised:
            await stranger.get(handle, into=into)
        assert not into["w"].any()
    error = raised.value
    assert (error.key, error.version, error.peer) == ("weights", 1, source_of(handle).address)
    assert (error.bucket, error.got_bytes, error.size_bytes) == (0, 0, handle.size_bytes)
    assert network(owner).sent_bytes == 0
    assert network(owner).refused >= 1


@pytest.mark.parametrize("sends", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, b"FXB1" * 500])
async def test_bytes_of_a_stranger_get_nothing(owner: StateTransport, bulk: Bulk, sends: bytes) -> None:
    handle = await owner.set("weights", weights(), version=1)
    host, port = source_of(handle).address.split(":")
    stranger, writer = await asyncio.open_connection(host, int(port))
    writer.write(sends)
    writer.write_eof()
    received = b""
    with contextlib.suppress(ConnectionResetError):
        received = await stranger.read()
    writer.close()
    assert len(received) <= 64  # a random number, or an alert of TLS
    assert network(owner).sent_bytes == 0


async def test_tls_without_the_certificate_of_the_run_gets_nothing(hosts: Hosts) -> None:
    async with hosts.open("near", Bulk("127.0.0.1", KEYS)) as owner:
        handle = await owner.set("weights", weights(), version=1)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        host, port = source_of(handle).address.split(":")

        def attempt() -> bytes:
            with socket.create_connection((host, int(port)), 5) as raw, context.wrap_socket(raw) as tls:
                tls.sendall(b"FXB1")
                return tls.recv(100)

        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(attempt)
        assert network(owner).sent_bytes == 0


async def test_plain_and_encrypted_ends_refuse_each_other(
    hosts: Hosts, owner: StateTransport, bulk: Bulk
) -> None:
    handle = await owner.set("weights", weights(), version=1)
    async with hosts.open("far", replace(bulk, encrypted=not bulk.encrypted)) as other:
        with pytest.raises(NoPath, match="path 'tcp': it is (encrypted|plain), and this process reads"):
            await other.get(handle)
        lying = replace(handle, sources=(replace(source_of(handle), encrypted=not bulk.encrypted),))
        with pytest.raises((PeerRefused, TransferTimeout)):
            await other.get(lying, timeout_s=2)
    assert network(owner).sent_bytes == 0


async def test_a_reader_without_keys_has_no_path(hosts: Hosts, owner: StateTransport) -> None:
    handle = await owner.set("weights", weights(), version=1)
    async with hosts.open("far", None) as other:
        with pytest.raises(NoPath, match="exchanges no states with other hosts"):
            await other.get(handle)


def test_a_client_from_outside_exchanges_no_states() -> None:
    with pytest.raises(InvalidKeys):
        Bulk("127.0.0.1", Keys.for_client(KEYS.server_public))
    with pytest.raises(ValueError, match="advertise"):
        Bulk("0.0.0.0", KEYS)


# ----------------------------------------------------------------------- faults


async def test_a_destination_that_does_not_fit_is_refused_before_anything_is_fetched(
    owner: StateTransport, reader: StateTransport
) -> None:
    handle = await owner.set("weights", weights(), version=1)
    into = {"w": torch.zeros(5), "b": torch.zeros(1)}
    with pytest.raises(StateMismatch, match="w: float32"):
        await reader.get(handle, into=into)
    assert network(owner).sent_bytes == 0


async def test_an_owner_that_has_left_is_reported_at_once(
    owner: StateTransport, reader: StateTransport
) -> None:
    handle = await owner.set("weights", weights(), version=1)
    await owner.close()
    with pytest.raises(FetchFailed, match="0 of 12582916 bytes came from 127.0.0.1:.*bucket 0 did not: conn"):
        await reader.get(handle)


@pytest.mark.parametrize("address", ["nowhere.invalid:1", "127.0.0.1:1"])
async def test_an_address_without_an_owner_is_reported(
    owner: StateTransport, reader: StateTransport, address: str
) -> None:
    handle = await owner.set("weights", weights(), version=1)
    with pytest.raises(FetchFailed, match=address):
        await reader.get(through(handle, address))


_OWNER = """
import asyncio, sys
from dataclasses import asdict
from pathlib import Path
import torch
from pydantic import TypeAdapter
from flexmarl.core import Keys
from flexmarl.transport import StateHandle
from flexmarl.transport.network.bulk import Bulk
from flexmarl.transport.state import StateTransport

async def main(directory, keys, encrypted):
    bulk = Bulk("127.0.0.1", Keys.load(Path(keys)), encrypted == "True")
    async with StateTransport(Path(directory), bulk=bulk) as transport:
        for version in range(2):
            handle = await transport.set("weights", {"w": torch.full((3 << 20,), float(version))}, version=version)
            sys.stdout.buffer.write(TypeAdapter(StateHandle).dump_json(handle) + b"\\n")
            sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("bucket", [0, 1, 5, 11])
async def test_an_owner_that_is_killed_leaves_the_old_version_whole(
    hosts: Hosts, reader: StateTransport, bulk: Bulk, tmp_path: Path, bucket: int
) -> None:
    directory = tmp_path / "near"
    directory.mkdir(mode=0o700)
    KEYS.save(tmp_path / "keys")
    with process(_OWNER, str(directory), str(tmp_path / "keys"), str(bulk.encrypted)) as child:
        assert child.stdout is not None
        lines = [await asyncio.to_thread(child.stdout.readline) for _ in range(2)]
        old, new = (
            replace(handle, sources=(replace(source_of(handle), host="near"),))
            for handle in map(TypeAdapter(StateHandle).validate_json, lines)
        )
        into = {"w": torch.full((ELEMENTS,), -1.0)}
        await reader.get(old, into=into)
        async with link_to(new) as (link, slow):

            def kill() -> None:
                os.kill(child.pid, signal.SIGKILL)
                link.reset()  # with what is under way

            link.at = (bucket * CHUNK_BYTES + 500, kill)
            with pytest.raises((FetchFailed, TransferTimeout)) as raised:
                await reader.get(slow, into=into, timeout_s=3)
        message = str(raised.value)
        assert link.address in message and "bucket" in message and "weights" in message
        assert into["w"].eq(0).all()
        with pytest.raises(FetchFailed, match="its owner has left"):
            await reader.get(new, into=into)
        assert into["w"].eq(0).all()
        assert (await reader.get(old))["w"].eq(0).all()  # the copy on this host


async def test_a_link_that_comes_back_within_the_deadline_costs_only_what_was_under_way(
    owner: StateTransport, reader: StateTransport
) -> None:
    expected = weights()
    handle = await owner.set("weights", expected, version=1)
    async with link_to(handle) as (link, slow):

        def back() -> None:
            link.reset()
            link.up.set()

        def cut() -> None:
            link.up.clear()
            link.at = None
            asyncio.get_running_loop().call_later(1.5, back)

        link.at = (SIZE // 2, cut)
        assert await same(reader, slow, expected)
    assert network(reader).reconnects >= 1
    # Two requests are under way on each of at most four connections.
    assert SIZE <= network(reader).got_bytes <= SIZE + 9 * CHUNK_BYTES
    assert network(owner).sent_bytes <= SIZE + 12 * CHUNK_BYTES


@pytest.mark.parametrize("cuts", [3, 7])
async def test_connections_that_end_are_made_again(
    owner: StateTransport, reader: StateTransport, cuts: int
) -> None:
    expected = weights()
    handle = await owner.set("weights", expected, version=1)
    async with link_to(handle) as (link, slow):

        def again() -> None:
            nonlocal cuts
            cuts -= 1
            link.reset()
            if cuts:
                link.at = (link.passed + SIZE // 9, again)

        link.at = (SIZE // 9, again)
        assert await same(reader, slow, expected)
    assert network(reader).reconnects >= 3 and cuts == 0


async def test_a_link_that_stays_cut_raises_after_the_deadline_with_what_is_known(
    owner: StateTransport, reader: StateTransport
) -> None:
    handle = await owner.set("weights", weights(), version=1)
    into = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    async with link_to(handle) as (link, slow):
        link.at = (SIZE // 2, link.up.clear)
        with pytest.raises(TransferTimeout) as raised:
            await reader.get(slow, into=into, timeout_s=1.5)
    error = raised.value
    assert (error.key, error.version, error.path, error.timeout_s) == ("weights", 1, "tcp", 1.5)
    assert f"bytes came from {link.address}, bucket" in error.progress
    assert not into["w"].any()
    assert await same(reader, handle, weights())  # nothing is left of the attempt that would be in the way


async def test_changed_bytes_are_noticed_by_the_digests_and_fetched_again(hosts: Hosts) -> None:
    bulk = Bulk("127.0.0.1", KEYS, encrypted=False)
    async with hosts.open("near", bulk) as owner, hosts.open("far", bulk) as reader:
        expected = weights()
        handle = await owner.set("weights", expected, version=1)

        def once(first: int, received: bytearray) -> None:
            if first > SIZE // 2:
                received[len(received) // 2] ^= 1
                link.change = None

        async with link_to(handle) as (link, slow):
            link.change = once
            assert await same(reader, slow, expected)
        assert network(reader).got_bytes == handle.size_bytes + CHUNK_BYTES
        handle = await owner.set("weights", weights(1), version=2)

        def always(first: int, received: bytearray) -> None:
            if len(received) > 5_000:
                received[2_500] ^= 1

        into = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        async with link_to(handle) as (link, slow):
            link.change = always
            with pytest.raises(CorruptState, match="state weights, version 2"):
                await reader.get(slow, into=into)
        assert not into["w"].any()


async def test_changed_bytes_never_get_through_encryption(hosts: Hosts) -> None:
    bulk = Bulk("127.0.0.1", KEYS)
    async with hosts.open("near", bulk) as owner, hosts.open("far", bulk) as reader:
        handle = await owner.set("weights", weights(), version=1)

        def once(first: int, received: bytearray) -> None:
            if first > SIZE // 2:
                received[len(received) // 2] ^= 1
                link.change = None

        async with link_to(handle) as (link, slow):
            link.change = once
            assert await same(reader, slow, weights())
        assert network(reader).reconnects >= 1


async def test_versions_set_during_a_fetch_never_mix_with_it(
    owner: StateTransport, reader: StateTransport
) -> None:
    handle = await owner.set("weights", weights(0), version=0)
    async with link_to(handle) as (link, slow):
        link.at = (SIZE // 2, link.up.clear)
        getting = asyncio.create_task(same(reader, slow, weights(0)))
        while link.up.is_set():
            await asyncio.sleep(0.01)
        for version in range(1, 4):
            newest = await owner.set("weights", weights(version), version=version)
        link.up.set()
        # Connections that have outlasted the cut have kept the version; one that was made again finds it gone.
        try:
            assert await getting
        except StaleHandle as stale:
            assert (stale.asked, stale.found) == (0, 2) or stale.found is None or stale.found > 0
    assert await same(reader, newest, weights(3))


async def test_a_transport_that_closes_ends_its_fetch(owner: StateTransport, reader: StateTransport) -> None:
    handle = await owner.set("weights", weights(), version=1)
    async with link_to(handle) as (link, slow):
        link.at = (SIZE // 2, link.up.clear)
        getting = asyncio.create_task(reader.get(slow))
        while link.up.is_set():
            await asyncio.sleep(0.01)
        await reader.close()
        with pytest.raises(TransportClosed):
            await getting


async def test_a_cancelled_fetch_makes_room_for_the_next_reader(
    hosts: Hosts, owner: StateTransport, reader: StateTransport, bulk: Bulk
) -> None:
    handle = await owner.set("weights", weights(), version=1)
    async with link_to(handle) as (link, slow), hosts.open("far", bulk) as second:
        link.at = (SIZE // 2, link.up.clear)
        getting = asyncio.create_task(reader.get(slow))
        while link.up.is_set():
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(same(second, handle, weights()))
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
        assert await waiting


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
