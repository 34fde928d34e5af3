"""Files of a saved policy: tensors as safetensors, nothing that could execute code.

A folder is read in two passes: ``check_tensors`` looks only at headers and raises before anything is changed;
``read_tensors_into`` then copies into tensors that already exist.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CheckpointIncomplete, CheckpointMismatch

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES |= {torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL"}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes contiguous tensors, none sharing memory with another, from any device. The file's mode is as the umask
    says."""
    path.touch()
    mode = path.stat().st_mode
    # transformers looks for "format" before it reads a safetensors file.
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors replaces the file by one of mode 0600


def check_tensors(path: Path, expected: Mapping[str, Tensor]) -> None:
    """Reads the header of ``path`` and compares names, dtypes and shapes with ``expected``.

    Raises CheckpointIncomplete if the file is missing, cut short or not a safetensors file, and
    CheckpointMismatch naming the first tensor that is absent, unexpected or of another dtype or shape.
    """
    with _open_tensors(path) as file:
        present = set(file.keys())
        for name, tensor in expected.items():
            wanted = f"{_DTYPES[tensor.dtype]} {list(tensor.shape)}"
            if name not in present:
                raise CheckpointMismatch(path, name, wanted, "no such tensor")
            header = file.get_slice(name)
            found = f"{header.get_dtype()} {list(header.get_shape())}"
            if found != wanted:
                raise CheckpointMismatch(path, name, wanted, found)
    for name in sorted(present - expected.keys()):
        raise CheckpointMismatch(path, name, "no such tensor", "a tensor the policy does not have")


def read_tensors_into(path: Path, destination: Mapping[str, Tensor]) -> None:
    """Copies every tensor of ``destination`` from ``path`` in place, bit for bit, one at a time.

    The file must have passed ``check_tensors``. Raises CheckpointIncomplete if it vanished since.
    """
    with _open_tensors(path) as file, torch.no_grad():
        for name, tensor in destination.items():
            tensor.copy_(file.get_tensor(name))


def _open_tensors(path: Path) -> Any:
    """A context manager over the file, which safetensors checks against its header at opening."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise CheckpointIncomplete(path, "the file is missing") from None
    except SafetensorError as error:
        raise CheckpointIncomplete(path, f"not readable as safetensors ({error})") from error
