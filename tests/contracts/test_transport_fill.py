"""States that are written where readers read them: what every memory promises about them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flexmarl.transport import StateHandle
from flexmarl.transport.errors import MemoryInUse, StaleHandle, TransferTimeout, TransportClosed
from flexmarl.transport.handle import DTYPE_BYTES, PathName
from flexmarl.transport.state import StateTransport

from ..fake_devices import FakeDevices
from .test_transport import Ends, open_ends

torch.set_num_threads(1)
MEMORIES: list[PathName] = ["shm", "cuda_ipc", "tcp"]


@pytest.fixture(params=MEMORIES)
async def ends(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ends]:
    async with open_ends(request.param, tmp_path) as opened:
        yield opened


def state(number: int) -> dict[str, Tensor]:
    """Several chunks, and tensors of every dtype."""
    small = {dtype: torch.full((3,), number).to(getattr(torch, dtype)) for dtype in DTYPE_BYTES}
    large = {"large": torch.arange(700_000, dtype=torch.float32).view(700, 1000) + number}
    return {**small, **large, "empty": torch.zeros(0, 4), "scalar": torch.tensor(float(number))}


def outline(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


async def fill(
    transport: StateTransport, tensors: Mapping[str, Tensor], version: int, **settings: Any
) -> StateHandle:
    """By rows, from the last to the first."""

    async def write(views: Mapping[str, Any]) -> None:
        assert list(views) == list(tensors)
        for name, view in views.items():
            assert (view.shape, view.dtype) == (tensors[name].shape, tensors[name].dtype)
            for row in reversed(range(len(view) if view.dim() else 0)):
                view[row].copy_(tensors[name][row])
            if not view.dim():
                view.copy_(tensors[name])

    return await transport.fill("key", outline(tensors), write, version=version, **settings)


async def assert_read(transport: StateTransport, handle: StateHandle, tensors: Mapping[str, Tensor]) -> None:
    got = await transport.get(handle)
    assert list(got) == list(tensors)
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())


async def test_what_is_written_in_place_is_what_set_copies(ends: Ends) -> None:
    handle = await fill(ends.source, state(1), 1, offer=[ends.path])
    copied = await ends.set("other", state(1), 1)
    assert ([source.path for source in handle.sources], handle.key, handle.version) == ([ends.path], "key", 1)
    assert (handle.tensors, handle.size_bytes, handle.digest) == (
        copied.tensors,
        copied.size_bytes,
        copied.digest,
    )
    await assert_read(ends.destination, handle, state(1))
    part = await ends.destination.get(handle, names=["large"], rows={"large": (99, 698)})
    assert torch.equal(part["large"], state(1)["large"][99:698])
    async with ends.destination.mapped(handle, checked=True) as tensors:
        assert torch.equal(tensors["large"].cpu(), state(1)["large"])
        del tensors


async def test_filled_and_copied_versions_follow_each_other(ends: Ends) -> None:
    handles = []
    for version in range(4):
        if version % 2:
            handles.append(await ends.set("key", state(version), version))
        else:
            handles.append(await fill(ends.source, state(version), version, offer=[ends.path]))
    for version in (2, 3):
        await assert_read(ends.destination, handles[version], state(version))
    for version in (0, 1):
        with pytest.raises(StaleHandle):
            await ends.destination.get(handles[version])


async def test_the_older_versions_stay_readable_after_an_error_in_the_middle(ends: Ends) -> None:
    handles = [await fill(ends.source, state(version), version, offer=[ends.path]) for version in (1, 2)]

    async def write_half(views: Mapping[str, Any]) -> None:
        views["large"][:300].fill_(-1.0)
        raise OSError("a rank was lost")

    for _ in range(3):
        with pytest.raises(OSError, match="a rank was lost"):
            await ends.source.fill("key", outline(state(3)), write_half, version=3, offer=[ends.path])
        await assert_read(ends.destination, handles[1], state(2))
    handle = await fill(ends.source, state(4), 4, offer=[ends.path])
    await assert_read(ends.destination, handle, state(4))
    await assert_read(ends.destination, handles[1], state(2))


async def test_a_version_that_is_not_complete_in_time_is_no_version(ends: Ends) -> None:
    handle = await fill(ends.source, state(1), 1, offer=[ends.path])

    async def hang(_views: Mapping[str, Any]) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TransferTimeout):
        await ends.source.fill("key", outline(state(2)), hang, version=2, offer=[ends.path], timeout_s=0.05)
    cancelled = asyncio.create_task(
        ends.source.fill("key", outline(state(2)), hang, version=2, offer=[ends.path])
    )
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await assert_read(ends.destination, handle, state(1))
    await assert_read(ends.destination, await fill(ends.source, state(3), 3, offer=[ends.path]), state(3))


async def test_a_transport_that_closes_publishes_nothing(ends: Ends) -> None:
    async def close(_views: Mapping[str, Any]) -> None:
        await ends.source.close()

    with pytest.raises(TransportClosed):
        await ends.source.fill("key", outline(state(2)), close, version=2, offer=[ends.path])
    with pytest.raises(TransportClosed):
        await fill(ends.source, state(2), 2)


async def test_an_array_is_filled_too(tmp_path: Path) -> None:
    async def write(views: Mapping[str, Any]) -> None:
        views["state"][:] = (7, 8)

    async with StateTransport(tmp_path) as transport:
        handle = await transport.fill("key", {"state": np.zeros(2, np.int64)}, write, version=1)
        assert (await transport.get(handle))["state"].tolist() == [7, 8]


async def test_all_memories_that_are_offered_have_the_same(tmp_path: Path) -> None:
    devices = [FakeDevices(tmp_path, {"GPU-a": 1 << 28}) for _ in range(2)]
    async with (
        StateTransport(tmp_path, devices[0]) as source,
        StateTransport(tmp_path, devices[1]) as reader,
    ):
        handle = await fill(source, state(5), 5)
        assert [one.path for one in handle.sources] == ["cuda_ipc", "shm"]
        for path in ("cuda_ipc", "shm"):
            got = await reader.get(handle, path=path)
            assert all(torch.equal(got[name], tensor) for name, tensor in state(5).items())


async def test_a_memory_that_the_process_lacks_can_not_be_filled(tmp_path: Path) -> None:
    async with StateTransport(tmp_path) as transport:
        with pytest.raises(ValueError, match="can't be offered by"):
            await fill(transport, state(1), 1, offer=["cuda_ipc"])


# --------------------------------------------------------------------------- lent memory


async def test_lent_memory_is_filled_by_another_process(tmp_path: Path) -> None:
    async with StateTransport(tmp_path) as owner:
        first, second = [await owner.lend("key", 1 << 22) for _ in range(2)]
        async with StateTransport(tmp_path) as writer:
            old = await fill(writer, state(1), 1, lent=first)

            async def write_half(views: Mapping[str, Any]) -> None:
                views["large"].fill_(-1.0)
                raise OSError("a rank was lost")

            with pytest.raises(OSError, match="a rank was lost"):
                await writer.fill("key", outline(state(2)), write_half, version=2, lent=second)
            await assert_read(owner, old, state(1))
            new = await fill(writer, state(2), 2, lent=second)
        for handle, number in ((old, 1), (new, 2)):
            assert handle.lies_in(second if number == 2 else first)
            await assert_read(owner, handle, state(number))
    assert not list(tmp_path.iterdir())


async def test_lent_memory_that_a_reader_uses_is_not_filled(tmp_path: Path) -> None:
    async with StateTransport(tmp_path) as owner, StateTransport(tmp_path) as writer:
        first = await owner.lend("key", 1 << 22)
        handle = await fill(writer, state(1), 1, lent=first)
        async with owner.mapped(handle) as tensors:
            with pytest.raises(MemoryInUse):
                await fill(writer, state(2), 2, lent=first)
            assert torch.equal(tensors["large"], state(1)["large"])
            del tensors
