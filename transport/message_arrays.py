"""NumPy arrays as values in messages. Importing this module makes ``np.ndarray`` an annotation for endpoints.

    from flexmarl.transport.message_arrays import Array

    @endpoint
    async def add(self, rewards: np.ndarray, weights: Array | None = None) -> np.ndarray: ...

``Array`` is for fields of dataclasses and models, which don't know a bare ``np.ndarray``. Sender and receiver both
import this module. Torch tensors travel by ``StateTransport``: a message carries values, and would lose a graph or a
device.

An array contiguous in C order is sent from its own memory if it is an argument of ``ask``: don't modify it until the
call returns. An array that is an argument of ``tell``, a result or an item of a stream is copied first and may change
at once; one marked read-only (``array.flags.writeable = False``) is not copied. A received array belongs to the
receiver and is writable: it is the memory of its frame, or a copy if that memory is the sender's (an actor of the same
process), unaligned or small.

Wire form: ``{"dtype": "float32", "shape": [2, 3], "data": Buffer}``, in C order and little-endian; a ``>`` before the
name of the dtype means big-endian.

NumPy scalars (``np.float32(1)``) are sent as Python numbers.
"""

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..core.protocol.codec import Buffer, register_encoder
from ..core.protocol.wire_types import register_type, wire_type
from .handle import DTYPE_BYTES

_MAX_DIMENSIONS: Final = 32

_FIELDS = {"dtype", "shape", "data"}
# Alignment of the largest number in any array; libzmq gives it to every frame but those of a batch (< 8 KiB).
_ALIGNMENT = 8


def _dtypes() -> dict[str, np.dtype[Any]]:
    """NumPy's dtypes that may travel, by name: plain numbers, not structures, strings or, above all, objects."""
    names = [name for name in DTYPE_BYTES if name in np.sctypeDict]
    little = {name: np.dtype(name).newbyteorder("<") for name in names}
    big = {f">{name}": np.dtype(name).newbyteorder(">") for name in names if DTYPE_BYTES[name] > 1}
    return little | big


_DTYPES: Final = _dtypes()
_NAMES: Final = {dtype.str: name for name, dtype in _DTYPES.items()}


def _read_fields(value: Any) -> tuple[np.dtype[Any], tuple[int, ...], Any]:
    """Returns dtype, shape and bytes of a received array.

    Raises ValueError for an invalid wire form, and if the number of bytes does not fit dtype and shape. Nothing is
    allocated before these checks.
    """
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise ValueError("invalid array: needs a map of dtype, shape and data")
    name, shape, data = value["dtype"], value["shape"], value["data"]
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"dtype {name!r} can't travel (known: {', '.join(_DTYPES)})")
    dtype = _DTYPES[name]
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"invalid shape: needs a list of at most {_MAX_DIMENSIONS} sizes")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"invalid shape {shape}: needs integers >= 0")
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValueError("invalid data: needs a buffer")
    # NumPy computes the strides of an empty array with 1 for each 0, in 64 bits.
    if math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 2**63:
        raise ValueError(f"shape {shape} is too large")
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes != memoryview(data).nbytes:
        raise ValueError(f"{name} of shape {shape} is {size_bytes} bytes, not {memoryview(data).nbytes}")
    return dtype, tuple(shape), data


def _writable(data: Any) -> Any:
    """``data`` if its elements can be read and written in place, else a copy. Writable data is the receiver's own."""
    view = memoryview(data)
    if view.readonly or np.frombuffer(view, np.uint8).ctypes.data % _ALIGNMENT:
        return bytearray(view)
    return view


def _to_plain(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Raises TypeError for anything but a plain array of numbers."""
    # A MaskedArray, for example, would arrive without its mask.
    if type(array) not in (np.ndarray, np.memmap):
        raise TypeError(f"a {type(array).__name__} can't be sent, only a plain array: np.asarray makes one")
    name = _NAMES.get(array.dtype.str)
    if name is None:
        raise TypeError(f"an array of {array.dtype} can't be sent (known: {', '.join(_DTYPES)})")
    if array.ndim > _MAX_DIMENSIONS:
        raise TypeError(f"an array of {array.ndim} dimensions can't be sent, the limit is {_MAX_DIMENSIONS}")
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return {"dtype": name, "shape": list(array.shape), "data": Buffer(flat)}


def _from_plain(value: Any) -> np.ndarray[Any, Any]:
    dtype, shape, data = _read_fields(value)
    return np.frombuffer(_writable(data), np.uint8).view(dtype).reshape(shape)


# Not NumPy's own format (.npy): its header is text that has to be evaluated, and it can hold pickles.
register_type(np.ndarray, _to_plain, _from_plain)
for _number in (np.bool_, np.integer, np.floating):
    register_encoder(_number, lambda number: number.item())

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]
else:
    Array = wire_type(np.ndarray)
