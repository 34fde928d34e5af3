"""NVIDIA's devices: memory and handles by CUDA's runtime library, copies by PyTorch.

Memory is allocated by ``cudaMalloc``, not by PyTorch's allocator: its handle is that of the whole memory, and
PyTorch's expandable segments, which can't be exported, have no part in it.
"""

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import DeviceError, OutOfDeviceMemory, UnknownDevice
from ..statistics import MemoryUse
from ..tensors.torch_tensors import checksum
from .devices import DeviceBuffer, DeviceEvent, Devices

_HANDLE_BYTES: Final = 64
_OUT_OF_MEMORY: Final = 2
_LAZY_PEER_ACCESS: Final = 1
_REGISTER_PORTABLE: Final = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class CudaBuffer(DeviceBuffer):
    """See ``DeviceBuffer``."""

    def __init__(self, device: str, index: int, address: int, size_bytes: int) -> None:
        self.device = device
        self.index = index
        self.address = address
        self.size_bytes = size_bytes
        self.closed = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 2}

    @property
    def tensor(self) -> Tensor:
        if self.closed:
            raise DeviceError(self.device, "the memory was closed or freed")
        if not self.size_bytes:
            return torch.empty(0, dtype=torch.uint8, device=f"cuda:{self.index}")
        return torch.as_tensor(self, device=f"cuda:{self.index}")


class CudaEvent(DeviceEvent):
    """See ``DeviceEvent``."""

    def __init__(self, device: str, event: torch.cuda.Event) -> None:
        self._device = device
        self._event = event

    def synchronize(self) -> None:
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise DeviceError(self._device, str(error)) from error


class CudaDevices(Devices[CudaBuffer]):
    """See ``Devices``. Copies run on a stream of their own, after all that PyTorch has begun before them."""

    def __init__(self) -> None:
        """Raises UnknownDevice if PyTorch sees no device."""
        if not torch.cuda.is_available():
            raise UnknownDevice("cuda", [])
        count = torch.cuda.device_count()
        self._indices = {_uuid(index): index for index in range(count)}
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._lock = threading.Lock()
        self._opened: set[bytes] = set()
        self._handles: dict[int, bytes] = {}

    def visible(self) -> list[str]:
        return list(self._indices)

    def unreachable(self) -> frozenset[tuple[str, str]]:
        return frozenset(
            (device, peer)
            for device, peer in itertools.permutations(self._indices, 2)
            if not torch.cuda.can_device_access_peer(self._indices[device], self._indices[peer])
        )

    def memory(self, device: str) -> MemoryUse:
        free, total = torch.cuda.mem_get_info(self._index(device))
        return MemoryUse(free, total)

    def device_of(self, tensor: Tensor) -> str | None:
        if not tensor.is_cuda:
            return None
        return next(uuid for uuid, index in self._indices.items() if index == tensor.device.index)

    def allocate(self, device: str, size_bytes: int) -> CudaBuffer:
        index = self._index(device)
        address = ctypes.c_void_p()
        with torch.cuda.device(index):
            status = _runtime().cudaMalloc(ctypes.byref(address), ctypes.c_size_t(max(1, size_bytes)))
        if status == _OUT_OF_MEMORY:
            _runtime().cudaGetLastError()  # else PyTorch's next call raises it
            raise OutOfDeviceMemory(device, size_bytes, self.memory(device).free_bytes)
        _check(status, device, "cudaMalloc")
        return CudaBuffer(device, index, address.value or 0, size_bytes)

    def free(self, buffer: CudaBuffer) -> None:
        if buffer.closed:
            raise DeviceError(buffer.device, "memory can't be freed: it was before")
        buffer.closed = True
        with torch.cuda.device(buffer.index):
            _check(_runtime().cudaFree(ctypes.c_void_p(buffer.address)), buffer.device, "cudaFree")

    def copy(self, device: str, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> CudaEvent:
        index = self._index(device)
        with torch.cuda.device(index):
            stream = self._streams.setdefault(device, torch.cuda.Stream(index))  # type: ignore[no-untyped-call]
            # The tensors may still be computed there: a copy on a stream of its own would not wait for them.
            stream.wait_stream(torch.cuda.default_stream(index))
            with torch.cuda.stream(stream), torch.inference_mode():
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
            return CudaEvent(device, stream.record_event())

    def checksum(self, tensor: Tensor) -> int:
        return checksum(tensor)

    def export(self, buffer: CudaBuffer) -> bytes:
        handle = _IpcHandle()
        with torch.cuda.device(buffer.index):
            status = _runtime().cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(buffer.address))
        _check(status, buffer.device, "cudaIpcGetMemHandle")
        return bytes(handle)

    def open(self, device: str, handle: bytes, size_bytes: int) -> CudaBuffer:
        index = self._index(device)
        if len(handle) != _HANDLE_BYTES:
            raise DeviceError(device, "invalid handle")
        # CUDA itself counts how often a handle is opened. Here a second time is a defect of the caller, which would
        # close it once.
        with self._lock:
            if handle in self._opened:
                raise DeviceError(device, "the handle is open already")
            address = ctypes.c_void_p()
            with torch.cuda.device(index):
                status = _runtime().cudaIpcOpenMemHandle(
                    ctypes.byref(address), _IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
                )
            _check(status, device, "cudaIpcOpenMemHandle")
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
            status = _runtime().cudaIpcCloseMemHandle(ctypes.c_void_p(buffer.address))
        _check(status, buffer.device, "cudaIpcCloseMemHandle")

    def pin(self, address: int, size_bytes: int) -> Callable[[], None]:
        device = next(iter(self._indices))
        status = _runtime().cudaHostRegister(
            ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _REGISTER_PORTABLE
        )
        _check(status, device, "cudaHostRegister")

        def unpin() -> None:
            _check(_runtime().cudaHostUnregister(ctypes.c_void_p(address)), device, "cudaHostUnregister")

        return unpin

    def _index(self, device: str) -> int:
        if device not in self._indices:
            raise UnknownDevice(device, self.visible())
        return self._indices[device]


def _uuid(index: int) -> str:
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


# By ctypes, not by a package for CUDA: PyTorch has the library that fits its driver, and a second one in the process
# could be of another version.
@functools.cache
def _runtime() -> Any:
    """CUDA's runtime library, which PyTorch has loaded already: by its name the loader finds the same one."""
    major = (torch.version.cuda or "12").partition(".")[0]
    library = ctypes.CDLL(f"libcudart.so.{major}")
    library.cudaGetErrorString.restype = ctypes.c_char_p
    library.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(ctypes.c_void_p), _IpcHandle, ctypes.c_uint)
    return library


def _check(status: int, device: str, call: str) -> None:
    if status:
        _runtime().cudaGetLastError()
        text = _runtime().cudaGetErrorString(status)
        raise DeviceError(device, f"{call}: {text.decode(errors='replace')}")
