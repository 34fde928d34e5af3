"""The machine's NVIDIA devices as their driver reports them (NVML, by nvidia-ml-py): without CUDA, without PyTorch.

Everything here works on a machine without a device or without the package: then there are no devices, and a reason.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class NvidiaDevice:
    """``utilisation_percent``: of the last second or less; None if the driver does not report it. ``peers``: the UUIDs
    of the devices whose memory this one can read."""

    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    utilisation_percent: int | None
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NvidiaDevices:
    """NVIDIA's devices of this host. ``reason``: the cause if no device was found, else empty."""

    devices: tuple[NvidiaDevice, ...]
    reason: str


def read_devices(nvml: Any = None) -> NvidiaDevices:
    """All devices of the machine. ``nvml``: the module of nvidia-ml-py; None: the installed one."""
    nvml = nvml or _installed()
    if nvml is None:
        return NvidiaDevices((), "nvidia-ml-py is not installed (pip install flexmarl[gpu])")
    try:
        with _initialised(nvml):
            handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
            uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
            devices = tuple(_device(nvml, handle, handles, uuids) for handle in handles)
    except nvml.NVMLError as error:
        return NvidiaDevices((), f"the driver refuses: {error}")
    return NvidiaDevices(devices, "" if devices else "the driver knows no device")


def process_memory(process_id: int, nvml: Any = None) -> dict[str, int]:
    """Bytes that a process holds on each device, by UUID; empty without devices."""
    nvml = nvml or _installed()
    if nvml is None:
        return {}
    held: dict[str, int] = {}
    try:
        with _initialised(nvml):
            for number in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(number)
                for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    if process.pid == process_id and process.usedGpuMemory is not None:
                        held[_text(nvml.nvmlDeviceGetUUID(handle))] = process.usedGpuMemory
    except nvml.NVMLError:
        return {}
    return held


def _device(nvml: Any, handle: Any, handles: list[Any], uuids: list[str]) -> NvidiaDevice:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        utilisation = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
    except nvml.NVMLError:  # parts of a device (MIG) have none
        utilisation = None
    peers = [
        uuid
        for other, uuid in zip(handles, uuids, strict=True)
        if other is not handle and _reads(nvml, handle, other)
    ]
    return NvidiaDevice(
        _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle)), memory.total, memory.free,
        utilisation, tuple(peers),
    )  # fmt: skip


def _reads(nvml: Any, reader: Any, other: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(reader, other, nvml.NVML_P2P_CAPS_INDEX_READ)
    except nvml.NVMLError:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


@contextmanager
def _initialised(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _text(value: Any) -> str:
    """Older versions of the package return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _installed() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml
