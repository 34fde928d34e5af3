"""States of other hosts: once per host, and as changes where these are few."""

import asyncio
from pathlib import Path

import pytest
import torch

from flexmarl.transport.block import CHUNK_BYTES
from flexmarl.transport.network.bulk import Bulk
from flexmarl.transport.state import StateTransport

from .hosts import (
    Hosts,
    network,
    same,
    weights,
)

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
