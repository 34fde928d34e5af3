"""NumPy's arrays in payloads."""

from typing import Any, Final

import numpy as np

from ..handle import DTYPE_BYTES, TensorSpec
from .tensor_kind import TensorKind

Array = np.ndarray[Any, Any]
_DTYPES: Final = {name: np.dtype(name) for name in DTYPE_BYTES if name in np.sctypeDict}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


class NumpyArrays(TensorKind[Array]):
    """See ``TensorKind``. There are no arrays of bfloat16 and float8."""

    def dtype_name(self, tensor: Array) -> str | None:
        return _NAMES.get(tensor.dtype)

    def dtype(self, name: str) -> np.dtype[Any] | None:
        return _DTYPES.get(name)

    def device(self, tensor: Array) -> str:
        return "cpu"

    def size_bytes(self, tensor: Array) -> int:
        return tensor.nbytes

    def empty(self, spec: TensorSpec) -> Array:
        return np.empty(spec.shape, _DTYPES[spec.dtype])

    def flat(self, memory: Any) -> Array:
        return np.frombuffer(memory, np.uint8)

    def view(self, part: Array, spec: TensorSpec) -> Array:
        return part.view(_DTYPES[spec.dtype]).reshape(spec.shape)

    def adopt(self, tensor: Any) -> Array:
        return np.asarray(tensor)

    def write(self, target: Array, source: Array) -> None:
        np.copyto(target, source)

    def address(self, tensor: Array) -> int | None:
        address: int = tensor.__array_interface__["data"][0]
        return address if tensor.flags.c_contiguous else None


KIND: Final[TensorKind[Array]] = NumpyArrays()
