"""Host memory of a transport: reserved, lent to other processes, used in place, and freed after a kill."""

import asyncio
import gc
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from flexmarl.transport.errors import ArenaSpace, CorruptState, MemoryInUse, StaleHandle
from flexmarl.transport.handle import ShmSource, StateHandle
from flexmarl.transport.host_memory.block import Block
from flexmarl.transport.state import StateTransport

from ...patience import PATIENCE_S


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


async def mapped_by(reader: StateTransport, handle: StateHandle, **part: Any) -> dict[str, Any]:
    """Shared memory stays after the context."""
    async with reader.mapped(handle, **part) as tensors:
        return tensors


def block_of(handle: StateHandle) -> str:
    source = handle.source("shm")
    assert isinstance(source, ShmSource)
    return source.block


# ----------------------------------------------------------------------- in place


async def test_mapped_tensors_stay_while_newer_versions_are_set(
    tmp_path: Path, transport: StateTransport, reader: StateTransport
) -> None:
    handle = await transport.set("key", {"a": torch.ones(1000), "b": torch.zeros(3)}, version=0)
    mapped = await mapped_by(reader, handle)
    for version in range(1, 6):
        newest = await transport.set(
            "key", {"a": torch.full((1000,), float(version)), "b": torch.ones(3)}, version=version
        )
        assert mapped["a"].eq(1).all() and not mapped["b"].any()
    assert (await reader.get(newest))["a"].eq(5).all()
    with pytest.raises(StaleHandle):
        await reader.get(handle)
    await transport.close()
    assert mapped["a"].eq(1).all(), "also after its owner has left"


async def test_the_memory_of_mapped_tensors_is_used_again_after_them(
    tmp_path: Path, transport: StateTransport, reader: StateTransport
) -> None:
    state = {"a": torch.ones(1000)}
    first = await transport.set("key", state, version=0)
    await transport.set("key", state, version=1)
    mapped = await mapped_by(reader, first)
    part = mapped["a"][3:5]
    del mapped
    gc.collect()
    assert block_of(await transport.set("key", state, version=2)) != block_of(first), "a view is in use"
    assert part.eq(1).all()
    two = files(tmp_path)
    del part
    gc.collect()
    for version in (3, 4):
        await transport.set("key", state, version=version)
    assert files(tmp_path) == two and len(two) == 2


async def test_writing_to_mapped_tensors_changes_no_state(
    transport: StateTransport, reader: StateTransport
) -> None:
    handle = await transport.set("key", {"a": torch.ones(1000)}, version=0)
    (await mapped_by(reader, handle))["a"].zero_()
    assert (await reader.get(handle))["a"].eq(1).all()


async def test_parts_are_mapped_too(transport: StateTransport, reader: StateTransport) -> None:
    state = {"a": torch.arange(10.0).view(5, 2), "b": torch.ones(2)}
    handle = await transport.set("key", state, version=0)
    part = await mapped_by(reader, handle, names=["a"], rows={"a": (1, 3)})
    assert part.keys() == {"a"} and part["a"].tolist() == [[2, 3], [4, 5]]


async def test_mapped_tensors_are_compared_with_their_digests_if_asked(
    tmp_path: Path, transport: StateTransport, reader: StateTransport
) -> None:
    handle = await transport.set("key", {"a": torch.ones(600_000), "b": torch.ones(600_000)}, version=0)
    for part in ({}, {"names": ["a"]}, {"names": ["b"]}):
        await mapped_by(reader, handle, checked=True, **part)
    Block.open(tmp_path, block_of(handle)).payload[handle.tensors[1].offset + (1 << 21)] ^= 1
    await mapped_by(reader, handle, names=["a"], checked=True)
    with pytest.raises(CorruptState):
        await mapped_by(reader, handle, names=["b"], checked=True)
    assert (await mapped_by(reader, handle)).keys() == {"a", "b"}, "not asked"


# ----------------------------------------------------------------------- reserved


async def test_reserved_memory_is_taken_and_comes_back(tmp_path: Path, transport: StateTransport) -> None:
    await transport.reserve(4 << 20, states=2)
    reserved = files(tmp_path)
    assert len(reserved) == 2
    counts = transport.statistics()
    assert counts.spare_bytes == counts.arena_bytes > 8 << 20
    state = {"w": torch.ones(1 << 20)}
    for key in ("a", "b"):
        for version in range(3):
            assert block_of(await transport.set(key, state, version=version)) in reserved
        assert transport.statistics().spare_bytes == 0
        await transport.drop(key)
    assert files(tmp_path) == reserved
    assert transport.statistics().spare_bytes == counts.spare_bytes


async def test_a_much_smaller_state_takes_no_reserved_memory(
    tmp_path: Path, transport: StateTransport
) -> None:
    await transport.reserve(8 << 20, states=1)
    reserved = files(tmp_path)
    assert block_of(await transport.set("key", {"w": torch.ones(10)}, version=0)) not in reserved


async def test_reserving_more_than_there_is_names_the_numbers(
    tmp_path: Path, transport: StateTransport
) -> None:
    with pytest.raises(ArenaSpace, match="bytes are free"):
        await transport.reserve(1 << 50)
    assert files(tmp_path) == set()


# ----------------------------------------------------------------------- lent


async def test_another_process_sets_a_state_in_lent_memory(
    tmp_path: Path, transport: StateTransport, reader: StateTransport
) -> None:
    memory, other = [await transport.lend("key", 1 << 20) for _ in range(2)]
    state = {"w": torch.ones(1000)}
    async with StateTransport(tmp_path) as worker:
        first = await worker.set("key", state, version=1, lent=memory)
        assert (await reader.get(first))["w"].eq(1).all()
        second = await worker.set("key", {"w": torch.zeros(1000)}, version=2, lent=memory)
    # The worker has left; the memory is not its own.
    assert not (await reader.get(second))["w"].any()
    with pytest.raises(StaleHandle):
        await reader.get(first)
    third = await transport.set("key", state, version=3, lent=memory)
    assert (await reader.get(third))["w"].eq(1).all()
    transport.take_back([memory, other])
    transport.take_back([memory, other])
    with pytest.raises(StaleHandle):
        await reader.get(third)
    assert files(tmp_path) == set()


async def test_lent_memory_that_is_too_small_or_in_use_is_refused_by_name(
    tmp_path: Path, transport: StateTransport, reader: StateTransport
) -> None:
    memory = await transport.lend("key", 4096)
    with pytest.raises(ArenaSpace, match="state key: an arena of 8192 bytes"):
        await reader.set("key", {"w": torch.ones(2048)}, version=1, lent=memory)
    handle = await reader.set("key", {"w": torch.ones(10)}, version=1, lent=memory)
    mapped = await mapped_by(transport, handle)
    with pytest.raises(MemoryInUse, match=f"state key, version 2: the memory {memory.block} is in use"):
        await reader.set("key", {"w": torch.zeros(10)}, version=2, lent=memory)
    assert mapped["w"].eq(1).all()
    del mapped
    gc.collect()
    await reader.set("key", {"w": torch.zeros(10)}, version=2, lent=memory)
    with pytest.raises(ValueError, match="lent memory is offered by 'shm'"):
        await reader.set("key", {"w": torch.zeros(10)}, version=3, lent=memory, offer=["tcp"])


# ----------------------------------------------------------------------- killed

WRITER = """
import asyncio, os, signal, sys, threading
from pathlib import Path
import numpy as np
from flexmarl.transport.handle import LentMemory
from flexmarl.transport import payload
from flexmarl.transport.select import this_node
from flexmarl.transport.state import StateTransport

parts = int(sys.argv[2])
process, block, size = sys.argv[3:6]
memory = LentMemory(process, block, int(size), this_node(Path(sys.argv[1]))) if block else None

async def main():
    async with StateTransport(Path(sys.argv[1])) as transport:
        state = {"w": np.ones(2 << 20, np.float32)}
        await transport.set("key", state, version=1, lent=memory)
        copied, lock, begin = [], threading.Lock(), payload.Copying.begin
        def killing(self, part):
            with lock:
                if len(copied) == parts:
                    os.kill(os.getpid(), signal.SIGKILL)
                copied.append(part)
            return begin(self, part)
        payload.Copying.begin = killing
        state["w"].fill(2)
        await transport.set("key", state, version=2, lent=memory)

asyncio.run(main())
"""


@asynccontextmanager
async def killed_writer(directory: Path, parts: int, *memory: str) -> AsyncIterator[None]:
    """A process that sets version 1, and is killed after ``parts`` parts of version 2."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WRITER, str(directory), str(parts), *(memory or ("", "", "0")),
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == -signal.SIGKILL
        yield
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_memory_of_a_killed_process_is_freed_by_the_next_one_that_opens(
    tmp_path: Path, transport: StateTransport
) -> None:
    mine = block_of(await transport.set("mine", {"w": torch.ones(3)}, version=0))
    async with killed_writer(tmp_path, 3):
        assert len(files(tmp_path)) == 3
        async with StateTransport(tmp_path):
            assert files(tmp_path) == {mine}


@pytest.mark.parametrize("parts", [0, 3, 7])
async def test_a_writer_killed_at_any_part_leaves_lent_memory_unreadable_and_usable(
    tmp_path: Path, transport: StateTransport, reader: StateTransport, parts: int
) -> None:
    memory = await transport.lend("key", 8 << 20)
    async with killed_writer(tmp_path, parts, memory.process, memory.block, str(8 << 20)):
        block = Block.open(tmp_path, memory.block)
        assert (block.generation, block.version) == (3, 2)
        assert Block.open_in_use(tmp_path, memory.block) is not None, "the dead writer's lock is gone"
        handle = await transport.set("key", {"w": torch.zeros(2 << 20)}, version=3, lent=memory)
        assert not (await reader.get(handle))["w"].any()
