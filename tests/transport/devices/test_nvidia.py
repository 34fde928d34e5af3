"""Devices as the driver reports them, with calls of nvidia-ml-py that are made up."""

from types import SimpleNamespace
from typing import Any

import pytest

from flexmarl.transport.devices import nvidia
from flexmarl.transport.devices.nvidia import NvidiaDevice, process_memory, read_devices


class NVMLError(Exception):
    pass


class Driver:
    """Two devices; the first reads the second's memory."""

    NVMLError = NVMLError
    NVML_P2P_CAPS_INDEX_READ = 0
    NVML_P2P_STATUS_OK = 0

    def __init__(self, devices: int = 2, fails: str = "") -> None:
        self._devices = [f"handle{n}" for n in range(devices)]
        self._fails = fails
        self.initialised = 0

    def nvmlInit(self) -> None:  # noqa: N802  # the package's names
        self._check("nvmlInit")
        self.initialised += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.initialised -= 1

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
        return [SimpleNamespace(pid=7, usedGpuMemory=5), SimpleNamespace(pid=8, usedGpuMemory=None)]

    def _check(self, call: str) -> None:
        if call == self._fails:
            raise NVMLError("Not Supported")


def test_devices_are_read() -> None:
    driver = Driver()
    found = read_devices(driver)
    assert found.devices == (
        NvidiaDevice("GPU-handle0", "H100", 80, 30, 93, ("GPU-handle1",)),
        NvidiaDevice("GPU-handle1", "H100", 80, 30, 93, ()),
    )
    assert found.reason == "" and driver.initialised == 0


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
    assert nvidia.process_memory(7) == {}


def test_the_memory_of_a_process_is_read_by_device() -> None:
    assert process_memory(7, Driver()) == {"GPU-handle0": 5, "GPU-handle1": 5}
    assert process_memory(8, Driver()) == {}
    assert process_memory(7, Driver(fails="nvmlDeviceGetComputeRunningProcesses")) == {}
