"""Blocks of shared memory: torn, corrupt and foreign states, and the files and memory of arenas."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexmarl.transport.errors import ArenaSpace, CorruptState, ForeignHandle, StaleHandle
from flexmarl.transport.handle import ShmSource, StateHandle
from flexmarl.transport.host_memory.block import Block
from flexmarl.transport.select import this_node
from flexmarl.transport.state import StateTransport


def files(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def source_of(handle: StateHandle) -> ShmSource:
    source = handle.source("shm")
    assert isinstance(source, ShmSource)
    return source


def mappings(directory: Path) -> int:
    """Blocks of ``directory`` that this process has mapped."""
    return Path("/proc/self/maps").read_text().count(f"{directory}/")


# ----------------------------------------------------------------------- torn, corrupt and foreign


class Intruding(torch.Tensor):
    """A destination that lets the writer begin the next version just before it is filled."""

    begin: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.data_ptr:
            cls.begin()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


async def test_a_block_overwritten_while_it_is_copied_is_noticed(
    tmp_path: Path, transport: StateTransport, reader: StateTransport
) -> None:
    handle = await transport.set("key", {"w": torch.ones(8)}, version=4)
    writer = Block.open(tmp_path, source_of(handle).block, writable=True)
    Intruding.begin = lambda: writer.begin(6, 32)
    into = {"w": torch.zeros(8).as_subclass(Intruding)}
    with pytest.raises(StaleHandle) as raised:
        await reader.get(handle, into=into)
    assert (raised.value.version, raised.value.newest) == (4, 6)


@pytest.mark.parametrize("elements", [100, 1 << 20])
@pytest.mark.parametrize("where", [0, -1])
async def test_a_changed_byte_is_corruption(
    tmp_path: Path, transport: StateTransport, reader: StateTransport, elements: int, where: int
) -> None:
    handle = await transport.set("key", {"a": torch.ones(3), "b": torch.ones(elements)}, version=1)
    payload = Block.open(tmp_path, source_of(handle).block).payload
    byte = where % handle.size_bytes
    payload[byte] ^= 1
    with pytest.raises(CorruptState, match="state key, version 1: digest"):
        await reader.get(handle)
    payload[byte] ^= 1
    assert (await reader.get(handle))["a"].tolist() == [1, 1, 1]


async def test_a_handle_can_not_lead_out_of_the_directory(tmp_path: Path, transport: StateTransport) -> None:
    inner = tmp_path / "inner"
    inner.mkdir(mode=0o700)
    handle = await transport.set("key", {"w": torch.ones(3)}, version=1)
    async with StateTransport(inner) as confined:
        source = replace(source_of(handle), node=this_node(inner))
        for block in (f"../{source.block}", str(tmp_path / source.block), "/etc/hostname"):
            with pytest.raises(ForeignHandle):
                await confined.get(replace(handle, sources=(replace(source, block=block),)))


async def test_a_handle_can_not_read_beyond_its_block(
    transport: StateTransport, reader: StateTransport
) -> None:
    handle = await transport.set("key", {"w": torch.ones(3)}, version=1)
    with pytest.raises(ForeignHandle, match="8192 bytes can't be in a block of 4096"):
        await reader.get(replace(handle, size_bytes=8192))


# ----------------------------------------------------------------------- files and memory


async def test_closing_unmaps_and_removes_everything(tmp_path: Path) -> None:
    async with StateTransport(tmp_path) as transport, StateTransport(tmp_path) as reader:
        for key in ("a", "b"):
            await reader.get(await transport.set(key, {"w": torch.ones(1 << 20)}, version=0))
        assert len(files(tmp_path)) == 2
        assert mappings(tmp_path) == 4
    assert files(tmp_path) == []
    assert mappings(tmp_path) == 0


async def test_memory_of_outgrown_blocks_is_given_back(tmp_path: Path) -> None:
    async with StateTransport(tmp_path) as transport, StateTransport(tmp_path) as reader:
        for version in range(5):
            handle = await transport.set("key", {"w": torch.ones(1000 * 4**version)}, version=version)
            await reader.get(handle)
        assert len(files(tmp_path)) == 2, "of the two newest versions"
        assert mappings(tmp_path) == 4


async def test_blocks_may_come_and_go_while_another_is_mapped(
    tmp_path: Path, transport: StateTransport, reader: StateTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies run in several threads: here another one adds a block at the worst moment."""
    known = [await transport.set(key, {"w": torch.ones(2)}, version=0) for key in "abc"]
    for handle in known[:2]:
        await reader.get(handle)
    mapped, exists = reader._host._blocks._mapped, Path.exists

    def meanwhile(path: Path) -> bool:
        mapped[f"{len(mapped)}.arena"] = mapped[source_of(known[0]).block]
        return exists(path)

    monkeypatch.setattr(Path, "exists", meanwhile)
    assert (await reader.get(known[2]))["w"].tolist() == [1, 1]


async def test_later_sets_allocate_no_memory(tmp_path: Path, transport: StateTransport) -> None:
    state = {"w": torch.ones(1000), "b": torch.ones(3)}
    first = [await transport.set("key", state, version=version) for version in (0, 1)]
    blocks = {source_of(handle).block for handle in first}
    inodes = {name: (tmp_path / name).stat().st_ino for name in blocks}
    for version in range(2, 6):
        handle = await transport.set("key", state, version=version)
        assert source_of(handle).block == source_of(first[version % 2]).block
        assert handle.tensors is first[0].tensors
    assert set(files(tmp_path)) == blocks
    assert {name: (tmp_path / name).stat().st_ino for name in blocks} == inodes


async def test_a_state_larger_than_memory_is_refused_with_numbers(
    tmp_path: Path, transport: StateTransport
) -> None:
    enormous = torch.zeros(1).expand(1 << 45)
    with pytest.raises(ArenaSpace, match=f"does not fit into {tmp_path}: [0-9]+ bytes are free") as raised:
        await transport.set("key", {"w": enormous}, version=0)
    assert raised.value.needed_bytes > (4 << 45) > raised.value.free_bytes
    assert files(tmp_path) == []
    await transport.set("key", {"w": torch.ones(1)}, version=0)
