"""Memory that one transport lends and another fills: it outlives the writer, and goes to a disk and back."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexmarl.transport.device_memory import near_cores
from flexmarl.transport.errors import ArenaSpace, ForeignHandle, StaleHandle, TransportClosed
from flexmarl.transport.host_memory import block, lent_files
from flexmarl.transport.host_memory.block import Block
from flexmarl.transport.state import StateTransport, payload_bytes


def state(number: int) -> dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    return {"first": np.full(5, number), "second": np.arange(number, number + 300)}


SIZE = payload_bytes(state(0))


async def test_a_state_outlives_its_writer(private: Path) -> None:
    async with StateTransport(private) as owner:
        first, second = [await owner.lend("policy", SIZE) for _ in range(2)]
        async with StateTransport(private) as writer:
            old = await writer.set("policy", state(1), version=1, lent=first)
            new = await writer.set("policy", state(2), version=2, lent=second)
        async with StateTransport(private) as reader:
            for handle, number in ((old, 1), (new, 2)):
                found = await reader.get(handle, into=state(0))
                assert all(np.array_equal(found[name], state(number)[name]) for name in found)
            owner.take_back([first, second])
        async with StateTransport(private) as late:
            with pytest.raises(StaleHandle):
                await late.get(new, into=state(0))
    assert not list(private.iterdir())


async def test_a_piece_that_is_set_again_makes_its_handles_stale_and_leaves_the_other_whole(
    private: Path,
) -> None:
    async with StateTransport(private) as owner, StateTransport(private) as writer:
        first, second = [await owner.lend("policy", SIZE) for _ in range(2)]
        old = await writer.set("policy", state(1), version=1, lent=first)
        other = await writer.set("policy", state(2), version=2, lent=second)
        await writer.set("policy", state(3), version=3, lent=first)
        with pytest.raises(StaleHandle):
            await owner.get(old, into=state(0))
        assert (await owner.get(other, into=state(0)))["first"][0] == 2


async def test_memory_that_is_too_small_or_another_is_refused(private: Path) -> None:
    async with StateTransport(private) as owner:
        first = await owner.lend("policy", 8)
        large = {"large": np.zeros(first.size_bytes // 8 + 1, np.int64)}
        with pytest.raises(ArenaSpace, match=f"{first.size_bytes} bytes are free"):
            await owner.set("policy", large, version=1, lent=first)
        with pytest.raises(ForeignHandle):
            await owner.set("policy", state(1), version=1, lent=replace(first, size_bytes=2**20))


async def test_it_goes_to_a_disk_and_comes_back(private: Path, tmp_path: Path) -> None:
    file = tmp_path / "policy.state"
    async with StateTransport(private) as owner, StateTransport(private) as other:
        first, second = [await owner.lend("policy", SIZE) for _ in range(2)]
        old = await other.set("policy", state(1), version=1, lent=first)
        new = await other.set("policy", state(2), version=2, lent=second)
        await owner.store_away([first, second], file)
        assert not list(private.iterdir()) and file.stat().st_mode & 0o777 == 0o600
        back = await owner.bring_back([first, second], file)
        assert not file.exists() and not {one.block for one in back} & {first.block, second.block}
        moved = ((old.moved(first, back[0]), 1), (new.moved(second, back[1]), 2))
        for handle, number in moved:
            found = await other.get(handle, into=state(0))
            assert all(np.array_equal(found[name], state(number)[name]) for name in found)


async def test_without_room_in_memory_it_stays_on_the_disk(
    private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "policy.state"
    async with StateTransport(private) as owner:
        first = await owner.lend("policy", SIZE)
        handle = await owner.set("policy", state(1), version=1, lent=first)
        await owner.store_away([first], file)
        with monkeypatch.context() as full:
            full.setattr(block, "free_bytes", lambda _: 100)
            with pytest.raises(ArenaSpace, match="state other: .* 100 bytes are free"):
                await owner.lend("other", SIZE)
            with pytest.raises(ArenaSpace, match="state policy: .* 100 bytes are free"):
                await owner.bring_back([first], file)
        assert not list(private.iterdir())
        (back,) = await owner.bring_back([first], file)
        found = await owner.get(handle.moved(first, back), into=state(0))
        assert found["first"][0] == 1


async def test_a_disk_that_can_not_be_written_leaves_the_memory_as_it_was(
    private: Path, tmp_path: Path
) -> None:
    async with StateTransport(private) as owner:
        lent = await owner.lend("policy", SIZE)
        handle = await owner.set("policy", state(1), version=1, lent=lent)
        with pytest.raises(FileNotFoundError):
            await owner.store_away([lent], tmp_path / "missing" / "policy.state")
        assert (await owner.get(handle, into=state(0)))["first"][0] == 1


def test_a_write_that_is_stopped_leaves_no_file(private: Path, tmp_path: Path) -> None:
    memory = Block.create(private, "some.arena", SIZE)
    stop = threading.Event()
    stop.set()
    with pytest.raises(TransportClosed):
        lent_files.write([memory], tmp_path / "file", stop)
    assert not list(tmp_path.glob("file"))
    memory.unlink()


class Sides:
    """A host whose first core is on side 0, and all others are on side 1. ``reserved``: the cores of the thread that
    has reserved the bytes of each file. ``others``: those of other threads meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all = os.sched_getaffinity(0)
        first = min(self.all)
        self.cores = {0: {first}, 1: self.all - {first} or {first}}
        self.reserved: list[set[int]] = []
        self.others: list[set[int]] = []
        fallocate, this = os.posix_fallocate, threading.get_native_id()

        def reserve(descriptor: int, offset: int, size_bytes: int) -> None:
            self.reserved.append(os.sched_getaffinity(0))
            if threading.get_native_id() != this:
                self.others.append(os.sched_getaffinity(this))
            fallocate(descriptor, offset, size_bytes)
            blocks = os.fstat(descriptor).st_blocks * 512
            assert blocks >= size_bytes, "the pages are there, on a side, before any thread writes to them"

        monkeypatch.setattr(os, "posix_fallocate", reserve)
        monkeypatch.setattr(near_cores, "_cores_by_side", lambda _: self.cores)


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:
    before = os.sched_getaffinity(0)
    yield Sides(monkeypatch)
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("size_bytes", [8, 24 << 20])  # in the loop, and in a thread with others that help it
async def test_memory_is_reserved_by_a_thread_on_its_side(
    private: Path, tmp_path: Path, sides: Sides, size_bytes: int
) -> None:
    async with StateTransport(private) as owner:
        lent = [await owner.lend("policy", size_bytes, side) for side in (1, 0, None)]
        assert [piece.side for piece in lent] == [1, 0, None]
        assert sides.reserved == [sides.cores[1], sides.cores[0], sides.all]
        sides.reserved.clear()
        await owner.store_away(lent, tmp_path / "policy.state")
        back = await owner.bring_back(lent, tmp_path / "policy.state")
        assert [piece.side for piece in back] == [1, 0, None]
        assert sides.reserved == [sides.cores[1], sides.cores[0], sides.all]
        assert all(cores == sides.all for cores in sides.others), "no other thread is kept on a side"
        helping = [thread for thread in threading.enumerate() if thread.name.startswith("flexmarl-copy")]
        assert all(os.sched_getaffinity(thread.native_id or 0) == sides.all for thread in helping)
