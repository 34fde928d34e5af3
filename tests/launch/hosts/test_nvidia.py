"""Devices as the driver reports them, with calls of nvidia-ml-py that are made up."""

from types import SimpleNamespace
from typing import Any

import pytest

from flexmarl.launch.hosts import nvidia
from flexmarl.launch.hosts.nvidia import DeviceMonitor, DeviceProcess, DeviceUse, NvidiaDevice, read_devices


class NVMLError(Exception):
    pass


class Driver:
    """Two devices; the first reads the second's memory. ``parts``: of the first one (MIG); 0: it is not divided.
    ``sizes``: of the processes on each."""

    NVMLError = NVMLError
    NVML_P2P_CAPS_INDEX_READ = 0
    NVML_P2P_STATUS_OK = 0

    def __init__(
        self, devices: int = 2, fails: str = "", parts: int = 0, sizes: tuple[int | None, ...] = (5, None)
    ) -> None:
        self._devices = [f"handle{n}" for n in range(devices)]
        self._fails = fails
        self._parts = parts
        self._sizes = sizes
        self.initialised = 0

    def nvmlInit(self) -> None:  # noqa: N802  # the package's names
        self._check("nvmlInit")
        self.initialised += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.initialised -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.65.06"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return self._devices[index]

    def nvmlDeviceGetUUID(self, handle: str) -> str | bytes:  # noqa: N802
        return f"GPU-{handle}" if handle == "handle0" else f"GPU-{handle}".encode()

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return "H100"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(total=80, free=30)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        self._check("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=93)

    def nvmlDeviceGetP2PStatus(self, one: str, other: str, index: int) -> int:  # noqa: N802
        self._check("nvmlDeviceGetP2PStatus")
        return int((one, other) != ("handle0", "handle1"))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        self._check("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=7 + n, usedGpuMemory=size) for n, size in enumerate(self._sizes)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=1, usedGpuMemory=2)]

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        if not self._parts:
            raise NVMLError("Not Supported")
        divided = int(handle == "handle0")
        return [divided, divided]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:  # noqa: N802
        if index >= self._parts:
            raise NVMLError("Not Found")
        return f"{handle}/{index}"

    def _check(self, call: str) -> None:
        if call == self._fails:
            raise NVMLError("Not Supported")


PROCESSES = (DeviceProcess(7, 5), DeviceProcess(8, None))


def test_devices_are_read() -> None:
    driver = Driver()
    found = read_devices(driver)
    assert found.devices == (
        NvidiaDevice("GPU-handle0", "H100", 80, 30, 93, ("GPU-handle1",), 0, PROCESSES, 0),
        NvidiaDevice("GPU-handle1", "H100", 80, 30, 93, (), 1, PROCESSES, 0),
    )
    assert (found.reason, found.driver) == ("", "580.65.06") and driver.initialised == 0


def test_memory_without_a_process_is_counted() -> None:
    (first, _) = read_devices(Driver(sizes=(5, 3))).devices
    assert first.unexplained_bytes == 80 - 30 - 5 - 3 - 2
    (first, _) = read_devices(Driver(fails="nvmlDeviceGetComputeRunningProcesses")).devices
    assert (first.processes, first.unexplained_bytes) == ((), 80 - 30 - 2)


def test_a_divided_device_is_listed_as_its_parts() -> None:
    found = read_devices(Driver(parts=2)).devices
    assert [(device.uuid, device.index) for device in found] == [
        ("GPU-handle0/0", 0),
        ("GPU-handle0/1", 0),
        ("GPU-handle1", 1),
    ]


@pytest.mark.parametrize("call", ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetP2PStatus"])
def test_a_figure_that_the_driver_lacks_is_left_out(call: str) -> None:
    (first, _) = read_devices(Driver(fails=call)).devices
    assert (first.utilisation_percent is None, first.peers == ()) == ("Util" in call, "P2P" in call)


def test_without_a_driver_or_a_device_there_is_a_reason() -> None:
    assert read_devices(Driver(fails="nvmlInit")).reason == "the driver refuses: Not Supported"
    assert read_devices(Driver(devices=0)).reason == "the driver knows no device"


def test_without_the_package_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert nvidia.read_devices().reason.startswith("nvidia-ml-py is not installed")


def test_the_load_is_read_again_and_again_within_one_use_of_the_driver() -> None:
    driver = Driver()
    monitor = DeviceMonitor(driver)
    for _ in range(3):
        assert monitor.read() == {"GPU-handle0": DeviceUse(50, 93), "GPU-handle1": DeviceUse(50, 93)}
        assert driver.initialised == 1
    monitor.close()
    monitor.close()
    assert driver.initialised == 0


def test_without_a_driver_or_a_figure_there_is_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = DeviceMonitor(Driver(fails="nvmlDeviceGetUtilizationRates"))
    assert monitor.read()["GPU-handle0"] == DeviceUse(50, None)
    broken = DeviceMonitor(Driver(fails="nvmlInit"))
    assert broken.read() == broken.read() == {}
    broken.close()
    monkeypatch.setattr(nvidia, "import_nvml", lambda: None)
    assert DeviceMonitor().read() == {}
