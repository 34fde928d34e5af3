"""The interface of a library whose tensors can travel."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np

from ..handle import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Tensors: TypeAlias = Mapping[str, "Tensor"] | Mapping[str, np.ndarray[Any, Any]]
"""A state: all of one library."""


# Not NumPy for both, over PyTorch's shared memory: NumPy lacks bfloat16 and float8, and devices.
class TensorKind(Protocol[T]):
    """The tensors of one library, as far as payloads need to know them."""

    def dtype_name(self, tensor: T) -> str | None:
        """Its name in ``handle.DTYPE_BYTES``; None if the tensor can't travel: an unknown dtype, not dense."""
        ...

    def dtype(self, name: str) -> Any:
        """The library's dtype of that name."""
        ...

    def device(self, tensor: T) -> str:
        """The type of its device: ``cpu``, ``cuda``, ``meta`` for one without storage."""
        ...

    def size_bytes(self, tensor: T) -> int:
        """Bytes of its elements."""
        ...

    def empty(self, spec: TensorSpec) -> T:
        """A new one on the CPU."""
        ...

    def flat(self, memory: Any) -> T:
        """The bytes of a buffer: uint8, of one dimension, not copied."""
        ...

    def view(self, part: T, spec: TensorSpec) -> T:
        """Bytes, as the tensor that they are."""
        ...

    def adopt(self, tensor: Any) -> T:
        """A tensor of any kind, on the CPU unless it is of this kind, as one of this kind: not copied."""
        ...

    def write(self, target: T, source: T) -> None:
        """Copies all elements, on any device and with any strides."""
        ...

    def address(self, tensor: T) -> int | None:
        """The address of its elements, if they are one block of host memory, row-major."""
        ...
