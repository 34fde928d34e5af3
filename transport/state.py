"""Set and Get: the public face of the transport."""

import asyncio
import os
import secrets
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ..core.telemetry import get_logger
from .arena import check_directory
from .errors import TransferTimeout, TransportClosed
from .handle import PathName, StateHandle
from .paths.local import LocalPath
from .paths.shm import ShmPath
from .paths.transfer_path import TransferPath
from .select import Place, check_reach, select_path, this_host
from .workers import CopyWorkers

if TYPE_CHECKING:
    from torch import Tensor

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TransportStatistics:
    """Since the transport was opened. ``running``: copies in threads now; ``arena_bytes``: own arenas."""

    sets: int
    gets: int
    set_bytes: int
    got_bytes: int
    running: int
    arena_bytes: int


class StateTransport:
    """Named, versioned collections of tensors, to set here and to get in any process that has the handle.

    One per process, an async context manager, used from one event loop. ``directory`` is the run's own on
    tmpfs (say /dev/shm/<run>), mode 0700, the same for all processes of a host; its maker removes it.
    Leaving the context makes this process's states unreadable for others and ends transfers under way
    with TransportClosed. Entering raises UnsafeDirectory where others could write to the directory.
    """

    def __init__(self, directory: Path) -> None:
        self.place = Place(this_host(), f"{os.getpid()}_{secrets.token_hex(4)}")
        self._directory = directory
        self._workers = CopyWorkers()
        self._shm = ShmPath(self.place, directory, self._workers)
        self._paths: dict[PathName, TransferPath] = {
            "local": LocalPath(self.place, self._workers),
            "shm": self._shm,
        }
        self._open = False
        self._logged: dict[tuple[str, str], tuple[PathName, Place | None]] = {}
        self._sets = self._gets = self._set_bytes = self._got_bytes = 0

    async def __aenter__(self) -> "StateTransport":
        check_directory(self._directory)
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stops transfers under way, removes this process's arenas, unmaps all. May be called again."""
        self._open = False
        try:
            await self._workers.close()
        finally:
            for path in self._paths.values():
                await path.close()

    async def set(
        self,
        key: str,
        tensors: "Mapping[str, Tensor]",
        *,
        version: int,
        to: Place | None = None,
        timeout_s: float = 60.0,
    ) -> StateHandle:
        """Publishes ``tensors`` as ``version`` of ``key`` and returns what names them in messages.

        The state is copied, so the tensors may change as soon as this returns, unless ``to`` is this
        process's own ``place``: then the handle aliases them and is good in this process alone. By default
        any process of this host may read. The two newest versions of a key stay readable.

        Tensors of any shape, stride and device; dtypes of ``handle.DTYPE_BYTES``. When cancelled or out of
        time nothing half written is published, the version set last stays readable, and no thread reads the
        tensors any more. Concurrent sets of one key take turns.

        Raises NoPath, ArenaSpace, TransferTimeout, TransportClosed, TypeError for a tensor that can't
        travel and ValueError for a negative version.
        """
        self._check_open()
        if not 0 <= version < 2**63:
            raise ValueError(f"{key}: version {version} is outside 0 .. 2**63-1")
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        devices = {tensor.device.type for tensor in tensors.values()}
        path = select_path(self.place, to, devices=devices, size_bytes=size_bytes)
        self._log("set", key, path, to, devices, size_bytes)
        try:
            async with asyncio.timeout(timeout_s):
                handle = await self._paths[path].put(key, tensors, version=version)
        except TimeoutError as expired:
            raise TransferTimeout("set", key, version, path, size_bytes, timeout_s) from expired
        self._sets += 1
        self._set_bytes += size_bytes
        return handle

    async def get(
        self, handle: StateHandle, *, into: "Mapping[str, Tensor] | None" = None, timeout_s: float = 60.0
    ) -> "dict[str, Tensor]":
        """The tensors of ``handle``: whole, checked against their digest, never a mix of versions.

        With ``into`` they are written there, on whatever device; names, shapes and dtypes must equal the
        state's, which is checked before the first byte is written. Without, they are new tensors on the
        CPU, or the very tensors that were set where the path is ``local``.

        Raises StateMismatch, ``into`` untouched; and StaleHandle (two newer versions were set, or their
        owner left), CorruptState, ForeignHandle, NoPath, TransferTimeout, TransportClosed: after these, and
        after a cancellation, the contents of ``into`` are undefined and must be overwritten before use.
        """
        self._check_open()
        devices = {tensor.device.type for tensor in into.values()} if into else {"cpu"}
        source = Place(handle.host, handle.process)
        check_reach(handle.path, source, self.place, devices=devices, size_bytes=handle.size_bytes)
        self._log("get", handle.key, handle.path, source, devices, handle.size_bytes)
        try:
            async with asyncio.timeout(timeout_s):
                tensors = await self._paths[handle.path].fetch(handle, into)
        except TimeoutError as expired:
            raise TransferTimeout(
                "get", handle.key, handle.version, handle.path, handle.size_bytes, timeout_s
            ) from expired
        self._gets += 1
        self._got_bytes += handle.size_bytes
        return tensors

    def statistics(self) -> TransportStatistics:
        return TransportStatistics(
            sets=self._sets,
            gets=self._gets,
            set_bytes=self._set_bytes,
            got_bytes=self._got_bytes,
            running=self._workers.running,
            arena_bytes=self._shm.arena_bytes,
        )

    def _check_open(self) -> None:
        if not self._open:
            raise TransportClosed

    def _log(
        self, what: str, key: str, path: PathName, peer: Place | None, devices: Set[str], size_bytes: int
    ) -> None:
        # A path is news when it changes, not at every optimizer step.
        if self._logged.get((what, key)) != (path, peer):
            self._logged[what, key] = path, peer
            log.debug(
                "transfer path chosen",
                operation=what,
                key=key,
                path=path,
                peer=peer,
                devices=sorted(devices),
                size_bytes=size_bytes,
            )
