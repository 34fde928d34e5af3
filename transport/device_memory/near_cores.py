"""The processor cores on the side of the host (NUMA node) on which a process's devices are.

Copies between a device and memory of the other side cross the link between the processors. Threads of this process that
run near its devices have near what they touch first: the kernel puts memory on the side of the thread that writes it,
and a file in memory on the side of the thread that reserves its bytes. It stays there, whichever process uses it later:
a process that lends memory reserves it ``on_side`` of the borrower's devices.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from ..nvidia_driver import device_handle, import_nvml, session

_SYSFS: Final = Path("/sys")


def near_cores(
    sides: Collection[int], cores: Mapping[int, Collection[int]], allowed: Collection[int]
) -> set[int]:
    """Chooses among the ``allowed`` cores those of all ``sides``. Empty if nothing is to change: a side is not known,
    no core of them is allowed, or all cores are near. Pure."""
    if not sides or not set(sides) <= cores.keys():
        return set()
    near = {core for side in sides for core in cores[side]} & set(allowed)
    return set() if near == set(allowed) else near


def stay_near(devices: Sequence[str], nvml: Any = None, sysfs: Path = _SYSFS) -> set[int]:
    """Keeps all threads of this process, and those that they start, on the cores near ``devices``, which are UUIDs as
    CUDA has them. Gives these cores; empty if all stays as it was.

    ``nvml``: the module of nvidia-ml-py; None: the installed one.
    """
    sides = _sides_of(devices, nvml or import_nvml(), sysfs)
    chosen = near_cores(sides, _cores_by_side(sysfs), os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir() if chosen else ():
        with suppress(OSError):  # it has ended, or the system refuses
            os.sched_setaffinity(int(thread.name), chosen)
    return chosen


def side_of(devices: Sequence[str], nvml: Any = None, sysfs: Path = _SYSFS) -> int | None:
    """The number of the side on which all ``devices`` are, as the kernel counts them; None if it is not known, or if
    they are on several. ``devices``, ``nvml``: see ``stay_near``."""
    sides = _sides_of(devices, nvml or import_nvml(), sysfs)
    return sides.pop() if len(sides) == 1 else None


@contextmanager
def on_side(side: int | None, sysfs: Path = _SYSFS) -> Iterator[None]:
    """Keeps this thread, and threads that it starts meanwhile, on the cores of a ``side`` until the context ends. Does
    nothing for None, and on a host with one side."""
    if side is None:
        yield
        return
    before = os.sched_getaffinity(0)  # 0: this thread, not its process
    chosen = near_cores([side], _cores_by_side(sysfs), before)
    with suppress(OSError):  # the system refuses, and memory lies where the thread happens to run
        os.sched_setaffinity(0, chosen or before)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def _sides_of(devices: Sequence[str], nvml: Any, sysfs: Path) -> set[int]:
    """The sides of all ``devices``; empty if one of them is not known."""
    if nvml is None:
        return set()
    try:
        with session(nvml):
            buses = [nvml.nvmlDeviceGetPciInfo(device_handle(nvml, device)).busId for device in devices]
    except nvml.NVMLError:
        return set()
    sides = {_side_of(bus if isinstance(bus, str) else bus.decode(), sysfs) for bus in buses}
    return sides if min(sides, default=-1) >= 0 else set()


def _side_of(bus: str, sysfs: Path) -> int:
    """The number of the side; -1 if the kernel does not know it. ``bus``: as the driver writes it, with a domain of
    eight digits; the kernel's has four."""
    domain, _, place = bus.lower().partition(":")
    file = sysfs / "bus/pci/devices" / f"{int(domain, 16):04x}:{place}" / "numa_node"
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return -1


def _cores_by_side(sysfs: Path) -> dict[int, set[int]]:
    return {
        int(file.parent.name.removeprefix("node")): _cores_in(file.read_text())
        for file in sysfs.glob("devices/system/node/node[0-9]*/cpulist")
    }


def _cores_in(text: str) -> set[int]:
    """The numbers of a list of the kernel: ``0-3,8``; empty for a side without cores."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
