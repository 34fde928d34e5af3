"""Memory as the driver reports it, with calls of nvidia-ml-py that are made up."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from flexmarl.transport.device_memory.driver_memory import DriverMemory
from flexmarl.transport.errors import DeviceError
from flexmarl.transport.statistics import MemoryUse


class NVMLError(Exception):
    pass


class Driver:
    """Knows one whole device, and one part of another."""

    NVMLError = NVMLError

    def __init__(self, fails: str = "") -> None:
        self._fails = fails
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self._fails:
            raise NVMLError("Driver Not Loaded")

    def nvmlInit(self) -> None:  # noqa: N802  # the package's names
        self._call("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self._call("nvmlDeviceGetHandleByUUID")
        if uuid not in ("GPU-whole", "MIG-part"):
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        self._call("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=80, free=30)


def test_memory_is_read_again_and_again_within_one_use_of_the_driver() -> None:
    driver = Driver()
    memory = DriverMemory(driver)
    assert [memory.read("GPU-whole") for _ in range(3)] == [MemoryUse(30, 80)] * 3
    assert (driver.calls.count("nvmlInit"), driver.calls.count("nvmlDeviceGetHandleByUUID")) == (1, 1)


def test_a_part_of_a_device_is_found_by_the_drivers_name() -> None:
    assert DriverMemory(Driver()).read("GPU-part") == MemoryUse(30, 80)


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetMemoryInfo"])
def test_a_driver_that_does_not_answer_is_an_error_of_the_device(call: str) -> None:
    with pytest.raises(DeviceError, match="device GPU-whole: its driver .*Driver Not Loaded"):
        DriverMemory(Driver(call)).read("GPU-whole")


def test_without_the_package_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(DeviceError, match="pip install nvidia-ml-py"):
        DriverMemory().read("GPU-whole")
