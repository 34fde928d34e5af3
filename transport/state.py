"""Set and Get: the public interface of the transport."""

import asyncio
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ..core.telemetry import get_logger
from .arena import check_directory
from .errors import TransferTimeout, TransportClosed
from .handle import LentMemory, PathName, StateHandle
from .paths.buckets import Layout
from .paths.kinds import kind_of
from .paths.local import LocalPath
from .paths.shm import ShmPath
from .paths.tensor_kind import Tensors
from .paths.transfer_path import TransferPath
from .select import Place, check_reach, select_path, this_host
from .workers import CopyWorkers

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

T = TypeVar("T", "Tensor", "np.ndarray[Any, Any]")
log = get_logger(__name__)


@dataclass(slots=True)
class PathStatistics:
    """Totals of one path since the transport was opened; transfers that failed are not counted."""

    sets: int = 0
    set_bytes: int = 0
    set_s: float = 0.0
    gets: int = 0
    get_bytes: int = 0
    get_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TransportStatistics:
    """``by_path``: of the paths that were used. ``running``: copies in threads now. ``arena_bytes``: size of the arenas
    that this process has made."""

    by_path: dict[PathName, PathStatistics]
    running: int
    arena_bytes: int

    def numbers(self) -> dict[str, float]:
        """The fields by name: ``transport_running``, ``transport_arena_bytes``, ``transport_<path>_<field>``."""
        by_path = {
            f"transport_{path}_{name}": value
            for path, statistics in self.by_path.items()
            for name, value in asdict(statistics).items()
        }
        return {"transport_running": self.running, "transport_arena_bytes": self.arena_bytes, **by_path}


def bucket_bytes(tensors: Tensors) -> int:
    """Bytes of memory that ``tensors`` take when they are set, the gaps between them included."""
    return Layout.of(tensors).size_bytes if tensors else 0


class StateTransport:
    """Named, versioned collections of tensors: set here, read in any process of the host that has the handle.

    They are PyTorch's tensors, or all NumPy arrays: a process that has only those does not import PyTorch. A state set
    with one may be read into the other.

        async with StateTransport(runtime_dir) as transport:
            copied = await transport.set("solver", weights, version=3)  # for any process of the host
            alias = await transport.set("solver", weights, version=3, to=transport.place)  # for this process
            await transport.get(copied, into=own_weights)

    One per process, an async context manager, used from one event loop. ``runtime_dir`` is the run's directory on tmpfs
    (such as /dev/shm/<run>), of mode 0700, the same for all processes of a host; the process that made it removes it.
    Leaving the context removes this process's states, and transfers under way raise TransportClosed. Entering raises
    UnsafeDirectory if other users can write to the directory.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self.place = Place(this_host(), f"{os.getpid()}_{secrets.token_hex(4)}")
        """This process, as a destination for ``set``."""
        self._runtime_dir = runtime_dir
        self._workers = CopyWorkers()
        self._shm = ShmPath(self.place, runtime_dir, self._workers)
        self._paths: dict[PathName, TransferPath] = {
            "local": LocalPath(self.place, self._workers),
            "shm": self._shm,
        }
        self._open = False
        self._logged: dict[tuple[str, str], tuple[PathName, Place | None]] = {}
        self._statistics: dict[PathName, PathStatistics] = {}

    async def __aenter__(self) -> "StateTransport":
        check_directory(self._runtime_dir)
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stops transfers under way, removes this process's arenas and all mappings. May be called again."""
        self._open = False
        try:
            await self._workers.close()
        finally:
            for path in self._paths.values():
                await path.close()

    async def set(
        self,
        key: str,
        tensors: Tensors,
        *,
        version: int,
        to: Place | None = None,
        lent: LentMemory | None = None,
        timeout_s: float = 60.0,
    ) -> StateHandle:
        """Publishes ``tensors`` as ``version`` of ``key`` and returns the handle to send in messages.

        By default any process of this host may read the state. It is a copy: the tensors may change as soon as this
        returns. If ``to`` is this process's own ``place``, nothing is copied: the handle is an alias of the tensors and
        is valid in this process only. The two newest versions of a key stay readable.

        With ``lent`` the copy is in memory that another process has lent (``lend``): it stays readable when this
        process ends, until the same memory is set again or taken back, and the caller sees to it that it is not written
        by two at once.

        Tensors of any shape, stride and device; dtypes of ``handle.DTYPE_BYTES``. After a cancellation or a timeout
        nothing half written is published, the version set before stays readable, and no thread reads the tensors any
        more. Concurrent sets of one key run one after the other.

        Raises NoPath, ArenaSpace, TransferTimeout, TransportClosed, TypeError for a tensor that can't travel, and
        ValueError for a version outside 0 .. 2**63-1.
        """
        self._check_open()
        if not 0 <= version < 2**63:
            raise ValueError(f"{key}: version {version} is outside 0 .. 2**63-1")
        kind = kind_of(tensors.values())
        size_bytes = sum(map(kind.size_bytes, tensors.values()))
        devices = set(map(kind.device, tensors.values()))
        path = select_path(self.place, to, devices=devices, size_bytes=size_bytes)
        self._log("set", key, path, to, devices, size_bytes)
        started = time.perf_counter()
        with _timeout_of("set", key, version, path, size_bytes, timeout_s):
            async with asyncio.timeout(timeout_s):
                if lent is None:
                    handle = await self._paths[path].put(key, tensors, version=version)
                else:
                    handle = await self._shm.put_lent(key, tensors, lent, version=version)
        totals = self._statistics.setdefault(path, PathStatistics())
        totals.sets += 1
        totals.set_bytes += size_bytes
        totals.set_s += time.perf_counter() - started
        return handle

    @overload
    async def get(
        self, handle: StateHandle, *, into: None = None, timeout_s: float = 60.0
    ) -> "dict[str, Tensor]": ...

    @overload
    async def get(
        self, handle: StateHandle, *, into: Mapping[str, T], timeout_s: float = 60.0
    ) -> dict[str, T]: ...

    @overload
    async def get(
        self, handle: StateHandle, *, into: "Mapping[str, Tensor] | None", timeout_s: float = 60.0
    ) -> "dict[str, Tensor]": ...

    async def get(
        self, handle: StateHandle, *, into: Mapping[str, Any] | None = None, timeout_s: float = 60.0
    ) -> dict[str, Any]:
        """Returns the tensors of ``handle``: one whole version, checked against its digest.

        With ``into`` they are written there, on any device; names, shapes and dtypes must equal the state's, which is
        checked before the first byte is written. Without it they are new tensors on the CPU, or the tensors that were
        set if the path is ``local``.

        Raises StateMismatch, with ``into`` untouched. Raises StaleHandle (two newer versions were set, or the owner has
        left), CorruptState, ForeignHandle, NoPath, TransferTimeout, TransportClosed: after these, and after a
        cancellation, the contents of ``into`` are undefined and must be overwritten before use.
        """
        self._check_open()
        devices = set(map(kind_of(into.values()).device, into.values())) if into else {"cpu"}
        source, path = Place(handle.host, handle.process), handle.path
        check_reach(path, source, self.place, devices=devices, size_bytes=handle.size_bytes)
        self._log("get", handle.key, path, source, devices, handle.size_bytes)
        started = time.perf_counter()
        with _timeout_of("get", handle.key, handle.version, path, handle.size_bytes, timeout_s):
            async with asyncio.timeout(timeout_s):
                tensors = await self._paths[path].fetch(handle, into)
        totals = self._statistics.setdefault(path, PathStatistics())
        totals.gets += 1
        totals.get_bytes += handle.size_bytes
        totals.get_s += time.perf_counter() - started
        return tensors

    async def lend(self, key: str, size_bytes: int) -> tuple[LentMemory, LentMemory]:
        """Two pieces of this process's memory, of ``size_bytes`` or a little more, for ``set`` in other processes of
        the host. Raises ArenaSpace, TransportClosed."""
        self._check_open()
        return await self._shm.lend(key, size_bytes)

    def take_back(self, lent: LentMemory) -> None:
        """Frees both pieces of a ``lend``. The states in them are gone."""
        self._shm.take_back(lent.location)

    async def store_away(self, lent: LentMemory, slots: Sequence[int], file: Path) -> None:
        """Writes the states in ``slots`` (0, 1 or both) of lent memory to a new file, and frees the memory. Raises
        OSError, and the memory is as before then; TransportClosed."""
        self._check_open()
        await self._shm.store_away(lent, slots, file)

    async def bring_back(
        self, lent: LentMemory, slots: Sequence[int], file: Path
    ) -> tuple[LentMemory, LentMemory]:
        """Lends memory again with the states that ``store_away`` has written, and removes the file. Handles of these
        states are valid again with the new ``location``. Raises OSError and ArenaSpace, and the file is as before then;
        TransportClosed."""
        self._check_open()
        return await self._shm.bring_back(lent, slots, file)

    def statistics(self) -> TransportStatistics:
        return TransportStatistics(
            by_path={path: replace(totals) for path, totals in self._statistics.items()},
            running=self._workers.running,
            arena_bytes=self._shm.arena_bytes,
        )

    def _check_open(self) -> None:
        if not self._open:
            raise TransportClosed

    def _log(
        self, operation: str, key: str, path: PathName, peer: Place | None, devices: Set[str], size_bytes: int
    ) -> None:
        # Only if the path has changed, not at every optimizer step.
        if self._logged.get((operation, key)) != (path, peer):
            self._logged[operation, key] = path, peer
            log.debug(
                "transfer path chosen",
                operation=operation,
                key=key,
                path=path,
                peer=peer,
                devices=sorted(devices),
                size_bytes=size_bytes,
            )


@contextmanager
def _timeout_of(
    operation: str, key: str, version: int, path: PathName, size_bytes: int, timeout_s: float
) -> Iterator[None]:
    try:
        yield
    except TimeoutError as expired:
        raise TransferTimeout(operation, key, version, path, size_bytes, timeout_s) from expired
