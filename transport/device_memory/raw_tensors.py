"""Tensors over memory that PyTorch has not allocated."""

import ctypes
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

_CPU, _CUDA, _UNSIGNED = 1, 2, 1  # DLPack's numbers


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_NAME: Final = b"dltensor"
# PyTorch looks at a description once more when the last view of the memory ends, at a time that is not known here. One
# has 80 bytes, and a process makes as many as it opens buffers: they stay.
_descriptions: list[Any] = []
_make_capsule = ctypes.pythonapi.PyCapsule_New
_make_capsule.restype = ctypes.py_object
_make_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def tensor_at(address: int, size_bytes: int, device: torch.device) -> Tensor:
    """The bytes from ``address`` on, uint8 of one dimension, as memory of ``device``, which has to reach them. They
    must stay as long as the tensor is used."""
    # By DLPack (https://dmlc.github.io/dlpack/latest/c_api.html), which names the device. By __cuda_array_interface__
    # PyTorch asks the driver for it, and copies if the answer is another one: memory of a card that this process does
    # not see, opened on its own, has no number here.
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    shape = (ctypes.c_int64 * 1)(size_bytes)
    kind = _CPU if device.type == "cpu" else _CUDA
    described = _Tensor(address, kind, device.index or 0, 1, _UNSIGNED, 8, 1, shape)
    _descriptions.append((described, shape))
    tensor: Tensor = from_dlpack(_make_capsule(ctypes.byref(described), _NAME, None))
    return tensor
