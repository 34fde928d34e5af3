"""The fake devices: CUDA's rules and failures, between processes too."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flexmarl.transport.errors import DeviceError, OutOfDeviceMemory, UnknownDevice

from .fake_devices import FakeDevices

SIZES = {"GPU-a": 1000, "GPU-b": 500}


@pytest.fixture
def process(tmp_path: Path) -> Callable[..., FakeDevices]:
    """Makes the devices as one process sees them."""
    return lambda **kwargs: FakeDevices(tmp_path, SIZES, **kwargs)


Process = Callable[..., FakeDevices]


def test_memory_that_one_process_takes_the_others_lack(process: Process) -> None:
    one, other = process(), process()
    buffer = one.allocate("GPU-a", 600)
    assert (other.memory("GPU-a").free_bytes, other.memory("GPU-a").total_bytes) == (400, 1000)
    with pytest.raises(
        OutOfDeviceMemory, match="device GPU-a: 401 bytes do not fit: 400 bytes are free"
    ) as raised:
        other.allocate("GPU-a", 401)
    assert (raised.value.needed_bytes, raised.value.free_bytes) == (401, 400)
    assert other.memory("GPU-b").free_bytes == 500
    one.free(buffer)
    assert other.memory("GPU-a").free_bytes == 1000


def test_the_memory_of_a_killed_process_is_free(process: Process, tmp_path: Path) -> None:
    program = """
import pathlib, sys
from tests.fake_devices import FakeDevices
devices = FakeDevices(pathlib.Path(sys.argv[1]), {"GPU-a": 1000, "GPU-b": 500})
print(devices.export(devices.allocate("GPU-a", 900)).hex(), flush=True)
sys.stdin.read()
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join([*sys.path, str(Path(__file__).parents[1])])},
    )
    try:
        assert holder.stdout is not None
        handle = bytes.fromhex(holder.stdout.readline().decode())
        here = process()
        assert here.memory("GPU-a").free_bytes == 100
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert here.memory("GPU-a").free_bytes == 1000
        with pytest.raises(DeviceError, match="freed"):
            here.open("GPU-a", handle, 900)
    finally:
        holder.kill()
        holder.communicate()


def test_opened_memory_is_the_same_memory(process: Process) -> None:
    owner, reader = process(), process()
    buffer = owner.allocate("GPU-a", 16)
    buffer.tensor.fill_(3)
    opened = reader.open("GPU-a", owner.export(buffer), 16)
    assert opened.tensor.tolist() == [3] * 16
    buffer.tensor.fill_(4)
    assert opened.tensor.tolist() == [4] * 16
    assert reader.device_of(opened.tensor[3:5]) == "GPU-a" and reader.device_of(torch.ones(1)) is None
    reader.close(opened)
    owner.free(buffer)


@pytest.mark.parametrize(
    ("device", "handle", "reason"),
    [
        ("GPU-a", b"short", "invalid handle"),
        ("GPU-a", b"../secret".ljust(64, b"\0"), "invalid handle"),
        ("GPU-c", None, "does not see it"),
    ],
)
def test_handles_that_name_nothing_and_devices_of_others_are_refused(
    process: Process, device: str, handle: bytes | None, reason: str
) -> None:
    owner, reader = process(), process()
    exported = owner.export(owner.allocate("GPU-a", 16))
    with pytest.raises(DeviceError, match=reason):
        reader.open(device, handle or exported, 16)


def test_memory_of_a_card_that_is_not_visible_is_opened_on_the_own_one_if_they_reach_each_other(
    process: Process,
) -> None:
    owner, reader = process(visible=["GPU-a"]), process(visible=["GPU-b"])
    buffer = owner.allocate("GPU-a", 16)
    opened = reader.open("GPU-b", owner.export(buffer), 16)
    buffer.tensor.fill_(7)
    assert (opened.device, opened.tensor.tolist()) == ("GPU-b", [7] * 16)
    apart = process(visible=["GPU-b"], unreachable=[("GPU-b", "GPU-a")])
    with pytest.raises(DeviceError, match="peer access is not supported"):
        apart.open("GPU-b", owner.export(buffer), 16)


def test_calls_that_a_machine_refuses_raise_errors(process: Process) -> None:
    owner = process(refuses=["cudaIpcGetMemHandle"])
    with pytest.raises(DeviceError, match="cudaIpcGetMemHandle: operation not supported"):
        owner.export(owner.allocate("GPU-a", 16))
    reader, other = process(refuses=["cudaIpcOpenMemHandle"]), process()
    with pytest.raises(DeviceError, match="cudaIpcOpenMemHandle: operation not supported"):
        reader.open("GPU-a", other.export(other.allocate("GPU-a", 16)), 16)


def test_handles_are_opened_once_by_others_and_closed_once(process: Process) -> None:
    owner, reader = process(), process()
    handle = owner.export(owner.allocate("GPU-a", 16))
    with pytest.raises(DeviceError, match="can't be opened in the process that owns"):
        owner.open("GPU-a", handle, 16)
    opened = reader.open("GPU-a", handle, 16)
    with pytest.raises(DeviceError, match="open already"):
        reader.open("GPU-a", handle, 16)
    with pytest.raises(DeviceError, match="only memory of this process"):
        reader.export(opened)
    reader.close(opened)
    with pytest.raises(DeviceError, match="can't be closed"):
        reader.close(opened)
    with pytest.raises(DeviceError, match="closed or freed"):
        opened.tensor  # noqa: B018  # a property that raises
    reader.close(reader.open("GPU-a", handle, 16))


def test_memory_is_not_closed_or_freed_before_a_copy_is_done(process: Process) -> None:
    owner, reader = process(), process()
    buffer = owner.allocate("GPU-a", 16)
    opened = reader.open("GPU-a", owner.export(buffer), 16)
    target = torch.ones(16, dtype=torch.uint8)
    event = reader.copy("GPU-a", [target], [opened.tensor])
    assert target.all(), "a copy only begins"
    with pytest.raises(DeviceError, match="closed before a copy was done"):
        reader.close(opened)
    event.synchronize()
    assert not target.any()
    reader.close(opened)
    event = owner.copy("GPU-a", [buffer.tensor], [target])
    with pytest.raises(DeviceError, match="freed before a copy was done"):
        owner.free(buffer)
    event.synchronize()
    owner.free(buffer)


def test_memory_is_not_freed_while_another_process_has_it_open(process: Process) -> None:
    owner, reader = process(), process()
    buffer = owner.allocate("GPU-a", 16)
    reader.open("GPU-a", owner.export(buffer), 16)
    with pytest.raises(DeviceError, match="freed while another process has it open"):
        owner.free(buffer)


def test_a_device_reads_the_memory_of_those_that_it_reaches(process: Process) -> None:
    devices = process(unreachable=[("GPU-b", "GPU-a")])
    assert devices.unreachable() == {("GPU-b", "GPU-a")}
    on_a, on_b = devices.allocate("GPU-a", 8), devices.allocate("GPU-b", 8)
    devices.copy("GPU-a", [on_a.tensor], [on_b.tensor]).synchronize()
    with pytest.raises(DeviceError, match="no access to the memory of GPU-a"):
        devices.copy("GPU-b", [on_b.tensor], [on_a.tensor])


def test_a_process_sees_its_devices_alone(process: Process) -> None:
    devices = process(visible=["GPU-b"])
    assert devices.visible() == ["GPU-b"] and not devices.unreachable()
    with pytest.raises(UnknownDevice, match=r"device GPU-a: .* \(visible: GPU-b\)"):
        devices.allocate("GPU-a", 1)


def test_pinning_is_done_once_and_undone(process: Process) -> None:
    devices = process()
    unpin = devices.pin(4096, 10)
    with pytest.raises(DeviceError, match="pinned already"):
        devices.pin(4096, 10)
    unpin()
    assert devices.pinned == {}


@pytest.mark.parametrize("size", [0, 1, 8, 13])
def test_a_checksum_finds_a_changed_byte(process: Process, size: int) -> None:
    memory = torch.full((size,), 255, dtype=torch.uint8)
    before = process().checksum(memory)
    assert 0 <= before < 2**64
    for changed in range(size):
        other = memory.clone()
        other[changed] = 1
        assert process().checksum(other) != before
