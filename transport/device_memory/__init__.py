"""Device memory: states in buffers that other processes open by handle."""

from collections.abc import Iterable
from typing import Any

from .devices import Devices
from .near_cores import stay_near


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
