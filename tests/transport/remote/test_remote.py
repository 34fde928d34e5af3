"""States of other hosts: once per host, and as changes where these are few."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash

from flexmarl.transport.host_memory.block import CHUNK_BYTES, Block
from flexmarl.transport.payload import Copying, Part
from flexmarl.transport.remote import deltas
from flexmarl.transport.remote.bulk import Bulk
from flexmarl.transport.remote.deltas import Deltas
from flexmarl.transport.remote.remote import NodeCopies
from flexmarl.transport.remote.server import BulkServer
from flexmarl.transport.select import Place
from flexmarl.transport.state import StateTransport
from flexmarl.transport.statistics import NetworkStatistics

from ...patience import PATIENCE_S
from .hosts import SIZE, Hosts, network, same, weights

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


async def test_only_the_process_that_has_received_a_copy_does_not_check_it_again(
    hosts: Hosts, owner: StateTransport, reader: StateTransport, bulk: Bulk, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[int] = []
    digest = xxhash.xxh3_64_intdigest

    def counted(data: memoryview | bytes) -> int:
        if (size := memoryview(data).nbytes) == CHUNK_BYTES:
            chunks.append(size)
        return digest(data)

    expected = weights()
    handle = await owner.set("weights", expected, version=1)
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", counted)
    assert await same(reader, handle, expected)
    assert sum(chunks) == SIZE, "while it arrived"
    async with hosts.open("far", bulk) as second:
        assert await same(second, handle, expected)
        async with second.mapped(handle, checked=True):
            assert sum(chunks) == 3 * SIZE, "another process checks what it reads"


async def test_nobody_writes_a_copy_that_is_read_without_a_check(
    owner: StateTransport, reader: StateTransport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On machines that reorder stores, only digests would show a mix of two versions."""
    intruders: list[bool] = []
    begin = Copying.begin

    def meanwhile(copying: Copying, part: Part) -> Callable[[], None]:
        (file,) = (tmp_path / "far").glob("copy-*")
        block = Block.open(tmp_path / "far", file.name, writable=True)
        intruders.append(block.begin(9, 4))
        block.close()
        return begin(copying, part)

    expected = weights()
    handle = await owner.set("weights", expected, version=1)
    monkeypatch.setattr(Copying, "begin", meanwhile)
    assert await same(reader, handle, expected)
    assert intruders and not any(intruders)
    monkeypatch.undo()
    (file,) = (tmp_path / "far").glob("copy-*")
    assert not Block.open(tmp_path / "far", file.name, writable=True).in_use, "it is let go after the read"


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


async def test_those_that_wait_learn_that_the_lock_is_free(tmp_path: Path) -> None:
    first, second = (NodeCopies(tmp_path, Place("node", process)) for process in "ab")
    lock = first.try_lock("weights")
    assert lock is not None
    assert second.is_locked("weights") and first.is_locked("weights")
    assert not second.is_locked("other")
    assert second.try_lock("weights") is None
    os.close(lock)
    assert not second.is_locked("weights")
    first.close()
    second.close()


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


async def test_few_changed_values_of_lent_memory_arrive_as_a_delta(
    owner: StateTransport, reader: StateTransport, tmp_path: Path
) -> None:
    lent = [await owner.lend("weights", SIZE + 4096) for _ in range(2)]
    expected = weights()
    async with StateTransport(tmp_path / "near") as writer:
        for version in range(4):
            handle = await writer.set("weights", expected, version=version, lent=lent[version % 2])
            before = network(reader).got_bytes
            assert await same(reader, handle, expected)
            got_bytes = network(reader).got_bytes - before
            assert got_bytes == handle.size_bytes if version == 0 else got_bytes < 0.05 * handle.size_bytes
            expected["w"][version::1000] += 1


@pytest.mark.parametrize("way", ["take_back", "store_away", "one_is_taken_back"])
async def test_lent_memory_whose_changes_were_served_is_freed_when_it_is_lent_no_longer(
    owner: StateTransport, reader: StateTransport, tmp_path: Path, way: str
) -> None:
    def removed_but_mapped() -> list[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line for line in lines if f"{tmp_path}/near/" in line and line.endswith("(deleted)")]

    lent = [await owner.lend("weights", SIZE + 4096) for _ in range(2)]
    expected = weights()
    async with StateTransport(tmp_path / "near") as writer:
        for version in range(2):
            handle = await writer.set("weights", expected, version=version, lent=lent[version])
            assert await same(reader, handle, expected)
            expected["w"][version::1000] += 1
    assert network(owner).sent_delta_bytes, "else there are no changes that keep the memory"
    match way:
        case "take_back":
            owner.take_back(lent)
        case "one_is_taken_back":
            owner.take_back(lent[:1])
        case "store_away":
            await owner.store_away(lent, tmp_path / "weights.state")
    async with asyncio.timeout(PATIENCE_S):
        while removed_but_mapped():  # the thread of the last connection may be about to end
            await asyncio.sleep(0.01)


def test_changes_between_blocks_of_which_one_was_freed_are_not_kept(tmp_path: Path, bulk: Bulk) -> None:
    old, new = (Block.create(tmp_path, f"{name}.arena", CHUNK_BYTES) for name in ("old", "new"))
    server = BulkServer(bulk, NetworkStatistics())
    try:
        kept = Deltas(old, new, CHUNK_BYTES)
        assert server._reuse(kept) is kept is server._reuse(Deltas(old, new, CHUNK_BYTES))
        server.forget(old.name)
        assert server._reuse(late := Deltas(old, new, CHUNK_BYTES)) is late, "forgotten"
        server.forget(new.name)
        for block in (old, new):
            late = Deltas(old, new, CHUNK_BYTES)
            block.revoke()
            server.forget(block.name)
            server._reuse(late)
            assert server._reuse(again := Deltas(old, new, CHUNK_BYTES)) is again is not late
            server.forget(block.name)
    finally:
        server.close()
        for block in (old, new):
            block.unlink()
            block.close()


async def test_a_set_in_lent_memory_does_not_wait_for_a_reader_that_has_its_old_version(
    owner: StateTransport, reader: StateTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = [await owner.lend("weights", SIZE + 4096) for _ in range(2)]
    expected = weights()
    begun, may_continue = threading.Event(), threading.Event()
    encode = deltas.encode

    def late(old: memoryview, new: memoryview) -> bytes | None:
        begun.set()
        assert may_continue.wait(PATIENCE_S)
        return encode(old, new)

    async with StateTransport(tmp_path / "near") as writer:
        old = await writer.set("weights", expected, version=0, lent=first)
        assert await same(reader, old, expected)
        expected["w"][7] += 1
        handle = await writer.set("weights", expected, version=1, lent=second)
        monkeypatch.setattr(deltas, "encode", late)
        reading = asyncio.create_task(same(reader, handle, expected))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        await writer.set("weights", weights(1), version=2, lent=first)
        may_continue.set()
        assert await reading
    assert network(reader).got_bytes == 2 * handle.size_bytes, "the old version is gone: no changes from it"


async def test_set_compares_what_it_writes_with_the_version_that_a_reader_has(
    owner: StateTransport, reader: StateTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    encode = deltas.encode

    def counted(old: memoryview, new: memoryview) -> bytes | None:
        compared.append(len(new))
        return encode(old, new)

    monkeypatch.setattr(deltas, "encode", counted)
    expected = weights()
    await owner.set("weights", expected, version=0)
    handle = await owner.set("weights", expected, version=1)
    assert not compared  # no reader has fetched a version
    await same(reader, handle, expected)
    expected["w"][3] += 1
    handle = await owner.set("weights", expected, version=2)
    assert len(compared) == -(-handle.size_bytes // CHUNK_BYTES)
    assert await same(reader, handle, expected)
    assert len(compared) == -(-handle.size_bytes // CHUNK_BYTES)
    assert network(reader).got_delta_bytes > 0


async def test_changes_of_a_set_that_has_failed_are_not_sent(
    owner: StateTransport, reader: StateTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights()
    await same(reader, await owner.set("weights", expected, version=0), expected)
    encode = deltas.encode
    compared: list[int] = []

    def fails_late(old: memoryview, new: memoryview) -> bytes | None:
        compared.append(len(new))
        if len(compared) > 8:
            raise MemoryError("no room")
        return encode(old, new)

    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="no room"):
        patch.setattr(deltas, "encode", fails_late)
        await owner.set("weights", {name: tensor + 1 for name, tensor in expected.items()}, version=1)
    expected["w"][5] += 1
    handle = await owner.set("weights", expected, version=1)
    before = network(reader).got_bytes
    assert await same(reader, handle, expected)
    assert network(reader).got_bytes - before < CHUNK_BYTES  # no chunk came twice


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
