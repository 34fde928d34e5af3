"""NumPy arrays as values in messages. Importing this module makes ``np.ndarray`` an annotation for endpoints.

    from flexmarl.transport.message_arrays import Array

    @endpoint
    async def add(self, rewards: np.ndarray, weights: Array | None = None) -> np.ndarray: ...

``Array`` is for fields of dataclasses and models, where a bare ``np.ndarray`` says nothing. Both sides import this
module. ``tensors`` does the same for torch, and what one sends the other can receive.

An argument of a call is sent as it lies in memory, without a copy where it is contiguous in C order: leave it alone
until the call has been answered. What is told one-way, returned or yielded is copied before it is sent, so that it may
change at once; an array that is marked read-only (``array.flags.writeable = False``) is not. What is received is the
receiver's own, and can be written to: the memory of the frame it came in, or a copy where that memory is the sender's
(an actor of the same process), is not aligned, or is small.

On the wire it is ``{"dtype": "float32", "shape": [2, 3], "data": Buffer}``, in C order and little-endian, or big-endian
with a ``>`` before the name.

NumPy's numbers (``np.float32(1)``) are sent as Python's.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..core.protocol.codec import Buffer, register_encoder
from ..core.signature import register_type, wire_type
from .handle import DTYPE_BYTES

MAX_DIMENSIONS: Final = 32

_FIELDS = {"dtype", "shape", "data"}
# Of the largest number in any array, and what libzmq gives every frame that it does not take out of a batch (< 8 KiB).
_ALIGNMENT = 8


def _dtypes() -> dict[str, np.dtype[Any]]:
    """What may travel, by name: plain numbers, not structures, strings or, above all, objects."""
    names = [name for name in DTYPE_BYTES if name in np.sctypeDict]
    little = {name: np.dtype(name).newbyteorder("<") for name in names}
    big = {f">{name}": np.dtype(name).newbyteorder(">") for name in names if DTYPE_BYTES[name] > 1}
    return little | big


_DTYPES: Final = _dtypes()
_NAMES: Final = {dtype.str: name for name, dtype in _DTYPES.items()}


def to_fields(dtype: str, shape: Sequence[int], flat: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The wire form. ``flat``: a view, as bytes, of the elements."""
    return {"dtype": dtype, "shape": list(shape), "data": Buffer(flat)}


def read_fields(value: Any, item_bytes: dict[str, int]) -> tuple[str, tuple[int, ...], Any]:
    """dtype, shape and flat bytes of what arrived; ``item_bytes``: the dtypes that are known, and their sizes.

    Raises ValueError where it is none, or the bytes are not as many as the shape says. Nothing is allocated before.
    """
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise ValueError("an array is wanted: a map of dtype, shape and data")
    dtype, shape, data = value["dtype"], value["shape"], value["data"]
    if not isinstance(dtype, str) or dtype not in item_bytes:
        raise ValueError(f"dtype {dtype!r} can't travel (known: {', '.join(item_bytes)})")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"the shape is no list of at most {MAX_DIMENSIONS} sizes")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{shape} is no shape")
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValueError("the data is no buffer")
    # Strides of an empty array are computed as if its zeros were ones, in 64 bits.
    if math.prod(max(size, 1) for size in shape) * item_bytes[dtype] >= 2**63:
        raise ValueError(f"{shape} is too large a shape")
    size_bytes = math.prod(shape) * item_bytes[dtype]
    if size_bytes != memoryview(data).nbytes:
        raise ValueError(f"{dtype} of shape {shape} is {size_bytes} bytes, not {memoryview(data).nbytes}")
    return dtype, tuple(shape), data


def own_bytes(data: Any) -> Any:
    """``data`` where its elements can be read and written in place, else a copy. Writable is what nobody else has."""
    view = memoryview(data)
    if view.readonly or np.frombuffer(view, np.uint8).ctypes.data % _ALIGNMENT:
        return bytearray(view)
    return view


def _to_plain(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Raises TypeError for what is more, or something else, than numbers in a grid."""
    if type(array) not in (np.ndarray, np.memmap):  # a MaskedArray, say, would arrive without its mask
        raise TypeError(f"a {type(array).__name__} can't be sent, only a plain array: np.asarray makes one")
    name = _NAMES.get(array.dtype.str)
    if name is None:
        raise TypeError(f"an array of {array.dtype} can't be sent (known: {', '.join(_DTYPES)})")
    if array.ndim > MAX_DIMENSIONS:
        raise TypeError(f"an array of {array.ndim} dimensions can't be sent, the limit is {MAX_DIMENSIONS}")
    return to_fields(name, array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8))


_ITEM_BYTES: Final = {name: dtype.itemsize for name, dtype in _DTYPES.items()}


def _from_plain(value: Any) -> np.ndarray[Any, Any]:
    name, shape, data = read_fields(value, _ITEM_BYTES)
    return np.frombuffer(own_bytes(data), np.uint8).view(_DTYPES[name]).reshape(shape)


register_type(np.ndarray, _to_plain, _from_plain)
for _number in (np.bool_, np.integer, np.floating):
    register_encoder(_number, lambda number: number.item())

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]
else:
    Array = wire_type(np.ndarray)
