"""The paths of one process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..arena import Arena
from ..devices.devices import Devices
from ..handle import PathName
from ..network.bulk import Bulk
from ..select import Place
from ..workers import CopyWorkers
from .cuda_ipc import CudaIpcPath
from .local import LocalPath
from .shm import ShmPath
from .tcp import TcpPath
from .transfer_path import TransferPath


@dataclass(frozen=True, slots=True)
class PathTable:
    """``tcp``: None if states are not exchanged with other hosts. ``by_name``: all paths."""

    shm: ShmPath
    tcp: TcpPath | None
    by_name: dict[PathName, TransferPath[Any]]

    @classmethod
    def of(
        cls,
        place: Place,
        directory: Path,
        arena: Arena,
        workers: CopyWorkers,
        devices: Devices[Any] | None,
        bulk: Bulk | None,
    ) -> "PathTable":
        shm = ShmPath(place, directory, arena, workers)
        by_name: dict[PathName, TransferPath[Any]] = {"local": LocalPath(place, workers), "shm": shm}
        if devices is not None:
            controls = Arena(directory, f"{place.process}-ipc")
            by_name["cuda_ipc"] = CudaIpcPath(place, directory, controls, workers, devices)
        tcp = None
        if bulk is not None:
            tcp = by_name["tcp"] = TcpPath(place, directory, shm, bulk)
            shm.serving = tcp.serving
        return cls(shm, tcp, by_name)
