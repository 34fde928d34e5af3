"""The memory of NVIDIA's devices as their driver reports it, again and again."""

import threading
from typing import Any

from ..errors import DeviceError
from ..nvidia_driver import MISSING, device_handle, import_nvml, memory_of
from ..statistics import MemoryUse


class DriverMemory:
    """May be used by several threads. ``nvml``: the module of nvidia-ml-py; None: the installed one, from the first
    call on."""

    # Not CUDA's cudaMemGetInfo: it makes a context of the process on each device that is asked for, of half a GB there.

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._handles: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._is_open = False

    def read(self, device: str) -> MemoryUse:
        """``device``: a UUID as CUDA has it, that of a part (MIG) too. Raises DeviceError."""
        with self._lock:
            nvml = self._open(device)
            try:
                if device not in self._handles:
                    self._handles[device] = device_handle(nvml, device)
                free, total = memory_of(nvml, self._handles[device])
            except nvml.NVMLError as error:
                raise DeviceError(device, f"its driver reports no memory: {error}") from error
        return MemoryUse(free, total)

    def _open(self, device: str) -> Any:
        self._nvml = self._nvml or import_nvml()
        if self._nvml is None:
            raise DeviceError(device, f"{MISSING}: its driver can't be asked")
        if not self._is_open:
            try:
                self._nvml.nvmlInit()
            except self._nvml.NVMLError as error:
                raise DeviceError(device, f"its driver does not answer: {error}") from error
            self._is_open = True
        return self._nvml
