"""Set and Get: the public interface of the transport.

    handle = await transport.set("solver", weights, version=3)      # in process A
    await transport.get(handle, into=other_weights)                 # in process B, which has received the handle

A state lies in memory: in that of the host (``HostMemory``: blocks that its processes map) or in that of a device
(``DeviceMemory``: buffers that are opened by handle). Other hosts read host memory through a door (``BulkServer``), if
the process has keys, into copies on their own host (``Remote``).

Set on A, of shared memory and for other hosts, with the file of each step:

    state.py        StateTransport.set  orders the paths by memory: "shm" and "tcp" are one copy in host memory
    transfers.py    Transfers.set       sets the deadline and counts
    host_memory.py  HostMemory.offer    opens the door first, as that can fail, and takes the lock of the key
    payload.py      Layout.of           gives each tensor its place in the payload, unless the last Set had the same
    host_memory.py  _begin_block        takes a block that no reader uses: that of the version before last, or a new one
    arena.py        Arena.take          of the arena
    block.py        Block.begin         makes its generation odd, so that no reader takes it for whole
    payload.py      put                 copies chunk by chunk and computes each digest while the chunk is in the cache:
                                        in several threads, or in the event loop if it is one chunk (INLINE_BYTES)
    server.py       BulkServer.compare  computes the changes too, if another host has read the version before
    block.py        Block.commit        makes the generation even: from here on the version can be read
    handle.py       StateHandle         has a source for each path, and the digest of all digests

Get on B, on another host:

    host_memory.py  HostMemory.sources  finds the copy that a process of this host has fetched before, if there is one
    select.py       choose              takes the fastest source that reaches the destination; its reason is logged
    host_memory.py  HostMemory.fetch    compares names, shapes and dtypes with the destination before a byte moves
    remote.py       Remote.copy_here    one process of a host fetches, by the lock of the key; the others wait for it
    fetch.py        Fetch.run           asks A for ranges (``frames.py``), over a few connections (``bulk.py``), and
                                        compares each chunk with its digest as it arrives; a large version comes from
                                        the host that has asked A before B, if there is one (``relays.py``)
    server.py       BulkServer          on A, keeps the block from being written meanwhile (``Block.hold``)
    host_memory.py  _read               copies into the destination (``payload.fetch``). The generation must be the
                                        handle's before and after; digests are compared, unless they just were

On A's own host ``choose`` takes "shm", and ``_read`` follows at once. A call that is cancelled returns after the last
thread has stopped, and publishes nothing half written.
"""

import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ..core.durable.private_directory import check_private
from ..core.pacing import pacing
from ..core.telemetry import get_logger
from .device_memory.device_memory import DeviceMemory
from .device_memory.devices import DeviceEvent, Devices
from .device_memory.host_copies import HostCopies
from .errors import DeviceError, OpenRefused, TransportClosed
from .handle import CudaIpcSource, LentMemory, PathName, Rows, ShmSource, StateHandle, TcpSource
from .host_memory.arena import Arena
from .host_memory.block import file_bytes
from .host_memory.host_blocks import HostBlocks
from .host_memory.host_memory import HostMemory
from .host_memory.lent_blocks import LentBlocks
from .payload import Layout, destinations, kind_of, torch_kind
from .remote.bulk import Bulk
from .remote.remote import Remote
from .select import CPU, Choice, Place, Reader, choose, this_node
from .statistics import Chosen, MemoryUse, TransportStatistics
from .tensors.tensor_kind import Tensors
from .transfers import CopyWorkers, Fill, Memory, Offer, ReadRequest, Transfer, Transfers, handle_of

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

T = TypeVar("T", "Tensor", "np.ndarray[Any, Any]")
log = get_logger(__name__)


def payload_bytes(tensors: Tensors) -> int:
    """Bytes of memory that ``tensors``, or those that they outline, take when they are set, the gaps between them
    included."""
    return Layout.of(tensors, outline=True).size_bytes if tensors else 0


class StateTransport:
    """Sets and reads named, versioned collections of tensors. Any process that has the handle of one can read it.
    Processes of other hosts need ``bulk``.

    The tensors of a collection are all PyTorch's, or all NumPy arrays: a process with NumPy arrays alone does not
    import PyTorch. A collection that was set with one kind may be read into the other.

        async with StateTransport(runtime_dir) as transport:
            handle = await transport.set("solver", weights, version=3)
            await transport.get(handle, into=other_weights)

    One per process, an async context manager, used from one event loop. ``runtime_dir`` is the run's directory on tmpfs
    (such as /dev/shm/<run>), of mode 0700, the same for all processes of a host; the process that made it removes it.
    ``devices``: those that states are offered on and read into (``device_memory.find_devices``); None: there are none.
    ``path``: the only one that states are offered by and read from; None: the readers choose. ``bulk``: how states are
    exchanged with other hosts; None: they are not.
    Entering removes the memory of processes that were killed, and raises UnsafeDirectory unless the directory exists,
    is this user's and is closed to all others. Leaving the context removes this process's states, and transfers under
    way raise TransportClosed.

    It is one class because it is the front door of all memories: most of it are signatures and their docstrings.
    """

    def __init__(
        self,
        runtime_dir: Path,
        devices: Devices[Any] | None = None,
        path: PathName | None = None,
        bulk: Bulk | None = None,
    ) -> None:
        # Not the process id alone: files are named by it, and a later process may have the id of one that was killed.
        self.place = Place(this_node(runtime_dir), f"{os.getpid()}_{secrets.token_hex(4)}")
        self._runtime_dir = runtime_dir
        # A copy with a device waits for the computations that were begun before it: it would block the loop for them.
        self._workers = CopyWorkers() if devices is None else CopyWorkers(inline_bytes=0)
        self._devices = devices
        self._device_memory: DeviceMemory | None = None
        self._reader = Reader(self.place, encrypted=None if bulk is None else bulk.encrypted)
        if devices is not None:
            visible = frozenset(devices.visible())
            self._reader = replace(self._reader, visible=visible, unreachable=devices.unreachable())
        copies = None if devices is None else HostCopies(devices)
        self._arena = Arena(runtime_dir, self.place.process, None if copies is None else copies.pin)
        self._remote = None if bulk is None else Remote(self.place, runtime_dir, bulk)
        blocks = HostBlocks(self.place, runtime_dir, self._arena, self._workers, self._remote, copies)
        self._host, self._lent = HostMemory(blocks), LentBlocks(blocks)
        self._memories: dict[PathName, Memory[Any]] = {"shm": self._host}
        if devices is not None:
            controls = Arena(runtime_dir, f"{self.place.process}-ipc")
            self._device_memory = DeviceMemory(self.place, runtime_dir, controls, self._workers, devices)
            self._memories["cuda_ipc"] = self._device_memory
        if self._remote is not None:
            self._memories["tcp"] = self._host
        self._path = path
        self._withheld: set[str] = set()
        self._transfers = Transfers()
        self._open = False

    async def __aenter__(self) -> "StateTransport":
        check_private(self._runtime_dir)
        if removed := self._arena.remove_abandoned():
            log.info("memory of ended processes removed", files=len(removed))
        self._open = True
        if (links := pacing.get()) is not None:
            links.opened(self.place.process)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stops transfers under way, removes this process's memory and all mappings. May be called again."""
        # Threads first: until they have ended they read and write the memory that is removed then.
        self._open = False
        try:
            await self._workers.close()
        finally:
            for memory in dict.fromkeys(self._memories.values()):
                await memory.close()
            self._arena.close()

    # ----------------------------------------------------------------------- Set

    async def set(
        self,
        key: str,
        tensors: Tensors,
        *,
        version: int,
        offer: Sequence[PathName] | None = None,
        lent: LentMemory | None = None,
        after: DeviceEvent | None = None,
        timeout_s: float = 60.0,
    ) -> StateHandle:
        """Publishes ``tensors`` as ``version`` of ``key`` and returns the handle to send in messages.

        ``offer``: the paths that readers may choose from; None: the transport's own ``path``, or ``cuda_ipc`` if this
        process has devices, ``shm``, and ``tcp`` if there are other hosts. By ``shm`` any process of this host may read
        the state. It is a copy: the tensors may change as soon as this returns. By ``tcp`` processes of other hosts may
        read the same copy, which is made once for both. By ``cuda_ipc`` it is a copy in device memory, for processes of
        this host with a device; if the driver lets none of them open it (MIG, some containers), it is left out, and the
        handle has the reason. The two newest versions of a key stay readable.

        With ``lent`` the copy is in memory that another process has lent (``lend``): it stays readable when this
        process ends, until the same memory is set again or taken back. If that process is on another node, the copy is
        in this process's memory, and the lender fetches it (``take``).

        ``after``: the point of computations (``record``) that the tensors are complete at. The copy waits for those
        computations alone; without it, for all that the devices were given before this call.

        Tensors of any shape, stride and device; dtypes of ``handle.DTYPE_BYTES``. After a cancellation or a timeout
        nothing half written is published, the version set before stays readable, and no thread reads the tensors any
        more. Concurrent sets of one key run one after the other.

        Raises ArenaSpace, MemoryInUse, TransferTimeout, TransportClosed, TypeError for a tensor that can't travel, and
        ValueError for a version outside 0 .. 2**63-1 and for paths that can't be offered. OutOfDeviceMemory and
        DeviceError of ``cuda_ipc``.
        """
        lent, offer = self._check_set(key, version, lent, offer)
        size_bytes = sum(map(kind_of(tensors.values()).size_bytes, tensors.values()))
        if lent is not None:
            transfer = Transfer("set", key, version, "shm", size_bytes, timeout_s, lent.process)
            offering = self._lent.offer_in(lent, key, tensors, version=version, after=after)
            return handle_of(key, version, [await self._transfers.set(transfer, offering)])
        withheld: dict[PathName, str] = {}
        if offer is None:
            offer, withheld = await self._offer_to_all(tensors)
        offers = []
        for memory, paths in self._by_memory(key, offer).items():
            counted = "tcp" if "tcp" in paths else paths[0]
            transfer = Transfer("set", key, version, counted, size_bytes, timeout_s, self.place.process)
            offering = memory.offer(key, tensors, version=version, paths=paths, after=after)
            offers.append(await self._transfers.set(transfer, offering))
        return handle_of(key, version, offers, withheld)

    async def fill(
        self,
        key: str,
        outline: Tensors,
        fill: Fill,
        *,
        version: int,
        offer: Sequence[PathName] | None = None,
        lent: LentMemory | None = None,
        timeout_s: float = 60.0,
    ) -> StateHandle:
        """As ``set``, for tensors that are nowhere whole before: ``fill`` is awaited with the tensors of the new
        version, as they lie in the memory that readers will read, and writes them there, in any order.

        ``outline``: their names, shapes and dtypes, such as tensors on the device ``meta``. If several memories are
        offered, the first one is filled, and the others are copies of it. ``timeout_s`` includes ``fill``.

        If ``fill`` raises, or at a cancellation, nothing is published and the version set before stays readable. Raises
        as ``set`` and as ``fill``.
        """
        lent, offer = self._check_set(key, version, lent, offer)
        layout = Layout.of(outline, outline=True)
        withheld: dict[PathName, str] = {}
        offers: list[Offer] = []
        filling: Awaitable[Offer]
        if lent is not None:
            paths: Sequence[PathName] = ("shm",)
            filling = self._lent.fill_in(lent, key, layout, fill, version=version)
        else:
            if offer is None:
                offer, withheld = await self._offer_to_all(outline)
            memories = self._by_memory(key, offer)
            first = self._memories[offer[0]]
            paths = memories.pop(first)

            async def fill_all(tensors: Mapping[str, Any]) -> None:
                await fill(tensors)
                for copied_to, more_paths in memories.items():
                    offers.append(await copied_to.offer(key, tensors, version=version, paths=more_paths))

            filling = first.fill(key, layout, fill_all, version=version, paths=paths)
        counted: PathName = "tcp" if "tcp" in paths else paths[0]
        memory = self.place.process if lent is None else lent.process
        transfer = Transfer("set", key, version, counted, layout.size_bytes, timeout_s, memory)
        filled = await self._transfers.set(transfer, filling)
        return handle_of(key, version, [filled, *offers], withheld)

    def _check_set(
        self, key: str, version: int, lent: LentMemory | None, offer: Sequence[PathName] | None
    ) -> tuple[LentMemory | None, Sequence[PathName] | None]:
        """The memory to set in, and the paths to offer."""
        self._check_open()
        if not 0 <= version < 2**63:
            raise ValueError(f"{key}: version {version} is outside 0 .. 2**63-1")
        if lent is not None and lent.node != self.place.node:
            # The lender fetches it. A push would need a second server, with rights to write.
            return None, ("tcp",)
        if lent is not None and offer is not None and tuple(offer) != ("shm",):
            raise ValueError(f"{key}: lent memory is offered by 'shm', not by {list(offer)}")
        return lent, offer

    async def _offer_to_all(self, tensors: Tensors) -> tuple[tuple[PathName, ...], dict[PathName, str]]:
        """The paths that no Set has named, and the reason against each that was left out."""
        # A path that was asked for by name is not probed: its error is the better answer than another path.
        if self._path is not None or self._device_memory is None:
            return self.offered, {}
        if not (reason := await self._device_memory.refusal(tensors)):
            return self.offered, {}
        if reason not in self._withheld:
            self._withheld.add(reason)
            log.warning("device memory is not offered", reason=reason)
        return tuple(path for path in self.offered if path != "cuda_ipc"), {"cuda_ipc": reason}

    def record(self) -> DeviceEvent | None:
        """The point after all computations that this thread has begun on this process's devices, for ``set``; None
        without devices."""
        return None if self._devices is None else self._devices.record(self._devices.visible())

    def _by_memory(self, key: str, offer: Sequence[PathName]) -> dict[Memory[Any], list[PathName]]:
        """The paths of ``offer``, by the memory that they lead to. Raises ValueError for one that there is not."""
        if not offer or len(set(offer)) != len(offer) or not set(offer) <= self._memories.keys():
            raise ValueError(
                f"{key}: can't be offered by {list(offer)} (there is {', '.join(self._memories)})"
            )
        paths: dict[Memory[Any], list[PathName]] = {}
        for path in offer:
            paths.setdefault(self._memories[path], []).append(path)
        return paths

    @property
    def offered(self) -> tuple[PathName, ...]:
        """The paths that states are offered by, unless a Set names others."""
        if self._path is not None:
            return (self._path,)
        by_memory: tuple[PathName, ...] = ("shm",) if self._devices is None else ("cuda_ipc", "shm")
        return by_memory if self._remote is None else (*by_memory, "tcp")

    async def drop(self, key: str) -> None:
        """Frees the memory of ``key``, whose handles become stale. Reserved memory stays with this process."""
        self._check_open()
        for memory in dict.fromkeys(self._memories.values()):
            await memory.drop(key)

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
    ) -> "dict[str, Tensor]":
        """New tensors of PyTorch, on the CPU."""

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
    ) -> dict[str, T]:
        """The tensors or arrays of ``into``, overwritten."""

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
    ) -> "dict[str, Tensor]":
        """Either of the two."""

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
        checked before the first byte is written. Without it they are new tensors on the CPU. With ``names`` only those
        tensors are read, and of the tensors in ``rows`` only that part of dimension 0.

        The fastest source that reaches the tensors is read. With ``path``, or one of the transport's own, no other is.
        Device memory that can't be opened here is left for the next source, with the reason.

        Raises StateMismatch, NoPath, FetchFailed and PeerRefused, with ``into`` untouched. Raises StaleHandle (two
        newer versions were set, or the owner has left), CorruptState, ForeignHandle, TransferTimeout, TransportClosed:
        after these, and after a cancellation, the contents of ``into`` are undefined and must be overwritten before
        use.
        """
        self._check_open()
        devices = set(map(self._device_of, into.values())) if into else {CPU}
        specs = handle.select(names, rows)
        while True:
            # Before any path is asked: the choice is pure, and an error of it leaves ``into`` untouched.
            choice = self._choose(handle, devices, path or self._path)
            request = ReadRequest(handle, choice.source, specs)
            transfer = Transfer.of(request, timeout_s)
            with self._noted_refusal(choice):
                return await self._transfers.get(
                    transfer, choice, self._memories[choice.path].fetch(request, into)
                )

    @asynccontextmanager
    async def mapped(
        self,
        handle: StateHandle,
        *,
        like: Mapping[str, Any] | None = None,
        names: Collection[str] | None = None,
        rows: Rows | None = None,
        checked: bool = False,
        timeout_s: float = 60.0,
    ) -> AsyncIterator[dict[str, Any]]:
        """The tensors of ``handle`` where they lie, without a copy: device memory for a process with devices, or
        shared memory.

        They are for reading. Device memory stays as it is inside of the context; copies from it have to be done at its
        end. Shared memory stays as it is as long as one of the tensors exists, also if newer versions are set or the
        owner leaves; what this process writes to them is seen by this process alone.

        ``like``: tensors, also on the device ``meta``, whose names, shapes and dtypes the state must have. ``checked``:
        the bytes are compared with their digests, which reads them all.

        Raises as ``get`` does, before the context begins.
        """
        self._check_open()
        devices = {CPU} if self._devices is None else set(self._devices.visible()[:1])
        specs = handle.select(names, rows)
        if like is not None:
            destinations(handle.key, specs, like)
        async with AsyncExitStack() as stack:
            tensors: dict[str, Any] | None = None
            while tensors is None:
                choice = self._choose(handle, devices, self._path)
                request = ReadRequest(handle, choice.source, specs)
                view = self._memories[choice.path].view(request, checked=checked)
                transfer = Transfer.of(request, timeout_s)
                with self._noted_refusal(choice):
                    tensors = await self._transfers.get(transfer, choice, stack.enter_async_context(view))
            yield tensors

    def _choose(self, handle: StateHandle, devices: Set[str], path: PathName | None) -> Choice:
        """Raises NoPath."""
        sources = self._host.sources(handle)
        size_bytes, withheld = handle.size_bytes, handle.withheld
        return choose(
            self._reader, sources, devices=devices, size_bytes=size_bytes, path=path, withheld=withheld
        )

    @contextmanager
    def _noted_refusal(self, choice: Choice) -> Iterator[None]:
        """Suppresses OpenRefused: the next choice has the reason against this source, and so have those of all later
        states of the same device of that process."""
        try:
            yield
        except OpenRefused as refused:
            source = choice.source
            assert isinstance(source, CudaIpcSource), "no other path opens memory of devices"
            where = source.process, source.device
            reason = f"its memory can't be opened here: {refused}"
            log.warning("device memory refused", device=source.device, reason=str(refused))
            self._reader = replace(self._reader, refusals={**self._reader.refusals, where: reason})

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

    async def lend(self, key: str, size_bytes: int, side: int | None = None) -> LentMemory:
        """Lends a block of this process, of ``size_bytes`` or a little more, with all its pages, for ``set`` in other
        processes of the host. A state that one of those has set stays readable after its end; a state that it was
        setting when it was killed never is. ``side``: of the host (NUMA node) that the memory should lie on, near the
        devices of those that set it; None: any. Raises ArenaSpace, TransportClosed."""
        self._check_open()
        return await self._lent.lend(key, size_bytes, side)

    def is_used(self, lent: LentMemory) -> bool:
        """True while another process, or the door to other hosts, reads or writes the memory."""
        return self._lent.is_used(lent)

    async def take(self, handle: StateHandle, lent: LentMemory, timeout_s: float = 60.0) -> StateHandle:
        """The handle of a state now that it lies in ``lent``, memory of this process: it is copied if it was not set
        there. Raises as ``get`` does, and the earlier state in ``lent`` is gone."""
        self._check_open()
        if handle.lies_in(lent):
            return handle
        size_bytes = handle.size_bytes
        sources = [source for source in handle.sources if source.path != "cuda_ipc"]
        choice = choose(self._reader, sources, devices={CPU}, size_bytes=size_bytes)
        assert isinstance(choice.source, ShmSource | TcpSource), "there is no other source"
        wanted: ReadRequest[Any] = ReadRequest(handle, choice.source, handle.tensors)
        return await self._transfers.get(
            Transfer.of(wanted, timeout_s), choice, self._lent.take(wanted, lent)
        )

    def take_back(self, lent: Sequence[LentMemory]) -> None:
        """Frees memory that was lent. The states in it are gone. Does nothing for memory that was freed."""
        self._lent.take_back(lent)

    async def store_away(self, lent: Sequence[LentMemory], file: Path) -> None:
        """Writes the states in ``lent`` to a new file, and frees the memory. Raises OSError, and the memory is as
        before then; TransportClosed."""
        self._check_open()
        await self._lent.store_away(lent, file)

    async def bring_back(self, lent: Sequence[LentMemory], file: Path) -> list[LentMemory]:
        """Lends memory again, in the order of ``lent``, with the states that ``store_away`` has written, and removes
        the file. Handles of these states are valid again once they have ``moved``. Raises OSError and ArenaSpace, and
        the file is as before then; TransportClosed."""
        self._check_open()
        return await self._lent.bring_back(lent, file)

    def chosen(self, key: str) -> Chosen | None:
        """The path that the last Get of ``key`` took, and the reason; None before the first."""
        return self._transfers.chosen.get(key)

    def statistics(self) -> TransportStatistics:
        """The totals of this process since the transport was opened, its memory and its devices' now; times in
        seconds."""
        return TransportStatistics(
            by_path=self._transfers.totals(),
            running=self._workers.running,
            arena_bytes=self._arena.size_bytes,
            spare_bytes=self._arena.spare_bytes,
            devices=self._device_use(),
            chosen=dict(self._transfers.chosen),
            network=None if self._remote is None else self._remote.statistics,
        )

    def _device_use(self) -> dict[str, MemoryUse]:
        used: dict[str, MemoryUse] = {}
        for device in [] if self._devices is None else self._devices.visible():
            # A figure for people: a driver that does not report it ends no run.
            with suppress(DeviceError):
                used[device] = self._devices.memory(device)  # type: ignore[union-attr]
        return used

    def _device_of(self, tensor: Any) -> str:
        """The UUID of its device if this process knows it, else the type."""
        kind = kind_of([tensor])
        if self._devices is None or kind is not torch_kind():
            return kind.device(tensor)
        return self._devices.device_of(tensor) or CPU

    def _check_open(self) -> None:
        if not self._open:
            raise TransportClosed
