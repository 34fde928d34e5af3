"""Finds the devices of this process."""

from typing import Any

from .devices import Devices


def find_devices(device: str) -> Devices[Any] | None:
    """The devices for tensors on ``device``, as PyTorch names it: None for ``cpu``.

    Raises UnknownDevice for ``cuda`` if this process sees none.
    """
    if device == "cpu":
        return None
    from .cuda import CudaDevices  # imports PyTorch

    return CudaDevices()
