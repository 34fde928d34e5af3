"""The module of nvidia-ml-py, made up: GPUs with names, memory and processes."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from flexmarl.launch.hosts.nvidia import NvidiaDevices, read_devices


class NVMLError(Exception):
    pass


@dataclass(frozen=True)
class FakeGpu:
    """``processes``: memory by process id."""

    uuid: str
    total: int = 80 << 30
    free: int = 80 << 30
    processes: tuple[tuple[int, int], ...] = ()
    name: str = "H100"


class FakeNvml:
    NVMLError = NVMLError
    NVML_P2P_CAPS_INDEX_READ = 0
    NVML_P2P_STATUS_OK = 0

    def __init__(self, *gpus: FakeGpu) -> None:
        self._gpus = gpus

    def nvmlInit(self) -> None:  # noqa: N802  # the package's names
        if not self._gpus:
            raise NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.65.06"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        return self._gpus[index]

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:  # noqa: N802
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:  # noqa: N802
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:  # noqa: N802
        return SimpleNamespace(total=gpu.total, free=gpu.free)

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=0)

    def nvmlDeviceGetP2PStatus(self, one: FakeGpu, other: FakeGpu, index: int) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in gpu.processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: FakeGpu) -> list[Any]:  # noqa: N802
        return []

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:  # noqa: N802
        raise NVMLError("Not Supported")


def devices_of(*gpus: FakeGpu) -> NvidiaDevices:
    return read_devices(FakeNvml(*gpus))
