"""Questions to NVIDIA's driver, with calls of nvidia-ml-py that are made up."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from flexmarl.transport import nvidia_driver


class NVMLError(Exception):
    pass


class Driver:
    """Knows one part of a device; lists no process that draws."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.sessions = 0

    def nvmlInit(self) -> None:  # noqa: N802  # the package's names
        self.sessions += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.sessions -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "MIG-part":
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(total=80, free=30, used=45)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=7, usedGpuMemory=5), SimpleNamespace(pid=8, usedGpuMemory=None)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        raise NVMLError("Not Supported")


def test_a_session_ends_also_with_an_error() -> None:
    driver = Driver()
    with pytest.raises(NVMLError), nvidia_driver.session(driver):
        assert driver.sessions == 1
        nvidia_driver.device_handle(driver, "GPU-whole")
    assert driver.sessions == 0


def test_a_part_has_memory_and_processes_as_a_device_has() -> None:
    driver = Driver()
    handle = nvidia_driver.device_handle(driver, "GPU-part")
    assert nvidia_driver.memory_of(driver, handle) == (30, 80)
    assert nvidia_driver.computing_processes(driver, handle) == ((7, 5), (8, None))
    assert nvidia_driver.drawing_processes(driver, handle) == ()


def test_the_package_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvidia_driver.import_nvml() is None
