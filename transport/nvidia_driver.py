"""NVIDIA's driver as a program may ask it (NVML, by nvidia-ml-py): without CUDA, without PyTorch.

Functions take the module of nvidia-ml-py, whose ``NVMLError`` they raise.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

MISSING: Final = "pip install nvidia-ml-py"
"""The remedy if there is no such module."""


def import_nvml() -> Any:
    """The module; None if it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


@contextmanager
def session(nvml: Any) -> Iterator[None]:
    """The driver may be asked within this context. Sessions may overlap."""
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def device_handle(nvml: Any, uuid: str) -> Any:
    """``uuid``: as CUDA has it, that of a part (MIG) too."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        # CUDA has no prefix; ours is that of whole devices. The driver knows parts by another one.
        return nvml.nvmlDeviceGetHandleByUUID(uuid.replace("GPU-", "MIG-", 1))


def memory_of(nvml: Any, handle: Any) -> tuple[int, int]:
    """Free bytes and all bytes of a device."""
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return memory.free, memory.total


def computing_processes(nvml: Any, handle: Any) -> tuple[tuple[int, int | None], ...]:
    """Ids of the processes that compute on a device, and their memory there; None if the driver does not report it.
    Empty if it does not list them."""
    return _processes(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)


def drawing_processes(nvml: Any, handle: Any) -> tuple[tuple[int, int | None], ...]:
    """The same of those that draw."""
    return _processes(nvml, nvml.nvmlDeviceGetGraphicsRunningProcesses, handle)


def _processes(nvml: Any, listed: Any, handle: Any) -> tuple[tuple[int, int | None], ...]:
    with suppress(nvml.NVMLError):
        return tuple((process.pid, process.usedGpuMemory) for process in listed(handle))
    return ()
