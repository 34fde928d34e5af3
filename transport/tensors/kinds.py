"""The libraries whose tensors can travel: PyTorch's, and NumPy's arrays for processes that don't need PyTorch.

Importing PyTorch takes a second and 170 MB: a process that sets and gets only arrays does not import it.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from .tensor_kind import TensorKind


def kind_of(tensors: Iterable[Any]) -> TensorKind[Any]:
    """NumPy's for arrays, else PyTorch's. Raises TypeError for a mixture."""
    kinds = {isinstance(tensor, np.ndarray) for tensor in tensors}
    if len(kinds) > 1:
        raise TypeError("a state has either tensors of PyTorch or arrays of NumPy")
    if kinds == {True}:
        from . import numpy_arrays

        return numpy_arrays.KIND
    return torch_kind()


def torch_kind() -> TensorKind[Any]:
    """Imports PyTorch."""
    from . import torch_tensors

    return torch_tensors.KIND
