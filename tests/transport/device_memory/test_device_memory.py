"""Path ``cuda_ipc`` on fake devices: opened once, acknowledged before it is used again, freed after it is closed."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from flexmarl.transport.device_memory import device_memory, host_copies
from flexmarl.transport.device_memory.buffer_sets import PAGE_BYTES
from flexmarl.transport.device_memory.device_memory import buffer_ranges
from flexmarl.transport.errors import (
    CorruptState,
    ForeignHandle,
    NoPath,
    NotAcknowledged,
    OutOfDeviceMemory,
    StaleHandle,
    StateMismatch,
)
from flexmarl.transport.handle import CudaIpcSource, PathName, StateHandle, TensorSpec
from flexmarl.transport.state import StateTransport

from ...fake_devices import FakeBuffer, FakeDevices
from ...patience import PATIENCE_S

torch.set_num_threads(1)
A, B = "GPU-a", "GPU-b"
TOTAL = 1 << 24
LARGE = 300_000  # elements: copied in a thread, not in the event loop


class Counting(FakeDevices):
    """Counts what is opened and closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.opened = self.closed = self.copies = self.allocated = self.pins = 0
        self.probes: list[str] = []
        self.slow_calls: set[threading.Thread] = set()
        """Threads of the calls that wait for the device."""

    def allocate(self, device: str, size_bytes: int) -> FakeBuffer:
        self.allocated += 1
        self.slow_calls.add(threading.current_thread())
        return super().allocate(device, size_bytes)

    def free(self, buffer: FakeBuffer) -> None:
        self.slow_calls.add(threading.current_thread())
        super().free(buffer)

    def copy(self, device: str, targets: Any, sources: Any, after: Any = None) -> Any:
        self.copies += 1
        return super().copy(device, targets, sources, after)

    def pin(self, address: int, size_bytes: int) -> Callable[[], None]:
        self.pins += 1
        return super().pin(address, size_bytes)

    def export(self, buffer: FakeBuffer) -> bytes:
        self.probes.append(buffer.device)
        return super().export(buffer)

    def open(self, device: str, handle: bytes, size_bytes: int) -> FakeBuffer:
        self.opened += 1
        return super().open(device, handle, size_bytes)

    def close(self, buffer: FakeBuffer) -> None:
        self.closed += 1
        self.slow_calls.add(threading.current_thread())
        super().close(buffer)


@dataclass
class Side:
    """One process's transport and devices."""

    transport: StateTransport
    devices: Counting

    def tensor(self, values: Tensor, device: str = A) -> Tensor:
        """A copy of ``values`` on a device."""
        memory = self.devices.allocate(device, values.nbytes).tensor
        tensor = memory.view(values.dtype).view(values.shape)
        return tensor.copy_(values)


@asynccontextmanager
async def side(directory: Path, **kwargs: Any) -> AsyncIterator[Side]:
    devices = Counting(directory, {A: TOTAL, B: TOTAL}, **kwargs)
    async with StateTransport(directory, devices) as transport:
        yield Side(transport, devices)


async def mapped_by(transport: StateTransport, handle: StateHandle, **options: Any) -> dict[str, Tensor]:
    async with transport.mapped(handle, **options) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.fixture
async def trainer(tmp_path: Path) -> AsyncIterator[Side]:
    async with side(tmp_path) as opened:
        yield opened


@pytest.fixture
async def engine(tmp_path: Path, trainer: Side) -> AsyncIterator[Side]:
    async with side(tmp_path) as opened:
        yield opened


def source_of(handle: StateHandle) -> CudaIpcSource:
    source = handle.source("cuda_ipc")
    assert isinstance(source, CudaIpcSource)
    return source


async def publish(trainer: Side, number: float, version: int, elements: int = 1000) -> StateHandle:
    state = {"w": torch.full((elements,), float(number)), "b": torch.full((3,), -float(number))}
    return await trainer.transport.set("key", state, version=version, offer=["cuda_ipc", "shm"])


async def test_memory_goes_from_device_to_device(trainer: Side, engine: Side) -> None:
    weights = trainer.tensor(torch.arange(1000.0), B)
    handle = await trainer.transport.set("key", {"w": weights}, version=0, offer=["cuda_ipc", "shm"])
    assert source_of(handle).device == B, "on the tensors' device"
    into = {"w": engine.tensor(torch.zeros(1000), A)}
    await engine.transport.get(handle, into=into)
    assert torch.equal(into["w"], torch.arange(1000.0))
    chosen = engine.transport.statistics().chosen["key"]
    assert (chosen.path, chosen.refused) == ("cuda_ipc", {}) and B in chosen.reason
    on_cpu = await engine.transport.get(handle)
    assert torch.equal(on_cpu["w"], into["w"]) and engine.transport.statistics().by_path["shm"].gets == 1


async def test_a_downgrade_is_seen_and_a_forced_path_is_not_left(
    tmp_path: Path, trainer: Side, caplog: pytest.LogCaptureFixture
) -> None:
    handle = await publish(trainer, 1, 0)
    async with side(tmp_path, unreachable=[(B, A)], visible=[B]) as other:
        into = {"w": other.tensor(torch.zeros(1000), B), "b": other.tensor(torch.zeros(3), B)}
        with pytest.raises(NoPath, match="path 'cuda_ipc': .* can't be opened here: .*peer access"):
            await other.transport.get(handle, into=into, path="cuda_ipc")
        assert not into["w"].any()
        await other.transport.get(handle, into=into)
        chosen = other.transport.statistics().chosen["key"]
        assert chosen.path == "shm" and "can't be opened" in chosen.refused["cuda_ipc"]


async def test_cards_that_each_see_only_themselves_read_each_other(tmp_path: Path) -> None:
    async with side(tmp_path, visible=[A]) as trainer, side(tmp_path, visible=[B]) as engine:
        into = {"w": engine.tensor(torch.zeros(1000), B), "b": engine.tensor(torch.zeros(3), B)}
        for version in range(4):
            handle = await publish(trainer, version, version)
            assert source_of(handle).device == A
            await engine.transport.get(handle, into=into)
            assert into["w"].eq(version).all() and into["b"].eq(-version).all()
        chosen = engine.transport.statistics().chosen["key"]
        assert (chosen.path, chosen.refused) == ("cuda_ipc", {})
        async with engine.transport.mapped(handle) as tensors:
            assert engine.devices.device_of(tensors["w"]) == B, "opened on the own card"


async def test_memory_that_can_not_be_opened_is_left_for_shared_memory_with_the_reason(
    tmp_path: Path, trainer: Side
) -> None:
    async with side(tmp_path, refuses=["cudaIpcOpenMemHandle"]) as other:
        into = {"w": other.tensor(torch.zeros(1000)), "b": other.tensor(torch.zeros(3))}
        for version in range(3):
            await other.transport.get(await publish(trainer, version, version), into=into)
            assert into["w"].eq(version).all()
            chosen = other.transport.statistics().chosen["key"]
            assert chosen.path == "shm"
            assert "cudaIpcOpenMemHandle: operation not supported" in chosen.refused["cuda_ipc"]
        assert other.devices.opened == 1, "it is not tried again for each version"
        got = await mapped_by(other.transport, await publish(trainer, 3, 3))
        assert got["w"].eq(3).all()


async def test_a_mapping_that_can_not_be_opened_is_one_of_shared_memory(
    tmp_path: Path, trainer: Side
) -> None:
    handle = await publish(trainer, 1, 0)
    async with side(tmp_path, refuses=["cudaIpcOpenMemHandle"]) as other:
        async with other.transport.mapped(handle, checked=True) as tensors:
            assert tensors["w"].eq(1).all() and other.devices.device_of(tensors["w"]) is None
        chosen = other.transport.statistics().chosen["key"]
        assert (chosen.path, list(chosen.refused)) == ("shm", ["cuda_ipc"])
    await publish(trainer, 2, 1)
    await publish(trainer, 3, 2)  # nothing is in use any more


async def test_devices_are_offered_first_and_readers_choose(
    tmp_path: Path, trainer: Side, engine: Side, reader: StateTransport
) -> None:
    state = {"w": trainer.tensor(torch.ones(1000))}
    handle = await trainer.transport.set("key", state, version=0)
    assert [source.path for source in handle.sources] == ["cuda_ipc", "shm"]
    await engine.transport.get(handle, into={"w": engine.tensor(torch.zeros(1000))})
    await reader.get(handle)
    chosen = [engine.transport.chosen("key"), reader.chosen("key")]
    assert [one and one.path for one in chosen] == ["cuda_ipc", "shm"]
    assert reader.chosen("other") is None


async def test_the_path_of_a_transport_is_the_only_one_on_both_sides(tmp_path: Path) -> None:
    devices = [FakeDevices(tmp_path, {A: TOTAL}) for _ in range(3)]
    async with (
        StateTransport(tmp_path, devices[0], "cuda_ipc") as trainer,
        StateTransport(tmp_path, devices[1], "cuda_ipc") as engine,
        StateTransport(tmp_path, None, "cuda_ipc") as without,
        StateTransport(tmp_path, devices[2], "shm") as other,
    ):
        handle = await trainer.set("key", {"w": torch.ones(9)}, version=0)
        assert [source.path for source in handle.sources] == ["cuda_ipc"]
        assert (await engine.get(handle))["w"].eq(1).all()
        for reads in (without.get(handle), mapped_by(without, handle)):
            with pytest.raises(NoPath, match="path 'cuda_ipc': this process has no device"):
                await reads
        for reads in (other.get(handle), mapped_by(other, handle)):
            with pytest.raises(NoPath, match=r"path 'shm': not offered \(there is cuda_ipc\)"):
                await reads


async def test_device_memory_is_used_in_place_and_not_written_meanwhile(trainer: Side, engine: Side) -> None:
    handle = await publish(trainer, 1, 1)
    copies = engine.devices.copies
    async with engine.transport.mapped(handle, checked=True) as tensors:
        assert engine.devices.device_of(tensors["w"]) == A, "where it lies"
        await publish(trainer, 2, 2)
        third = asyncio.create_task(publish(trainer, 3, 3))
        await asyncio.wait([third], timeout=0.1)
        assert not third.done()
        assert tensors["w"].eq(1).all() and tensors["b"].eq(-1).all()
    newest = await third
    assert engine.devices.copies == copies
    async with engine.transport.mapped(newest, names=["b"]) as part:
        assert part.keys() == {"b"} and part["b"].eq(-3).all()
    with pytest.raises(StaleHandle):
        await mapped_by(engine.transport, handle)


async def test_memory_in_place_is_compared_with_its_digest_and_with_what_is_expected(
    trainer: Side, engine: Side
) -> None:
    handle = await publish(trainer, 1, 1)
    like = {"w": torch.empty(1000, device="meta"), "b": torch.empty(4, device="meta")}
    with pytest.raises(StateMismatch, match=r"b: float32\[3\] does not go into .*\[4\]"):
        await mapped_by(engine.transport, handle, like=like)
    for owned in trainer.devices._owned.values():
        owned.tensor[5] ^= 1
    with pytest.raises(CorruptState):
        await mapped_by(engine.transport, handle, checked=True)
    await publish(trainer, 2, 2)  # nothing is in use any more
    await publish(trainer, 3, 3)


async def test_without_devices_the_path_can_not_be_offered(transport: StateTransport) -> None:
    with pytest.raises(ValueError, match=r"can't be offered by \['cuda_ipc'\]"):
        await transport.set("key", {"w": torch.ones(1)}, version=0, offer=["cuda_ipc"])


async def test_handles_are_opened_once_for_all_versions_and_closed_once(
    tmp_path: Path, trainer: Side
) -> None:
    async with side(tmp_path) as engine:
        into = {"w": engine.tensor(torch.zeros(1000)), "b": engine.tensor(torch.zeros(3))}
        for version in range(6):
            await engine.transport.get(await publish(trainer, version, version), into=into)
            assert into["w"].eq(version).all()
        assert (engine.devices.opened, engine.devices.closed) == (2, 0), "of the two newest versions"
    assert (engine.devices.opened, engine.devices.closed) == (2, 2)


async def test_dropped_memory_is_free_as_soon_as_its_readers_have_closed_it(
    trainer: Side, engine: Side
) -> None:
    handle = await publish(trainer, 1, 0)
    await engine.transport.get(handle, path="cuda_ipc")
    await trainer.transport.drop("key")  # its reader closes the memory some time later
    async with asyncio.timeout(PATIENCE_S):
        while trainer.devices.memory(A).free_bytes < TOTAL:
            await asyncio.sleep(0.02)


def test_buffers_are_flat_and_no_tensor_is_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "BUFFER_BYTES", 256)
    specs = [TensorSpec(str(n), (100,), "uint8", 128 * n) for n in range(7)]
    ranges = buffer_ranges(specs, 6 * 128 + 100)
    assert ranges == [(0, 256), (256, 512), (512, 768), (768, 868)]
    assert buffer_ranges([TensorSpec("a", (1000,), "uint8", 0)], 1000) == [(0, 1000)]
    assert buffer_ranges([], 0) == []


async def test_a_state_of_several_buffers_arrives_whole_and_in_parts(
    trainer: Side, engine: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "BUFFER_BYTES", 4096)
    state = {f"w{n}": torch.rand(700) for n in range(6)}
    handle = await trainer.transport.set("key", state, version=0, offer=["cuda_ipc"])
    assert len(source_of(handle).buffers) > 2
    got = await engine.transport.get(handle)
    assert all(torch.equal(got[name], tensor) for name, tensor in state.items())
    opened = engine.devices.opened
    part = await engine.transport.get(handle, names=["w5"], rows={"w5": (10, 20)})
    assert torch.equal(part["w5"], state["w5"][10:20]) and engine.devices.opened == opened


async def test_changed_memory_is_corruption(trainer: Side, engine: Side) -> None:
    handle = await publish(trainer, 1, 0)
    for buffer in trainer.devices._owned.values():
        buffer.tensor[5] ^= 1
    with pytest.raises(CorruptState, match="state key, version 0"):
        await engine.transport.get(handle, path="cuda_ipc")


async def test_a_buffer_that_lacks_a_tensor_is_refused(trainer: Side, engine: Side) -> None:
    handle = await publish(trainer, 1, 0)
    source = source_of(handle)
    (buffer,) = source.buffers
    lacking = replace(source, buffers=(replace(buffer, size_bytes=4000),))
    with pytest.raises((ForeignHandle, CorruptState)):
        await engine.transport.get(replace(handle, sources=(lacking,)))


# ----------------------------------------------------------------------- acknowledged


class Slow(Counting):
    """Its copies wait until they are let go."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.begun, self.go = threading.Event(), threading.Event()

    def copy(self, device: str, targets: Any, sources: Any, after: Any = None) -> Any:
        event = super().copy(device, targets, sources, after)
        self.begun.set()
        self.go.wait(PATIENCE_S)
        return event


@pytest.fixture
async def slow(tmp_path: Path, trainer: Side) -> AsyncIterator[Side]:
    devices = Slow(tmp_path, {A: TOTAL, B: TOTAL})
    async with StateTransport(tmp_path, devices) as transport:
        yield Side(transport, devices)
        devices.go.set()


async def reading(slow: Side, handle: StateHandle) -> "asyncio.Task[dict[str, Tensor]]":
    """A Get in the middle of its copy."""
    assert isinstance(slow.devices, Slow)
    task = asyncio.create_task(slow.transport.get(handle, path="cuda_ipc"))
    await asyncio.to_thread(slow.devices.begun.wait, PATIENCE_S)
    return task


async def test_memory_is_not_written_before_its_reader_is_done(trainer: Side, slow: Side) -> None:
    assert isinstance(slow.devices, Slow)
    task = await reading(slow, await publish(trainer, 1, 1, LARGE))
    await publish(trainer, 2, 2, LARGE)
    third = asyncio.create_task(publish(trainer, 3, 3, LARGE))
    await asyncio.wait([third], timeout=0.1)
    assert not third.done()
    slow.devices.go.set()
    got = await task
    assert got["w"].eq(1).all() and got["b"].eq(-1).all(), "whole, though two newer versions were set"
    await third


async def test_a_reader_that_does_not_acknowledge_is_named(trainer: Side, slow: Side) -> None:
    assert isinstance(slow.devices, Slow)
    path: Any = trainer.transport._memories["cuda_ipc"]
    path._acknowledge_s = 0.1
    task = await reading(slow, await publish(trainer, 1, 1, LARGE))
    second = await publish(trainer, 2, 2, LARGE)
    with pytest.raises(
        NotAcknowledged, match=f"state key: device memory .* within 0.1 s by process {os.getpid()}"
    ):
        await publish(trainer, 3, 3, LARGE)
    slow.devices.go.set()
    await task
    assert (await slow.transport.get(second, path="cuda_ipc"))["w"].eq(2).all(), "the version before stays"
    await publish(trainer, 3, 3, LARGE)


# ----------------------------------------------------------------------- memory


async def test_all_memory_of_a_key_is_made_at_its_first_version_in_whole_pages(
    trainer: Side, engine: Side
) -> None:
    await publish(trainer, 0, 0)
    assert [one.size_bytes for one in trainer.devices._owned.values()] == [PAGE_BYTES] * 2
    allocated = trainer.devices.allocated
    for version in range(1, 5):
        handle = await publish(trainer, version, version)
        assert (await engine.transport.get(handle, path="cuda_ipc"))["w"].eq(version).all()
    assert trainer.devices.allocated == allocated, "none in the middle of a run"


async def test_memory_that_pytorch_keeps_is_given_back_before_a_state_is_refused(
    trainer: Side, engine: Side
) -> None:
    trainer.devices.cache(A, TOTAL - PAGE_BYTES)
    handle = await publish(trainer, 1, 0)
    assert (await engine.transport.get(handle, path="cuda_ipc"))["w"].eq(1).all()


async def test_a_state_that_does_not_fit_is_named_with_all_its_bytes_and_its_device(trainer: Side) -> None:
    trainer.devices.allocate(A, TOTAL - PAGE_BYTES)
    with pytest.raises(
        OutOfDeviceMemory,
        match=f"device {A}: {PAGE_BYTES} bytes do not fit: 0 bytes are free; state key needs {2 * PAGE_BYTES} bytes",
    ) as raised:
        await publish(trainer, 1, 0)
    assert (raised.value.key, raised.value.device) == ("key", A)
    # The first of the two sets stays, for a Set that is tried again.
    assert [one.size_bytes for one in trainer.devices._owned.values()] == [TOTAL - PAGE_BYTES, PAGE_BYTES]


async def test_no_call_that_waits_for_the_device_runs_in_the_event_loop(tmp_path: Path) -> None:
    async with side(tmp_path) as engine, side(tmp_path) as trainer:
        for version in range(3):
            await engine.transport.get(await publish(trainer, version, version), path="cuda_ipc")
        await trainer.transport.drop("key")
        async with asyncio.timeout(PATIENCE_S):
            while engine.devices.closed < 2:  # a few times a second
                await asyncio.sleep(0.01)
        await engine.transport.get(await publish(trainer, 1, 9), path="cuda_ipc")
    assert threading.main_thread() not in trainer.devices.slow_calls | engine.devices.slow_calls


# ----------------------------------------------------------------------- computations


@dataclass
class Training:
    """A policy whose optimizer step has been begun, and another policy's backward after it, on the same device."""

    side: Side
    weights: dict[str, Tensor]
    steps: list[str]

    def begin(self, name: str, value: float | None = None) -> None:
        def work() -> None:
            self.steps.append(name)
            if value is not None:
                self.weights["w"].fill_(value)

        self.side.devices.compute(A, work)


@pytest.fixture
def training(trainer: Side) -> Training:
    return Training(trainer, {"w": trainer.tensor(torch.zeros(LARGE))}, [])


@pytest.mark.parametrize("path", ["cuda_ipc", "shm"])
async def test_a_publish_waits_for_its_own_step_and_for_nothing_later(
    training: Training, engine: Side, path: PathName
) -> None:
    transport = training.side.transport
    training.begin("step", 2.0)
    complete = transport.record()
    training.begin("backward of another policy")
    handle = await transport.set("key", training.weights, version=1, offer=[path], after=complete)
    assert training.steps == ["step"]
    assert (await engine.transport.get(handle))["w"].eq(2).all()


@pytest.mark.parametrize("path", ["cuda_ipc", "shm"])
async def test_without_a_point_a_publish_waits_for_all_that_was_begun(
    training: Training, engine: Side, path: PathName
) -> None:
    training.begin("step", 2.0)
    training.begin("backward")
    handle = await training.side.transport.set("key", training.weights, version=1, offer=[path])
    assert training.steps == ["step", "backward"]
    assert (await engine.transport.get(handle))["w"].eq(2).all()


@pytest.mark.parametrize("path", ["cuda_ipc", "shm"])
async def test_a_small_copy_does_not_have_the_loop_wait_for_computations(
    trainer: Side, engine: Side, path: PathName
) -> None:
    threads: list[int] = []
    trainer.devices.compute(A, lambda: threads.append(threading.get_ident()))
    handle = await trainer.transport.set("key", {"w": trainer.tensor(torch.ones(2))}, version=1, offer=[path])
    engine.devices.compute(A, lambda: threads.append(threading.get_ident()))
    await engine.transport.get(handle, into={"w": engine.tensor(torch.zeros(2))})
    assert len(threads) == 2 and threading.get_ident() not in threads


@pytest.mark.parametrize("path", ["cuda_ipc", "shm"])
async def test_weights_are_written_after_the_computations_that_use_the_old_ones(
    trainer: Side, engine: Side, path: PathName
) -> None:
    into = {"w": engine.tensor(torch.ones(LARGE))}
    read: list[float] = []
    engine.devices.compute(A, lambda: read.append(float(into["w"].max())))
    handle = await trainer.transport.set("key", {"w": torch.full((LARGE,), 5.0)}, version=1, offer=[path])
    await engine.transport.get(handle, into=into)
    assert into["w"].eq(5).all() and read == [1.0]


# ----------------------------------------------------------------------- refused by the driver


@pytest.mark.parametrize("call", ["cudaIpcGetMemHandle", "cudaIpcOpenMemHandle"])
async def test_memory_that_no_process_can_open_is_not_offered_and_readers_know_why(
    tmp_path: Path, engine: Side, call: str
) -> None:
    async with side(tmp_path, refuses=[call]) as trainer:
        for version in range(2):
            state = {"w": trainer.tensor(torch.full((1000,), float(version)))}
            handle = await trainer.transport.set("key", state, version=version)
            assert [source.path for source in handle.sources] == ["shm"]
            await engine.transport.get(handle, into={"w": engine.tensor(torch.zeros(1000))})
        chosen = engine.transport.statistics().chosen["key"]
        assert chosen.path == "shm" and f"{call}: operation not supported" in chosen.refused["cuda_ipc"]
        assert A in chosen.refused["cuda_ipc"]
        assert trainer.devices.probes == [A], "once"
        with pytest.raises(NoPath, match=f"path 'cuda_ipc': other processes can't open .*{call}"):
            await engine.transport.get(handle, path="cuda_ipc")


async def test_figures_take_no_memory_of_a_device_and_pinning_takes_it_of_the_own_one(tmp_path: Path) -> None:
    async with side(tmp_path, visible=[B, A]) as opened:
        opened.transport.statistics()
        assert opened.devices.contexts == set()
        await opened.transport.reserve(1 << 20)
        assert opened.devices.contexts == {B}


# ----------------------------------------------------------------------- memory of the host


async def test_lent_memory_is_pinned_once_for_all_copies_and_let_go_at_the_end(
    tmp_path: Path, transport: StateTransport
) -> None:
    lent = await transport.lend("key", 4 * LARGE)
    async with side(tmp_path) as slot, side(tmp_path) as other:
        state = {"w": slot.tensor(torch.ones(LARGE))}
        for version in range(3):
            handle = await slot.transport.set("key", state, version=version, lent=lent)
            assert len(slot.devices.pinned) == 1 and slot.devices.pins == 1
            into = {"w": other.tensor(torch.zeros(LARGE))}
            await other.transport.get(handle, into=into)
            assert into["w"].eq(1).all() and other.devices.pins == 1
            assert (await other.transport.get(handle))["w"].eq(1).all()
    assert slot.devices.pinned == other.devices.pinned == {}


async def test_memory_that_can_not_be_pinned_is_copied_through_two_buffers_that_are(
    tmp_path: Path, transport: StateTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copies, "STAGE_BYTES", 100_000)
    lent = await transport.lend("key", 4 * LARGE + 4096)
    async with side(tmp_path, refuses=["cudaHostRegister"]) as slot:
        values = {"w": torch.rand(LARGE), "odd": torch.rand(7, 5).t()}
        state = {name: slot.tensor(tensor) for name, tensor in values.items()}
        copies = slot.devices.copies
        handle = await slot.transport.set("key", state, version=0, lent=lent)
        assert slot.devices.copies - copies == 4 * LARGE // 100_000 + 1
        into = {name: slot.tensor(torch.zeros_like(tensor)) for name, tensor in values.items()}
        await slot.transport.get(handle, into=into)
        assert all(torch.equal(into[name], tensor) for name, tensor in values.items())
        assert slot.devices.pinned == {}


async def test_too_little_memory_leaves_the_version_before_and_nothing_else(
    trainer: Side, engine: Side
) -> None:
    handle = await publish(trainer, 1, 0)
    free = trainer.devices.memory(A).free_bytes
    with pytest.raises(
        OutOfDeviceMemory, match=f"device {A}: {4 * TOTAL} bytes do not fit: {free} bytes are free"
    ):
        await trainer.transport.set("big", {"w": torch.zeros(TOTAL)}, version=0, offer=["cuda_ipc"])
    assert trainer.devices.memory(A).free_bytes == free
    assert (await engine.transport.get(handle, path="cuda_ipc"))["w"].eq(1).all()


async def test_dropped_memory_is_freed_when_its_readers_have_closed_it(trainer: Side, engine: Side) -> None:
    handle = await publish(trainer, 1, 0)
    await engine.transport.get(handle, path="cuda_ipc")
    await trainer.transport.drop("key")
    with pytest.raises(StaleHandle):
        await engine.transport.get(handle, path="cuda_ipc")
    await publish(trainer, 2, 1)
    async with asyncio.timeout(PATIENCE_S):
        while trainer.devices.memory(A).free_bytes < TOTAL - 2 * PAGE_BYTES:
            await asyncio.sleep(0.01)
    assert engine.devices.closed == 1 and len(trainer.devices._owned) == 2


async def test_an_owner_that_leaves_waits_for_its_readers(tmp_path: Path) -> None:
    async with side(tmp_path) as engine:
        async with side(tmp_path) as trainer:
            await engine.transport.get(await publish(trainer, 1, 0), path="cuda_ipc")
        # The fake raises an error for memory that is freed while it is open.
        assert engine.devices.closed == 1 and trainer.devices.memory(A).free_bytes == TOTAL


async def test_host_memory_is_pinned_once_and_its_figures_are_known(tmp_path: Path) -> None:
    async with side(tmp_path) as trainer:
        await trainer.transport.reserve(1 << 20, states=2)
        pinned = dict(trainer.devices.pinned)
        assert len(pinned) == 2 and min(pinned.values()) > 1 << 20
        for version in range(5):
            await trainer.transport.set("key", {"w": torch.ones(1 << 18)}, version=version, offer=["shm"])
        assert trainer.devices.pinned == pinned, "no memory is pinned in a Set"
        numbers = trainer.transport.statistics().numbers()
        assert (
            numbers[f"transport_device_{A}_free_bytes"]
            == numbers[f"transport_device_{A}_total_bytes"]
            == TOTAL
        )
    assert trainer.devices.pinned == {}


PEER = """
import asyncio, os, signal, sys
from pathlib import Path
import torch
from pydantic import TypeAdapter
from flexmarl.transport import StateHandle
from tests.fake_devices import FakeDevices
from flexmarl.transport.state import StateTransport

class Deadly(FakeDevices):
    def copy(self, device, targets, sources, after):
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    devices = Deadly(Path(sys.argv[1]), {"GPU-a": 1 << 24, "GPU-b": 1 << 24})
    async with StateTransport(Path(sys.argv[1]), devices) as transport:
        handle = TypeAdapter(StateHandle).validate_json(sys.stdin.read())
        await transport.get(handle, path="cuda_ipc")

asyncio.run(main())
"""


async def test_a_reader_killed_in_its_copy_holds_nothing_up(
    tmp_path: Path, trainer: Side, engine: Side
) -> None:
    handle = await publish(trainer, 1, 0)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PEER,
        str(tmp_path),
        stdin=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": ":".join([*sys.path, str(Path(__file__).parents[3])]), "OMP_NUM_THREADS": "1"},
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            await process.communicate(TypeAdapter(StateHandle).dump_json(handle))
        assert process.returncode == -signal.SIGKILL
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    for version in range(1, 4):
        newest = await publish(trainer, version, version)
    assert (await engine.transport.get(newest, path="cuda_ipc"))["w"].eq(3).all()
