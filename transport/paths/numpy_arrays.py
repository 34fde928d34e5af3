"""NumPy's arrays in buckets."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np

from ..handle import DTYPE_BYTES, TensorSpec
from .tensor_kind import TensorKind

Array = np.ndarray[Any, Any]
_DTYPES: Final = {name: np.dtype(name) for name in DTYPE_BYTES if name in np.sctypeDict}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


class NumpyArrays:
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

    def own(self, tensor: Any) -> Array:
        return np.asarray(tensor)

    def writing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def write(self, target: Array, source: Array) -> None:
        np.copyto(target, source)

    def is_contiguous(self, tensor: Array) -> bool:
        return tensor.flags.c_contiguous

    def split(self, tensor: Array, size_bytes: int) -> Sequence[Array]:
        count = size_bytes // tensor.itemsize
        flat = tensor.reshape(-1)
        return [flat[start : start + count] for start in range(0, flat.size, count)]


KIND: Final[TensorKind[Array]] = NumpyArrays()
