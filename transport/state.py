"""Set and Get: the public interface of the transport."""

import os
import secrets
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from ..core.telemetry import get_logger
from .arena import Arena
from .block import check_directory, file_bytes
from .devices.devices import DeviceMemory, Devices
from .errors import TransportClosed
from .handle import LentMemory, PathName, Rows, ShmSource, StateHandle, TensorSpec
from .paths.buckets import Layout
from .paths.collective import CollectivePath
from .paths.cuda_ipc import CudaIpcPath
from .paths.kinds import kind_of, torch_kind
from .paths.local import LocalPath
from .paths.shm import ShmPath
from .paths.tensor_kind import Tensors
from .paths.transfer_path import TransferPath, Wanted, handle_of
from .plan import Shards
from .select import CPU, Choice, Place, Reader, choose, this_host
from .statistics import Chosen, PathStatistics, TransportStatistics
from .timed_transfer import TimedTransfer
from .workers import CopyWorkers

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from .paths.group import GroupAddress

T = TypeVar("T", "Tensor", "np.ndarray[Any, Any]")
log = get_logger(__name__)


def bucket_bytes(tensors: Tensors) -> int:
    """Bytes of memory that ``tensors`` take when they are set, the gaps between them included."""
    return Layout.of(tensors).size_bytes if tensors else 0


class StateTransport:
    """Named, versioned collections of tensors: set here, read in any process of the host that has the handle.

    They are PyTorch's tensors, or all NumPy arrays: a process that has only those does not import PyTorch. A state set
    with one may be read into the other.

        async with StateTransport(runtime_dir) as transport:
            copied = await transport.set("solver", weights, version=3)  # for any process of the host
            alias = await transport.set("solver", weights, version=3, offer=["local"])  # for this process
            await transport.get(copied, into=own_weights)

    One per process, an async context manager, used from one event loop. ``runtime_dir`` is the run's directory on tmpfs
    (such as /dev/shm/<run>), of mode 0700, the same for all processes of a host; the process that made it removes it.
    ``devices``: those that states are offered on and read into (``devices/find.py``); None: there are none.
    Entering removes the memory of processes that were killed, and raises UnsafeDirectory if other users can write to
    the directory. Leaving the context removes this process's states, and transfers under way raise TransportClosed.
    """

    def __init__(self, runtime_dir: Path, devices: Devices[Any] | None = None) -> None:
        self.place = Place(this_host(), f"{os.getpid()}_{secrets.token_hex(4)}")
        self._runtime_dir = runtime_dir
        self._workers = CopyWorkers()
        self._devices = devices
        self._reader = Reader(self.place)
        if devices is not None:
            self._reader = Reader(self.place, frozenset(devices.visible()), devices.reachable())
        self._arena = Arena(runtime_dir, self.place.process, devices.pin if devices is not None else None)
        self._shm = ShmPath(self.place, runtime_dir, self._arena, self._workers)
        self._collective = CollectivePath(runtime_dir)
        self._paths: dict[PathName, TransferPath[Any]] = {
            "local": LocalPath(self.place, self._workers),
            "shm": self._shm,
            "collective": self._collective,
        }
        if devices is not None:
            self._paths["cuda_ipc"] = CudaIpcPath(
                self.place,
                runtime_dir,
                Arena(runtime_dir, f"{self.place.process}-ipc"),
                self._workers,
                devices,
            )
        self._open = False
        self._chosen: dict[str, Chosen] = {}
        self._logged: dict[tuple[str, str], tuple[str, str]] = {}
        self._statistics: dict[PathName, PathStatistics] = {}

    async def __aenter__(self) -> "StateTransport":
        check_directory(self._runtime_dir)
        if removed := self._arena.remove_abandoned():
            log.info("memory of ended processes removed", files=len(removed))
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stops transfers under way, removes this process's memory and all mappings. May be called again."""
        self._open = False
        try:
            await self._workers.close()
        finally:
            for path in self._paths.values():
                await path.close()
            self._arena.close()

    # ----------------------------------------------------------------------- Set

    async def set(
        self,
        key: str,
        tensors: Tensors,
        *,
        version: int,
        offer: Sequence[PathName] = ("shm",),
        lent: LentMemory | None = None,
        timeout_s: float = 60.0,
    ) -> StateHandle:
        """Publishes ``tensors`` as ``version`` of ``key`` and returns the handle to send in messages.

        ``offer``: the paths that readers may choose from. By ``shm`` any process of this host may read the state. It is
        a copy: the tensors may change as soon as this returns. By ``local`` nothing is copied: the source is an alias
        of the tensors, for readers of this process only. By ``cuda_ipc`` it is a copy in device memory, for processes
        of this host that see the device. By ``collective`` it is a copy that all members of the group that this process
        has joined get at the same time. The two newest versions of a key stay readable.

        With ``lent`` the copy is in memory that another process has lent (``lend``): it stays readable when this
        process ends, until the same memory is set again or taken back.

        Tensors of any shape, stride and device; dtypes of ``handle.DTYPE_BYTES``. After a cancellation or a timeout
        nothing half written is published, the version set before stays readable, and no thread reads the tensors any
        more. Concurrent sets of one key run one after the other.

        Raises ArenaSpace, MemoryInUse, TransferTimeout, TransportClosed, TypeError for a tensor that can't travel, and
        ValueError for a version outside 0 .. 2**63-1 and for paths that can't be offered.
        """
        self._check_open()
        if not 0 <= version < 2**63:
            raise ValueError(f"{key}: version {version} is outside 0 .. 2**63-1")
        if not offer or len(set(offer)) != len(offer) or not set(offer) <= self._paths.keys():
            raise ValueError(f"{key}: can't be offered by {list(offer)} (there is {', '.join(self._paths)})")
        if lent is not None and tuple(offer) != ("shm",):
            raise ValueError(f"{key}: lent memory is offered by 'shm', not by {list(offer)}")
        size_bytes = sum(map(kind_of(tensors.values()).size_bytes, tensors.values()))
        offered = []
        for path in offer:
            if lent is None:
                offering = self._paths[path].offer(key, tensors, version=version)
            else:
                offering = self._shm.offer_in(lent, key, tensors, version=version)
            timed = TimedTransfer("set", key, version, path, size_bytes, timeout_s)
            offered.append(await timed.result(offering))
            totals = self._statistics.setdefault(path, PathStatistics())
            totals.sets += 1
            totals.set_bytes += size_bytes
            totals.set_s += timed.seconds
        self._log("set", key, size_bytes, ", ".join(offer), "offered")
        return handle_of(key, version, offered)

    async def drop(self, key: str) -> None:
        """Frees the memory of ``key``, whose handles become stale. What was reserved stays with this process."""
        self._check_open()
        for path in self._paths.values():
            await path.drop(key)

    # ----------------------------------------------------------------------- Get

    @overload
    async def get(
        self,
        handle: StateHandle,
        *,
        into: None = None,
        names: Collection[str] | None = None,
        rows: Rows | None = None,
        path: PathName | None = None,
        timeout_s: float = 60.0,
    ) -> "dict[str, Tensor]": ...

    @overload
    async def get(
        self,
        handle: StateHandle,
        *,
        into: Mapping[str, T],
        names: Collection[str] | None = None,
        rows: Rows | None = None,
        path: PathName | None = None,
        timeout_s: float = 60.0,
    ) -> dict[str, T]: ...

    @overload
    async def get(
        self,
        handle: StateHandle,
        *,
        into: "Mapping[str, Tensor] | None",
        names: Collection[str] | None = None,
        rows: Rows | None = None,
        path: PathName | None = None,
        timeout_s: float = 60.0,
    ) -> "dict[str, Tensor]": ...

    async def get(
        self,
        handle: StateHandle,
        *,
        into: Mapping[str, Any] | None = None,
        names: Collection[str] | None = None,
        rows: Rows | None = None,
        path: PathName | None = None,
        timeout_s: float = 60.0,
    ) -> dict[str, Any]:
        """Returns the tensors of ``handle``: one whole version, checked against its digest.

        With ``into`` they are written there, on any device; names, shapes and dtypes must equal the state's, which is
        checked before the first byte is written. Without it they are new tensors on the CPU, or the tensors that were
        set if the path is ``local``. With ``names`` only those tensors are read, and of the tensors in ``rows`` only
        that part of dimension 0.

        The fastest source that reaches the tensors is read. With ``path`` no other is.

        Raises StateMismatch and NoPath, with ``into`` untouched. Raises StaleHandle (two newer versions were set, or
        the owner has left), CorruptState, ForeignHandle, TransferTimeout, TransportClosed: after these, and after a
        cancellation, the contents of ``into`` are undefined and must be overwritten before use.
        """
        self._check_open()
        devices = set(map(self._device_of, into.values())) if into else {CPU}
        choice = choose(
            self._reader, handle.sources, devices=devices, size_bytes=handle.size_bytes, path=path
        )
        wanted = Wanted(handle, choice.source, handle.select(names, rows))
        return await self._got(wanted, choice, self._paths[choice.path].fetch(wanted, into), timeout_s)

    async def get_mapped(
        self,
        handle: StateHandle,
        *,
        names: Collection[str] | None = None,
        rows: Rows | None = None,
        timeout_s: float = 60.0,
    ) -> "dict[str, Tensor]":
        """Returns the tensors of ``handle`` in place, without a copy: shared memory, or the tensors that were set.

        They are for reading. The shared memory stays as it is as long as one of the tensors exists, also if newer
        versions are set or the owner leaves; what this process writes to them is seen by this process alone. The bytes
        are not compared with their digests: that would read them all.

        Raises as ``get`` does.
        """
        self._check_open()
        choice = choose(self._reader, handle.sources, devices={CPU}, size_bytes=handle.size_bytes)
        wanted = Wanted(handle, choice.source, handle.select(names, rows))
        if choice.path == "local":
            return await self._got(wanted, choice, self._paths["local"].fetch(wanted, None), timeout_s)
        choice = choose(self._reader, handle.sources, devices={CPU}, size_bytes=handle.size_bytes, path="shm")
        return await self._got(wanted, choice, self._shm.view(cast("Wanted[ShmSource]", wanted)), timeout_s)

    async def _got(
        self, wanted: Wanted[Any], choice: Choice, getting: Awaitable[dict[str, Any]], timeout_s: float
    ) -> dict[str, Any]:
        handle, size_bytes = wanted.handle, wanted.size_bytes
        self._log("get", handle.key, size_bytes, choice.path, choice.reason, choice)
        self._chosen[handle.key] = Chosen(choice.path, choice.reason, choice.refused)
        timed = TimedTransfer("get", handle.key, handle.version, choice.path, size_bytes, timeout_s)
        tensors = await timed.result(getting)
        totals = self._statistics.setdefault(choice.path, PathStatistics())
        totals.gets += 1
        totals.get_bytes += size_bytes
        totals.get_s += timed.seconds
        return tensors

    # ----------------------------------------------------------------------- groups

    async def join(self, group: "GroupAddress", member: str) -> None:
        """Makes this process a ``member`` of a group, for ``offer=["collective"]`` and Gets from it.

        Returns when all members have joined; then every member but the one that sets a state has to get it. Raises
        MemberMissing if one does not come in time, ValueError if this process has joined a group of that name.
        """
        self._check_open()
        await self._collective.join(group, member)
        self._reader = replace(self._reader, groups=self._collective.groups)

    async def leave(self, group: str) -> None:
        """Ends the membership in a group, and the transfers of all its members; does nothing without one."""
        await self._collective.leave(group)
        self._reader = replace(self._reader, groups=self._collective.groups)

    async def exchange(
        self,
        group: str,
        key: str,
        tensors: Sequence[TensorSpec],
        *,
        held: Shards,
        wanted: Shards,
        mine: "Mapping[str, Tensor]",
        into: "Mapping[str, Tensor]",
        timeout_s: float = 60.0,
    ) -> None:
        """Moves rows of tensors between the members of a group: each gets what it wants of those that have it.

        All members call it at the same time, with the same ``key``, ``tensors``, ``held`` and ``wanted`` (the rows by
        member), of which all compute the same plan. ``mine``: the rows that this member has, ``into``: those that it
        wants, by tensor. What moves is compared with its digest.

        Raises StateMismatch for rows that no member has and members with another plan, before anything is written;
        MemberMissing, with the member and the bucket, CorruptState, TransferTimeout, TransportClosed: after these
        ``into`` is undefined.
        """
        self._check_open()
        moving = self._collective.exchange(group, key, tensors, held, wanted, mine, into)
        size_bytes = sum(tensor.nbytes for tensor in (*mine.values(), *into.values()))
        await TimedTransfer("exchange", key, 0, "collective", size_bytes, timeout_s).result(moving)

    # ----------------------------------------------------------------------- memory

    async def reserve(self, size_bytes: int, states: int = 2) -> None:
        """Makes memory for ``states`` more states of ``size_bytes``, with all its pages, so that no Set waits for them.

        It stays with this process until the transport is closed: states that are dropped or replaced give it back for
        other states. The two newest versions of a key are in memory. Raises ArenaSpace, TransportClosed.
        """
        self._check_open()
        share = self._workers.share
        await self._workers.run(
            file_bytes(size_bytes), lambda stop: self._arena.reserve(size_bytes, states, share)
        )

    async def lend(self, key: str, size_bytes: int) -> tuple[LentMemory, LentMemory]:
        """Two pieces of this process's memory, each of ``size_bytes`` or a little more, with all their pages, for
        ``set`` in other processes of the host. A state that one of those has set stays readable after its end; a state
        that it was setting when it was killed never is. Raises ArenaSpace, TransportClosed."""
        self._check_open()
        return await self._shm.lend(key, size_bytes)

    def take_back(self, pair: Sequence[LentMemory]) -> None:
        """Frees the pieces of a ``lend``. The states in them are gone. Does nothing for pieces that were freed."""
        self._shm.take_back(pair)

    async def store_away(self, pair: Sequence[LentMemory], used: Sequence[LentMemory], file: Path) -> None:
        """Writes the states in ``used``, one piece of the pair or both, to a new file, and frees the pair. Raises
        OSError, and the memory is as before then; TransportClosed."""
        self._check_open()
        await self._shm.store_away(pair, used, file)

    async def bring_back(
        self, pair: Sequence[LentMemory], used: Sequence[LentMemory], file: Path
    ) -> tuple[LentMemory, LentMemory]:
        """Lends memory again, in the order of ``pair``, with the states of ``used`` that ``store_away`` has written,
        and removes the file. Handles of these states are valid again once they have ``moved``. Raises OSError and
        ArenaSpace, and the file is as before then; TransportClosed."""
        self._check_open()
        return await self._shm.bring_back(pair, used, file)

    def statistics(self) -> TransportStatistics:
        return TransportStatistics(
            by_path={path: replace(totals) for path, totals in self._statistics.items()},
            running=self._workers.running,
            arena_bytes=self._arena.size_bytes,
            spare_bytes=self._arena.spare_bytes,
            devices=self._device_memory(),
            chosen=dict(self._chosen),
        )

    def _device_memory(self) -> dict[str, DeviceMemory]:
        if self._devices is None:
            return {}
        return {device: self._devices.memory(device) for device in self._devices.visible()}

    def _device_of(self, tensor: Any) -> str:
        """The UUID of its device if this process knows it, else the type."""
        kind = kind_of([tensor])
        if self._devices is None or kind is not torch_kind():
            return kind.device(tensor)
        return self._devices.device_of(tensor) or CPU

    def _check_open(self) -> None:
        if not self._open:
            raise TransportClosed

    def _log(
        self,
        operation: str,
        key: str,
        size_bytes: int,
        path: str,
        reason: str,
        choice: Choice | None = None,
    ) -> None:
        # Only if the path has changed, not at every optimizer step.
        if self._logged.get((operation, key)) == (path, reason):
            return
        self._logged[operation, key] = path, reason
        report = log.warning if choice is not None and choice.is_downgrade else log.debug
        report(
            "transfer path chosen",
            operation=operation,
            key=key,
            path=path,
            reason=reason,
            refused={} if choice is None else choice.refused,
            size_bytes=size_bytes,
        )
