"""The machine's NVIDIA devices as their driver reports them (NVML, by nvidia-ml-py): without CUDA, without PyTorch.

Everything here works on a machine without a device or without the package: then there are no devices, and a reason.
"""

from contextlib import suppress
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from ...transport.nvidia_driver import (
    MISSING,
    computing_processes,
    drawing_processes,
    import_nvml,
    memory_of,
    session,
)


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process that computes on a device, and its memory there; None if the driver does not report it."""

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class NvidiaDevice:
    """``utilisation_percent``: of the last second or less; None if the driver does not report it. ``peers``: the UUIDs
    of the devices whose memory this one can read. ``index``: the driver's number, from 0, in the order of the PCI bus;
    the parts of a divided device (MIG) all have the number of the whole. ``unexplained_bytes``: memory that is used by
    none of the processes that are seen from here: those of other containers, and the driver's own 1 GiB or less."""

    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    utilisation_percent: int | None
    peers: tuple[str, ...]
    index: int
    processes: tuple[DeviceProcess, ...]
    unexplained_bytes: int


@dataclass(frozen=True, slots=True)
class NvidiaDevices:
    """NVIDIA's devices of this host. ``reason``: the cause if no device was found, else empty. ``driver``: its
    version."""

    devices: tuple[NvidiaDevice, ...]
    reason: str
    driver: str = ""


def read_devices(nvml: Any = None) -> NvidiaDevices:
    """All devices of the machine; a divided device (MIG) is listed as its parts. ``nvml``: the module of nvidia-ml-py;
    None: the installed one."""
    nvml = nvml or import_nvml()
    if nvml is None:
        return NvidiaDevices((), f"nvidia-ml-py is not installed ({MISSING})")
    try:
        with session(nvml):
            driver = _text(nvml.nvmlSystemGetDriverVersion())
            handles = _all_parts(nvml)
            handles_by_uuid = {_text(nvml.nvmlDeviceGetUUID(handle)): handle for _, handle in handles}
            devices = tuple(_device(nvml, index, handle, handles_by_uuid) for index, handle in handles)
    except nvml.NVMLError as error:
        return NvidiaDevices((), f"the driver refuses: {error}")
    return NvidiaDevices(devices, "" if devices else "the driver knows no device", driver)


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The load of one device at a moment. ``utilisation_percent``: as in ``NvidiaDevice``."""

    used_bytes: int
    utilisation_percent: int | None


class DeviceMonitor:
    """Reads the load of all devices of the machine, again and again. A call may block for some milliseconds."""

    def __init__(self, nvml: Any = None) -> None:
        """``nvml``: as in ``read_devices``."""
        self._nvml = nvml or import_nvml()
        self._handles: dict[str, Any] | None = None

    def read(self) -> dict[str, DeviceUse]:
        """The load by UUID. Empty without devices, and from the first error of the driver on."""
        if self._nvml is None:
            return {}
        try:
            if self._handles is None:
                self._handles = self._read_handles()
            return {uuid: self._use(handle) for uuid, handle in self._handles.items()}
        except self._nvml.NVMLError:
            self.close()
            self._nvml = None
            return {}

    def close(self) -> None:
        """Leaves the driver. May be called again."""
        if self._nvml is not None and self._handles is not None:
            self._handles = None
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _read_handles(self) -> dict[str, Any]:
        self._nvml.nvmlInit()
        return {_text(self._nvml.nvmlDeviceGetUUID(part)): part for _, part in _all_parts(self._nvml)}

    def _use(self, handle: Any) -> DeviceUse:
        free, total = memory_of(self._nvml, handle)
        return DeviceUse(total - free, _utilisation(self._nvml, handle))


def _all_parts(nvml: Any) -> list[tuple[int, Any]]:
    """The number of each device, and the handle of each of its parts."""
    wholes = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    return [(number, part) for number, whole in enumerate(wholes) for part in _parts(nvml, whole)]


def _parts(nvml: Any, whole: Any) -> list[Any]:
    """The handles of a device's parts (MIG); the device's own if it is not divided."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(whole)
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(whole) if current else 0
    except nvml.NVMLError:  # a device that can't be divided
        return [whole]
    if not current:
        return [whole]
    parts = []
    for number in range(count):
        try:
            parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, number))
        except nvml.NVMLError:  # this many parts were not made
            continue
    return parts


def _device(nvml: Any, index: int, handle: Any, handles_by_uuid: dict[str, Any]) -> NvidiaDevice:
    free, total = memory_of(nvml, handle)
    uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    computing = tuple(starmap(DeviceProcess, computing_processes(nvml, handle)))
    drawing = tuple(starmap(DeviceProcess, drawing_processes(nvml, handle)))
    return NvidiaDevice(
        uuid, _text(nvml.nvmlDeviceGetName(handle)), total, free,
        _utilisation(nvml, handle),
        tuple(other for other, its in handles_by_uuid.items() if other != uuid and _reads(nvml, handle, its)),
        index, computing, _unexplained_bytes(total - free, {*computing, *drawing}),
    )  # fmt: skip


def _unexplained_bytes(used: int, processes: set[DeviceProcess]) -> int:
    """0 if the memory of a process is not reported: it may have all of it."""
    sizes = [process.memory_bytes for process in processes]
    return 0 if None in sizes else max(0, used - sum(size or 0 for size in sizes))


def _utilisation(nvml: Any, handle: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except nvml.NVMLError:  # parts of a device (MIG) have none
        return None


def _reads(nvml: Any, reader: Any, other: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(reader, other, nvml.NVML_P2P_CAPS_INDEX_READ)
    except nvml.NVMLError:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _text(value: Any) -> str:
    """Older versions of the package return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
