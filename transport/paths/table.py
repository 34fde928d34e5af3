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
from .collective import CollectivePath
from .cuda_ipc import CudaIpcPath
from .shm import ShmPath
from .tcp import TcpPath
from .transfer_path import PathInPlace, TransferPath


@dataclass(frozen=True, slots=True)
class PathTable:
    """``tcp``: None if states are not exchanged with other hosts. ``in_place``: those whose memory a reader may
    use where it lies."""

    shm: ShmPath
    collective: CollectivePath
    tcp: TcpPath | None
    in_place: dict[PathName, PathInPlace[Any]]

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
        in_place: dict[PathName, PathInPlace[Any]] = {"shm": shm}
        if devices is not None:
            controls = Arena(directory, f"{place.process}-ipc")
            in_place["cuda_ipc"] = CudaIpcPath(place, directory, controls, workers, devices)
        tcp = None
        if bulk is not None:
            tcp = in_place["tcp"] = TcpPath(place, directory, shm, bulk)
            shm.serving, shm.compared = tcp.serving, tcp.compared
        return cls(shm, CollectivePath(directory), tcp, in_place)

    def by_name(self) -> dict[PathName, TransferPath[Any]]:
        return {**self.in_place, "collective": self.collective}
