"""Device memory: states in buffers that other processes open by handle."""

from collections.abc import Iterable
from typing import Any

from .devices import Devices
from .near_cores import side_of, stay_near


def find_devices(names: Iterable[str]) -> Devices[Any] | None:
    """The devices for tensors on devices that PyTorch names ``names``: None if all are ``cpu``. From now on this
    process stays on the cores near all devices that it sees.

    Raises UnknownDevice for one that this process does not see.
    """
    names = list(names)
    if set(names) <= {"cpu"}:
        return None
    from .cuda import CudaDevices  # imports PyTorch

    devices = CudaDevices(names)
    stay_near(devices.seen())
    return devices


def find_side(devices: Devices[Any] | None) -> int | None:
    """The side of the host (NUMA node) on which the devices of this process's computations are; None if there is not
    one. Memory that others lend to this process should be there."""
    return None if devices is None else side_of(devices.visible())
