"""A program that opens memory of another process's device, reads it, and closes it:
``python -I ipc_probe.py LIBRARY DEVICE HANDLE BYTE``.

``LIBRARY``: the file of CUDA's runtime library. ``DEVICE``: its number. ``HANDLE``: in hexadecimal digits. ``BYTE``:
the value of each byte of the memory. Ends with status 0, or with 1 and the reason on standard error. It imports nothing
of this package, nor PyTorch: it runs at the start of a trainer, which waits for it.
"""

import ctypes
import sys
from collections.abc import Callable

_READ_BYTES = 64
_LAZY_PEER_ACCESS = 1
_TO_HOST = 2


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


def main(library: str, device: str, handle: str, byte: str) -> str:
    """The reason why the memory can't be read; empty if it can."""
    cuda = ctypes.CDLL(library)
    cuda.cudaGetErrorString.restype = ctypes.c_char_p
    cuda.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint)
    address = ctypes.c_void_p()
    memory = (ctypes.c_ubyte * _READ_BYTES)()
    opened = _Handle.from_buffer_copy(bytes.fromhex(handle))
    calls: tuple[tuple[str, Callable[[], int]], ...] = (
        ("cudaSetDevice", lambda: cuda.cudaSetDevice(int(device))),
        (
            "cudaIpcOpenMemHandle",
            lambda: cuda.cudaIpcOpenMemHandle(ctypes.byref(address), opened, _LAZY_PEER_ACCESS),
        ),
        ("cudaMemcpy", lambda: cuda.cudaMemcpy(memory, address, ctypes.c_size_t(_READ_BYTES), _TO_HOST)),
        ("cudaIpcCloseMemHandle", lambda: cuda.cudaIpcCloseMemHandle(address)),
    )
    for name, call in calls:
        if status := call():
            return f"{name}: {cuda.cudaGetErrorString(status).decode(errors='replace')}"
    return "" if set(memory) == {int(byte)} else "its bytes are others when another process reads them"


if __name__ == "__main__":
    reason = main(*sys.argv[1:])
    sys.stderr.write(reason)
    sys.exit(1 if reason else 0)
