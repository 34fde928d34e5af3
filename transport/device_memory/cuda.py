"""NVIDIA's devices: memory and handles by CUDA's runtime library, copies by PyTorch.

Memory is allocated by ``cudaMalloc``, not by PyTorch's allocator: its handle is that of the whole memory, and
PyTorch's expandable segments, which can't be exported, have no part in it.

Every call runs under the device that it is for. A call under another one would make a context of this process on that
device, which takes half a GB of it.
"""

import ctypes
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ..errors import DeviceError, OutOfDeviceMemory, UnknownDevice
from ..statistics import MemoryUse
from ..tensors.torch_tensors import checksum
from . import ipc_probe
from .cuda_runtime import HANDLE_BYTES, OUT_OF_MEMORY, IpcHandle, check, runtime, runtime_file
from .devices import DeviceBuffer, DeviceEvent, Devices
from .driver_memory import DriverMemory
from .raw_tensors import tensor_at

_LAZY_PEER_ACCESS: Final = 1
_REGISTER_PORTABLE: Final = 1
_PROBE_S: Final = 60.0
_PROBE_BYTE: Final = 0x5A


class CudaBuffer(DeviceBuffer):
    """See ``DeviceBuffer``. ``index``: PyTorch's number of the device."""

    def __init__(self, device: str, index: int, address: int, size_bytes: int) -> None:
        self.device = device
        self.index = index
        self.address = address
        self.size_bytes = size_bytes
        self.closed = False
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        if self.closed:
            raise DeviceError(self.device, "the memory was closed or freed")
        if self._tensor is None:
            self._tensor = tensor_at(self.address, self.size_bytes, torch.device("cuda", self.index))
        return self._tensor


class CudaEvent(DeviceEvent):
    """See ``DeviceEvent``. ``events``: by device."""

    def __init__(self, events: Sequence[tuple[str, torch.cuda.Event]]) -> None:
        self.events = events

    def synchronize(self) -> None:
        for device, event in self.events:
            try:
                event.synchronize()
            except RuntimeError as error:
                raise DeviceError(device, str(error)) from error


class CudaDevices(Devices[CudaBuffer]):
    """See ``Devices``. Copies run on streams of their own, one a direction, so that what comes and what goes use both
    ways of the bus at once."""

    def __init__(self, names: Iterable[str] = ("cuda",), driver: DriverMemory | None = None) -> None:
        """``names``: PyTorch's, of the devices that this process computes on. Raises UnknownDevice if PyTorch does not
        see one of them."""
        if not torch.cuda.is_available():
            raise UnknownDevice("cuda", [])
        self._indices = {_uuid(index): index for index in range(torch.cuda.device_count())}
        self._visible = self._find(names)
        self._driver = driver or DriverMemory()
        self._streams: dict[tuple[int, str], torch.cuda.Stream] = {}
        self._lock = threading.Lock()
        self._opened: set[bytes] = set()
        self._handles: dict[int, bytes] = {}

    def _find(self, names: Iterable[str]) -> list[str]:
        uuids = list(self._indices)
        devices = [device for name in names if (device := torch.device(name)).type == "cuda"]
        if outside := [device for device in devices if (device.index or 0) >= len(uuids)]:
            raise UnknownDevice(str(outside[0]), uuids)
        return list(dict.fromkeys(uuids[device.index or 0] for device in devices)) or uuids[:1]

    def visible(self) -> list[str]:
        return list(self._visible)

    def seen(self) -> list[str]:
        """UUIDs of all devices that PyTorch sees, those that this process does not compute on too."""
        return list(self._indices)

    def unreachable(self) -> frozenset[tuple[str, str]]:
        return frozenset(
            (device, peer)
            for device, peer in itertools.product(self._visible, self._indices)
            if device != peer
            and not torch.cuda.can_device_access_peer(self._indices[device], self._indices[peer])
        )

    def memory(self, device: str) -> MemoryUse:
        self._index(device)
        return self._driver.read(device)

    def device_of(self, tensor: Tensor) -> str | None:
        if not tensor.is_cuda:
            return None
        return next(uuid for uuid, index in self._indices.items() if index == tensor.device.index)

    def allocate(self, device: str, size_bytes: int) -> CudaBuffer:
        index = self._index(device)
        address = ctypes.c_void_p()
        with torch.cuda.device(index):
            status = runtime().cudaMalloc(ctypes.byref(address), ctypes.c_size_t(max(1, size_bytes)))
            if status == OUT_OF_MEMORY:
                runtime().cudaGetLastError()  # else PyTorch's next call raises it
                raise OutOfDeviceMemory(device, size_bytes, self._free_bytes(device))
        check(status, device, "cudaMalloc")
        return CudaBuffer(device, index, address.value or 0, size_bytes)

    def _free_bytes(self, device: str) -> int:
        try:
            return self._driver.read(device).free_bytes
        except DeviceError:
            return 0

    def release_cache(self, device: str) -> None:
        with torch.cuda.device(self._index(device)):
            torch.cuda.empty_cache()

    def free(self, buffer: CudaBuffer) -> None:
        if buffer.closed:
            raise DeviceError(buffer.device, "memory can't be freed: it was before")
        buffer.closed = True
        with torch.cuda.device(buffer.index):
            check(runtime().cudaFree(ctypes.c_void_p(buffer.address)), buffer.device, "cudaFree")

    def record(self, devices: Collection[str]) -> CudaEvent:
        events = []
        for device in devices:
            index = self._index(device)
            with torch.cuda.device(index):
                # A library may compute on a stream of its own, of the thread that calls it; the rest is on the default
                # stream.
                current, default = torch.cuda.current_stream(index), torch.cuda.default_stream(index)
                streams = [current] if current == default else [current, default]
                events += [(device, _record(stream)) for stream in streams]
        return CudaEvent(events)

    def copy(
        self,
        device: str,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        after: DeviceEvent | None = None,
    ) -> CudaEvent:
        index = self._index(device)
        begun = after if isinstance(after, CudaEvent) else self.record([device])
        way = _way(targets, sources)
        peers = {tensor.device.index for tensor in (*targets, *sources) if tensor.is_cuda} - {index}
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device(index))
            # PyTorch has a copy between two devices wait for the current streams of both, and these for the copy: the
            # other device's default stream must be neither. This device's last, as a stream brings its device along.
            for number in (*sorted(peers), index):
                stream = self._stream(number, way)
                for _, event in begun.events:
                    stream.wait_event(event)
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.inference_mode())
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            return CudaEvent([(device, _record(self._stream(index, way)))])

    def _stream(self, index: int, way: str) -> torch.cuda.Stream:
        with self._lock:
            if (index, way) not in self._streams:
                with torch.cuda.device(index):
                    self._streams[index, way] = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
            return self._streams[index, way]

    def checksum(self, tensor: Tensor) -> int:
        # On a stream of its own as the copies: on the default one it would wait for all computations.
        index = tensor.device.index
        with torch.cuda.device(index), torch.cuda.stream(self._stream(index, "sum")):
            return checksum(tensor)

    def export(self, buffer: CudaBuffer) -> bytes:
        handle = IpcHandle()
        with torch.cuda.device(buffer.index):
            status = runtime().cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(buffer.address))
        check(status, buffer.device, "cudaIpcGetMemHandle")
        return bytes(handle)

    def open_elsewhere(self, buffer: CudaBuffer, handle: bytes) -> None:
        library = runtime_file(Path("/proc/self/maps").read_text())
        self.copy(
            buffer.device, [buffer.tensor], [torch.tensor(_PROBE_BYTE, dtype=torch.uint8)]
        ).synchronize()
        program = [sys.executable, "-I", ipc_probe.__file__, library]
        arguments = [str(buffer.index), handle.hex(), str(_PROBE_BYTE)]
        try:
            probed = subprocess.run(
                [*program, *arguments], capture_output=True, text=True, timeout=_PROBE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DeviceError(buffer.device, f"the process that should open it: {error}") from error
        if probed.returncode:
            reason = probed.stderr.strip().rpartition("\n")[2]
            raise DeviceError(
                buffer.device, reason or f"the process that opened it: status {probed.returncode}"
            )

    def open(self, device: str, handle: bytes, size_bytes: int) -> CudaBuffer:
        index = self._index(device)
        if len(handle) != HANDLE_BYTES:
            raise DeviceError(device, "invalid handle")
        # CUDA itself counts how often a handle is opened. Here a second time is a defect of the caller, which would
        # close it once.
        with self._lock:
            if handle in self._opened:
                raise DeviceError(device, "the handle is open already")
            address = ctypes.c_void_p()
            with torch.cuda.device(index):
                status = runtime().cudaIpcOpenMemHandle(
                    ctypes.byref(address), IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
                )
            check(status, device, "cudaIpcOpenMemHandle")
            self._opened.add(handle)
            self._handles[address.value or 0] = handle
        return CudaBuffer(device, index, address.value or 0, size_bytes)

    def close(self, buffer: CudaBuffer) -> None:
        with self._lock:
            handle = self._handles.pop(buffer.address, None)
            if handle is None:
                raise DeviceError(buffer.device, "memory can't be closed: it was before, or is not another's")
            self._opened.discard(handle)
        buffer.closed = True
        with torch.cuda.device(buffer.index):
            status = runtime().cudaIpcCloseMemHandle(ctypes.c_void_p(buffer.address))
        check(status, buffer.device, "cudaIpcCloseMemHandle")

    def pin(self, address: int, size_bytes: int) -> Callable[[], None]:
        device = self._visible[0]
        index = self._indices[device]
        with torch.cuda.device(index):
            status = runtime().cudaHostRegister(
                ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _REGISTER_PORTABLE
            )
        check(status, device, "cudaHostRegister")

        def unpin() -> None:
            with torch.cuda.device(index):
                status = runtime().cudaHostUnregister(ctypes.c_void_p(address))
            check(status, device, "cudaHostUnregister")

        return unpin

    def make_pinned(self, size_bytes: int) -> Tensor:
        with torch.cuda.device(self._indices[self._visible[0]]):
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def _index(self, device: str) -> int:
        if device not in self._indices:
            raise UnknownDevice(device, list(self._indices))
        return self._indices[device]


def _way(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> str:
    if any(tensor.is_cpu for tensor in sources):
        return "from the host"
    return "to the host" if any(tensor.is_cpu for tensor in targets) else "between devices"


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # Blocking: else each thread that waits for it keeps a core busy.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _uuid(index: int) -> str:
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
