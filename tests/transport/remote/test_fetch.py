"""Fetches with cut links, killed owners, changed bytes and versions that change."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from flexmarl.transport.errors import (
    CorruptState,
    FetchFailed,
    StaleHandle,
    StateMismatch,
    TransferTimeout,
    TransportClosed,
)
from flexmarl.transport.handle import StateHandle
from flexmarl.transport.host_memory.block import CHUNK_BYTES
from flexmarl.transport.remote import fetch
from flexmarl.transport.remote.bulk import Bulk
from flexmarl.transport.state import StateTransport

from ...patience import PATIENCE_S
from ...processes import process
from .hosts import ELEMENTS, KEYS, SIZE, Hosts, link_to, network, same, through, weights


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
    with pytest.raises(FetchFailed, match="0 of 12582916 bytes came from 127.0.0.1:.*range 0 did not: conn"):
        await reader.get(handle)


@pytest.mark.parametrize("address", ["nowhere.invalid:1", "127.0.0.1:1"])
async def test_an_address_without_an_owner_is_reported(
    owner: StateTransport, reader: StateTransport, address: str
) -> None:
    handle = await owner.set("weights", weights(), version=1)
    with pytest.raises(FetchFailed, match=address):
        await reader.get(through(handle, address))


# Arrays of NumPy: such a process starts in a third of the time that torch takes.
_OWNER = """
import asyncio, sys
from dataclasses import asdict
from pathlib import Path
import numpy as np
from pydantic import TypeAdapter
from flexmarl.core import Keys
from flexmarl.transport import StateHandle
from flexmarl.transport.remote.bulk import Bulk
from flexmarl.transport.state import StateTransport

async def main(directory, keys, encrypted):
    bulk = Bulk("127.0.0.1", Keys.load(Path(keys)), encrypted == "True")
    async with StateTransport(Path(directory), bulk=bulk) as transport:
        for version in range(2):
            state = {"w": np.full(3 << 20, version, np.float32)}
            handle = await transport.set("weights", state, version=version)
            sys.stdout.buffer.write(TypeAdapter(StateHandle).dump_json(handle) + b"\\n")
            sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [0, 1, 5, 11])
async def test_an_owner_that_is_killed_leaves_the_old_version_whole(
    hosts: Hosts,
    reader: StateTransport,
    bulk: Bulk,
    tmp_path: Path,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A connection that is made while the link is cut may stay, and is silent.
    monkeypatch.setattr(fetch, "_SILENCE_S", 1.0)
    directory = tmp_path / "near"
    directory.mkdir(mode=0o700)
    KEYS.save(tmp_path / "keys")
    with process(_OWNER, str(directory), str(tmp_path / "keys"), str(bulk.encrypted)) as child:
        assert child.stdout is not None
        lines = [await asyncio.to_thread(child.stdout.readline) for _ in range(2)]
        old, new = map(TypeAdapter(StateHandle).validate_json, lines)
        into = {"w": torch.full((ELEMENTS,), -1.0)}
        await reader.get(old, into=into)
        async with link_to(new) as (link, slow):

            def kill() -> None:
                os.kill(child.pid, signal.SIGKILL)
                link.cut()  # the bytes under way are lost

            link.at = (number * CHUNK_BYTES + 500, kill)
            with pytest.raises((FetchFailed, TransferTimeout)) as raised:
                await reader.get(slow, into=into, timeout_s=20)
        message = str(raised.value)
        assert link.address in message and "range" in message and "weights" in message
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


async def test_connections_that_are_silent_are_made_again(
    owner: StateTransport, reader: StateTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_SILENCE_S", 0.2)
    expected = weights()
    handle = await owner.set("weights", expected, version=1)
    async with link_to(handle) as (link, slow):
        link.at = (SIZE // 2, link.up.clear)
        getting = asyncio.create_task(same(reader, slow, expected))
        async with asyncio.timeout(PATIENCE_S):
            while not network(reader).reconnects:
                await asyncio.sleep(0.01)
        monkeypatch.setattr(fetch, "_SILENCE_S", PATIENCE_S)
        link.up.set()
        assert await getting


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
    assert f"bytes came from {link.address}, range" in error.progress
    assert not into["w"].any()
    assert await same(reader, handle, weights())  # nothing is left of the attempt that would be in the way


async def test_changed_bytes_are_noticed_by_the_digests_and_fetched_again(hosts: Hosts) -> None:
    bulk = Bulk("127.0.0.1", KEYS, encrypted=False)
    async with hosts.open("near", bulk) as owner, hosts.open("far", bulk) as reader:
        expected = weights()
        handle = await owner.set("weights", expected, version=1)

        def once(first: int, received: bytearray) -> None:
            if first > SIZE // 2 and len(received) > 50_000:  # a range's bytes, no message's
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
            if first > SIZE // 2 and len(received) > 50_000:  # a range's bytes, no message's
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
            assert (stale.version, stale.newest) == (0, 2) or stale.newest is None or stale.newest > 0
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
