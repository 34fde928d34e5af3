"""Devices without a GPU: their memory is files, their rules and failures are CUDA's.

    devices = FakeDevices(directory, {"GPU-a": 1 << 30})   # one object per process, as one CUDA context

Several processes that name the same directory share the devices: memory of a device that one has taken, the others
lack. A killed process's memory is free for the others. Two objects in one process behave as two processes do.

A process opens the memory of any device on its own one, also of a device that it does not see, if the two reach each
other. Copies and computations are done as late as the events allow: a test that waits for too little sees old bytes,
and a test that waits for too much finds that later work has been done.
"""

import contextlib
import itertools
import mmap
import os
import secrets
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from flexmarl.core.durable.private_directory import check_private
from flexmarl.transport.device_memory.devices import DeviceEvent
from flexmarl.transport.errors import DeviceError, OutOfDeviceMemory, UnknownDevice
from flexmarl.transport.host_memory.block import is_locked, try_lock, unlock
from flexmarl.transport.statistics import MemoryUse
from flexmarl.transport.tensors.torch_tensors import checksum

_OWNER: Final = 0
_OPEN: Final = 1
_HANDLE_BYTES: Final = 64  # as CUDA's


class FakeBuffer:
    """See ``DeviceBuffer``. ``name``: of its file."""

    def __init__(self, device: str, name: str, size_bytes: int, descriptor: int) -> None:
        self.device = device
        self.name = name
        self.size_bytes = size_bytes
        self.descriptor = descriptor
        self.pending = 0
        self.closed = False
        self._tensor = torch.frombuffer(mmap.mmap(descriptor, max(1, size_bytes)), dtype=torch.uint8)

    @property
    def tensor(self) -> Tensor:
        if self.closed:
            raise DeviceError(self.device, "the memory was closed or freed")
        return self._tensor[: self.size_bytes]

    def has(self, address: int) -> bool:
        begin = self._tensor.data_ptr()
        return begin <= address < begin + max(1, self.size_bytes)


class Queue:
    """Work of a device, done in order, and only when a caller waits for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._count = 0

    def add(self, work: Callable[[], None]) -> int:
        """Returns the number of the work."""
        with self._lock:
            self._count += 1
            self._waiting.append((self._count, work))
            return self._count

    @property
    def newest(self) -> int:
        return self._count

    def run(self, last: int) -> None:
        """Does all up to the work of that number."""
        with self._lock:
            while self._waiting and self._waiting[0][0] <= last:
                self._waiting.popleft()[1]()


class FakeEvent:
    """A point in queues."""

    def __init__(self, points: Sequence[tuple[Queue, int]]) -> None:
        self._points = points

    def synchronize(self) -> None:
        for queue, number in self._points:
            queue.run(number)


class FakeDevices:
    """See ``Devices``. ``total_bytes``: of each device, by UUID, the same in all processes; ``visible``: those that
    this process sees (None: all); ``unreachable``: pairs of devices of which the first does not reach the memory of the
    second; ``refuses``: calls of CUDA that fail here, as in a container or on a part of a device (MIG)."""

    def __init__(
        self,
        directory: Path,
        total_bytes: Mapping[str, int],
        visible: Sequence[str] | None = None,
        unreachable: Sequence[tuple[str, str]] = (),
        refuses: Collection[str] = (),
    ) -> None:
        check_private(directory)
        self._directory = directory
        self._total_bytes = dict(total_bytes)
        self._visible = list(total_bytes if visible is None else visible)
        self._unreachable = set(unreachable)
        self._refuses = set(refuses)
        self._names = (f"{os.getpid()}_{secrets.token_hex(4)}-{n}" for n in itertools.count())
        self._lock = threading.Lock()
        self._owned: dict[str, FakeBuffer] = {}
        self._opened: dict[str, FakeBuffer] = {}
        self._cached: dict[str, list[FakeBuffer]] = {}
        self._computing: defaultdict[str, Queue] = defaultdict(Queue)
        self._copying: defaultdict[str, Queue] = defaultdict(Queue)
        self.contexts: set[str] = set()
        """The devices of which this process takes memory for itself, as CUDA's context."""
        self.pinned: dict[int, int] = {}
        """Pinned memory of the host: size by address."""

    def visible(self) -> list[str]:
        return list(self._visible)

    def unreachable(self) -> frozenset[tuple[str, str]]:
        return frozenset(
            pair for pair in itertools.permutations(self._visible, 2) if pair in self._unreachable
        )

    def memory(self, device: str) -> MemoryUse:
        self._check_visible(device)
        with self._lock_accounts(device):
            total = self._total_bytes[device]
            return MemoryUse(total - self._used_bytes(device), total)

    def compute(self, device: str, work: Callable[[], None]) -> None:
        """Adds work to the queue of the device that all threads share."""
        self._begin_context(device)
        self._computing[device].add(work)

    def record(self, devices: Collection[str]) -> FakeEvent:
        for device in devices:
            self._begin_context(device)
        return FakeEvent([(self._computing[device], self._computing[device].newest) for device in devices])

    def synchronize(self, device: str) -> None:
        """Does all work of the device, as a call of CUDA that frees memory."""
        for queue in (self._computing[device], self._copying[device]):
            queue.run(queue.newest)

    def cache(self, device: str, size_bytes: int) -> None:
        """Memory that PyTorch has freed and keeps."""
        self._cached.setdefault(device, []).append(self.allocate(device, size_bytes))

    def release_cache(self, device: str) -> None:
        for buffer in self._cached.pop(device, []):
            self.free(buffer)

    def device_of(self, tensor: Tensor) -> str | None:
        buffer = self._buffer_of(tensor)
        return None if buffer is None else buffer.device

    def allocate(self, device: str, size_bytes: int) -> FakeBuffer:
        self._begin_context(device)
        with self._lock_accounts(device):
            free = self._total_bytes[device] - self._used_bytes(device)
            if size_bytes > free:
                raise OutOfDeviceMemory(device, size_bytes, free)
            name = next(self._names)
            descriptor = os.open(
                self._path(device, name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
            try_lock(descriptor, _OWNER, exclusive=True)
            os.posix_fallocate(descriptor, 0, max(1, size_bytes))
        buffer = self._owned[name] = FakeBuffer(device, name, size_bytes, descriptor)
        return buffer

    def free(self, buffer: FakeBuffer) -> None:
        self._end(self._owned, buffer, "freed")
        self.synchronize(buffer.device)
        path = self._path(buffer.device, buffer.name)
        still_open = is_locked(buffer.descriptor, _OPEN)
        path.unlink(missing_ok=True)
        os.close(buffer.descriptor)
        if still_open:
            raise DeviceError(buffer.device, "memory was freed while another process has it open")

    def copy(
        self,
        device: str,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        after: DeviceEvent | None = None,
    ) -> FakeEvent:
        self._begin_context(device)
        begun = after or self.record([device])
        buffers = [self._buffer_of(tensor) for tensor in (*targets, *sources)]
        used = {buffer.name: buffer for buffer in buffers if buffer is not None}
        for buffer in used.values():
            if (device, buffer.device) in self._unreachable:
                raise DeviceError(device, f"no access to the memory of {buffer.device}")
        pairs = list(zip(targets, sources, strict=True))

        def run() -> None:
            begun.synchronize()
            with torch.inference_mode():
                for target, source in pairs:
                    target.copy_(source)
            for buffer in used.values():
                buffer.pending -= 1

        for buffer in used.values():
            buffer.pending += 1
        return FakeEvent([(self._copying[device], self._copying[device].add(run))])

    def checksum(self, tensor: Tensor) -> int:
        return checksum(tensor)

    def export(self, buffer: FakeBuffer) -> bytes:
        if self._owned.get(buffer.name) is not buffer:
            raise DeviceError(buffer.device, "only memory of this process can be exported")
        self._check_allowed(buffer.device, "cudaIpcGetMemHandle")
        return buffer.name.encode().ljust(_HANDLE_BYTES, b"\0")

    def open_elsewhere(self, buffer: FakeBuffer, handle: bytes) -> None:
        other = FakeDevices(self._directory, self._total_bytes, refuses=self._refuses)
        other.close(other.open(buffer.device, handle, buffer.size_bytes))

    def open(self, device: str, handle: bytes, size_bytes: int) -> FakeBuffer:
        self._begin_context(device)
        self._check_allowed(device, "cudaIpcOpenMemHandle")
        name = handle.rstrip(b"\0").decode(errors="replace")
        if len(handle) != _HANDLE_BYTES or "/" in name or not name:
            raise DeviceError(device, "invalid handle")
        if name in self._owned:
            raise DeviceError(device, "a handle can't be opened in the process that owns the memory")
        if name in self._opened:
            raise DeviceError(device, "the handle is open already")
        peer = next((one for one in self._total_bytes if (self._folder(one) / name).exists()), device)
        if (device, peer) in self._unreachable:
            raise DeviceError(
                device, "cudaIpcOpenMemHandle: peer access is not supported between these devices"
            )
        try:
            descriptor = os.open(self._folder(peer) / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise DeviceError(device, "invalid handle: memory that was freed") from None
        if not is_locked(descriptor, _OWNER) or os.fstat(descriptor).st_size < size_bytes:
            os.close(descriptor)
            raise DeviceError(device, "invalid handle: its owner has ended, or the memory is smaller")
        try_lock(descriptor, _OPEN, exclusive=False)
        buffer = self._opened[name] = FakeBuffer(device, name, size_bytes, descriptor)
        return buffer

    def close(self, buffer: FakeBuffer) -> None:
        self._end(self._opened, buffer, "closed")
        # The mapping has the lock too; it goes with the last tensor. CUDA's mapping ends here.
        unlock(buffer.descriptor, _OPEN)
        os.close(buffer.descriptor)

    def pin(self, address: int, size_bytes: int) -> Callable[[], None]:
        self._begin_context(self._visible[0])
        self._check_allowed(self._visible[0], "cudaHostRegister")
        if address in self.pinned:
            raise DeviceError(self._visible[0] if self._visible else "none", "memory is pinned already")
        self.pinned[address] = size_bytes

        def unpin() -> None:
            self.pinned.pop(address, None)

        return unpin

    def make_pinned(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def _end(self, buffers: dict[str, FakeBuffer], buffer: FakeBuffer, what: str) -> None:
        with self._lock:
            if buffers.get(buffer.name) is not buffer:
                raise DeviceError(
                    buffer.device, f"memory can't be {what}: it is not this process's, or was before"
                )
            if buffer.pending:
                raise DeviceError(buffer.device, f"memory was {what} before a copy was done")
            del buffers[buffer.name]
            buffer.closed = True

    def _buffer_of(self, tensor: Tensor) -> FakeBuffer | None:
        address = tensor.untyped_storage().data_ptr()
        with self._lock:
            buffers = [*self._owned.values(), *self._opened.values()]
        return next((buffer for buffer in buffers if buffer.has(address)), None)

    def _begin_context(self, device: str) -> None:
        self._check_visible(device)
        self.contexts.add(device)

    def _check_visible(self, device: str) -> None:
        if device not in self._visible:
            raise UnknownDevice(device, self._visible)

    def _check_allowed(self, device: str, call: str) -> None:
        if call in self._refuses:
            raise DeviceError(device, f"{call}: operation not supported")

    def _folder(self, device: str) -> Path:
        return self._directory / f"device-{device}"

    def _path(self, device: str, name: str) -> Path:
        folder = self._folder(device)
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder / name

    @contextlib.contextmanager
    def _lock_accounts(self, device: str) -> Iterator[None]:
        """Excludes other processes from the device's accounts."""
        descriptor = os.open(self._path(device, ".accounts"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not try_lock(descriptor, _OWNER, exclusive=True):
                os.sched_yield()
            yield
        finally:
            os.close(descriptor)

    def _used_bytes(self, device: str) -> int:
        """Bytes of living owners; the files of others are removed, as the driver frees a killed process's memory."""
        used = 0
        for path in self._path(device, ".accounts").parent.iterdir():
            if path.name == ".accounts":
                continue
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:  # freed by its owner since the listing
                continue
            try:
                if path.name in self._owned or is_locked(descriptor, _OWNER):
                    used += os.fstat(descriptor).st_size
                else:
                    path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
        return used
