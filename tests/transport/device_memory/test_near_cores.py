"""The choice of cores near devices, on topologies that are made up."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexmarl.transport import device_memory
from flexmarl.transport.device_memory import cuda
from flexmarl.transport.device_memory import near_cores as subject
from flexmarl.transport.device_memory.near_cores import near_cores, on_side, side_of, stay_near

TWO_SIDES = {0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}
EIGHT = set(range(8))


@pytest.mark.parametrize(
    ("sides", "allowed", "chosen"),
    [
        ({0}, EIGHT, {0, 1, 4, 5}),
        ({1}, EIGHT, {2, 3, 6, 7}),
        ({1}, {0, 2, 3}, {2, 3}),  # a container's
        ({0, 1}, EIGHT, set()),
        ({1}, {0, 1}, set()),
        ({1}, {2, 6}, set()),
        ({2}, EIGHT, set()),
        (set(), EIGHT, set()),
    ],
)
def test_cores_are_chosen_among_those_that_are_allowed(
    sides: set[int], allowed: set[int], chosen: set[int]
) -> None:
    assert near_cores(sides, TWO_SIDES, allowed) == chosen


class NVMLError(Exception):
    pass


class Driver:
    """Knows the devices ``GPU-0`` and ``GPU-1``, on one bus each."""

    NVMLError = NVMLError

    def nvmlInit(self) -> None:  # noqa: N802  # the package's names
        """There is nothing to open."""

    def nvmlShutdown(self) -> None:  # noqa: N802
        """There is nothing to close."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in ("GPU-0", "GPU-1"):
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(busId=f"00000000:{'3B' if handle == 'GPU-0' else 'AF'}:00.0".encode())


class Host:
    """A host with two sides and a device on each. ``affinity``: what threads of this process were given."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, sides: tuple[str, str] = ("0", "1")
    ) -> None:
        self.sysfs = folder
        self.affinity: dict[int, set[int]] = {}
        for bus, side in zip(("3b", "af"), sides, strict=True):
            device = folder / "bus/pci/devices" / f"0000:{bus}:00.0"
            device.mkdir(parents=True)
            (device / "numa_node").write_text(f"{side}\n")
        for side, cores in (("0", "0-1,4-5\n"), ("1", "2-3,6-7\n"), ("2", "\n")):
            node = folder / "devices/system/node" / f"node{side}"
            node.mkdir(parents=True)
            (node / "cpulist").write_text(cores)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: EIGHT)
        monkeypatch.setattr(os, "sched_setaffinity", self.affinity.__setitem__)

    def stay_near(self, *devices: str) -> set[int]:
        return stay_near(devices, Driver(), self.sysfs)


def test_all_threads_stay_on_the_side_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path, monkeypatch)
    assert host.stay_near("GPU-1") == {2, 3, 6, 7}
    assert host.affinity[os.getpid()] == {2, 3, 6, 7} == host.affinity[threading.get_native_id()]
    assert host.stay_near("GPU-0") == {0, 1, 4, 5}


def test_without_one_side_all_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path / "two", monkeypatch)
    assert host.stay_near("GPU-0", "GPU-1") == set() == host.stay_near("GPU-2") == host.stay_near()
    unknown = Host(tmp_path / "unknown", monkeypatch, sides=("-1", "0"))
    assert unknown.stay_near("GPU-0") == set() == unknown.stay_near("GPU-0", "GPU-1")
    assert stay_near(["GPU-0"], Driver(), tmp_path / "nothing") == set()
    assert host.affinity == unknown.affinity == {}


def test_the_side_of_devices_is_known_if_they_are_all_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path, monkeypatch)
    sides = [side_of(devices, Driver(), host.sysfs) for devices in (["GPU-0"], ["GPU-1"], ["GPU-1", "GPU-1"])]
    assert sides == [0, 1, 1]
    unknown: tuple[list[str], ...] = ([], ["GPU-2"], ["GPU-0", "GPU-1"])
    assert [side_of(devices, Driver(), host.sysfs) for devices in unknown] == [None] * 3


def test_a_thread_is_on_a_side_until_its_context_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path, monkeypatch)
    with on_side(1, host.sysfs):
        assert host.affinity == {0: {2, 3, 6, 7}}
    assert host.affinity == {0: EIGHT}
    host.affinity.clear()
    for side in (None, 7):
        with on_side(side, host.sysfs):
            assert host.affinity in ({}, {0: EIGHT})


def test_a_system_that_refuses_a_side_leaves_a_thread_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path, monkeypatch)

    def refuse(thread: int, cores: set[int]) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with on_side(1, host.sysfs):
        pass


def test_without_the_driver_s_library_all_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "import_nvml", lambda: None)
    assert stay_near(["GPU-0"]) == set()


def test_a_process_stays_near_all_devices_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    devices = SimpleNamespace(seen=lambda: ["GPU-0", "GPU-1"])
    monkeypatch.setattr(cuda, "CudaDevices", lambda names: devices)
    monkeypatch.setattr(device_memory, "stay_near", asked.append)
    assert device_memory.find_devices(["cpu"]) is None and asked == []
    assert device_memory.find_devices(["cuda"]) is devices
    assert asked == [["GPU-0", "GPU-1"]]


def test_memory_is_lent_on_the_side_of_the_devices_that_a_process_computes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices: Any = SimpleNamespace(seen=lambda: ["GPU-0", "GPU-1"], visible=lambda: ("GPU-1",))
    monkeypatch.setattr(device_memory, "side_of", {("GPU-1",): 1}.__getitem__)
    assert device_memory.find_side(devices) == 1 and device_memory.find_side(None) is None
