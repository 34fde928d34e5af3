"""CUDA's runtime library, by ctypes: the calls that PyTorch does not offer."""

import ctypes
import functools
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ..errors import DeviceError

HANDLE_BYTES: Final = 64
OUT_OF_MEMORY: Final = 2


class IpcHandle(ctypes.Structure):
    """The name of memory for other processes."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


# By ctypes, not by a package for CUDA: PyTorch has the library that fits its driver, and a second one in the process
# could be of another version.
@functools.cache
def runtime() -> Any:
    """The library. Raises DeviceError if it can't be found."""
    major = (torch.version.cuda or "12").partition(".")[0]
    library = load_runtime(major, _folders(major))
    library.cudaGetErrorString.restype = ctypes.c_char_p
    library.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(ctypes.c_void_p), IpcHandle, ctypes.c_uint)
    return library


def load_runtime(major: str, folders: Sequence[Path], load: Callable[[str], Any] = ctypes.CDLL) -> Any:
    """The library of that major version: the one that PyTorch has loaded, or one in the folders of its packages. Raises
    DeviceError.

    A second copy does no harm: it works on the same context of the driver, as a PyTorch with the library inside needs
    it to.
    """
    name = f"libcudart.so.{major}"
    problems = []
    for candidate in [name, *map(str, _candidates(name, major, folders))]:
        try:
            return load(candidate)
        except OSError as error:
            problems.append(str(error))
    raise DeviceError(
        "cuda",
        f"CUDA's runtime library {name} can't be loaded, which offers device memory to other processes "
        f"({'; '.join(problems)}; searched {', '.join(map(str, folders)) or 'no folder'}): install "
        f"PyTorch's package nvidia-cuda-runtime of CUDA {major}, name the library's folder in LD_LIBRARY_PATH, or set "
        "weights.path=shm",
    )


def _folders(major: str) -> list[Path]:
    """The folders in which wheels of PyTorch and NVIDIA have the library."""
    packages = dict.fromkeys([Path(torch.__file__).parents[1], Path(sysconfig.get_path("purelib"))])
    parts = ("torch/lib", f"nvidia/cu{major}/lib", "nvidia/cuda_runtime/lib")
    return [folder for package in packages for part in parts if (folder := package / part).is_dir()]


def _candidates(name: str, major: str, folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        # Some wheels have it under a name with a checksum: libcudart-0123abcd.so.12
        yield from sorted({*folder.glob(f"{name}*"), *folder.glob(f"libcudart-*.so.{major}*")})


def check(status: int, device: str, call: str) -> None:
    """Raises DeviceError for a status that is not success."""
    if status:
        runtime().cudaGetLastError()  # else PyTorch's next call raises it
        text = runtime().cudaGetErrorString(status)
        raise DeviceError(device, f"{call}: {text.decode(errors='replace')}")


def runtime_file(maps: str) -> str:
    """The path of the library that a process has loaded. ``maps``: the text of its /proc/PID/maps. Raises
    DeviceError."""
    for line in maps.splitlines():
        path = line.partition("/")
        if "libcudart" in path[2].rpartition("/")[2]:
            return f"/{path[2]}"
    raise DeviceError("cuda", "CUDA's runtime library has no file that another process could load")
