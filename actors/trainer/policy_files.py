"""Files of a saved policy: tensors as safetensors, nothing that could execute code.

A folder is read in two passes: ``check_tensors`` looks only at headers and raises before anything is changed;
``read_tensors_into`` then copies into tensors that already exist.
"""

# Not torch.distributed.checkpoint: its own format has a pickled index, and the safetensors of several ranks become a
# Hugging Face folder only when they are written a second time (consolidate_safetensors_files). It plans a save and a
# load by collective calls, where each rank computes its offsets from the shapes here. It would replace the two
# functions that write and read rows; the parts of other numbers of ranks (shards.py, which the pool needs too), the
# comparison with headers, and the commit of all policies of a step together (orchestrator/checkpoint.py) would stay.

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointIncomplete, CheckpointMismatch
from .shards import Shard, whole

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES |= {torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL"}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], parts: Mapping[str, Shard] | None = None, *, first: bool = True
) -> None:
    """Writes contiguous tensors, none sharing memory with another, from any device. The file's mode is as the umask
    says.

    ``parts``: of which the tensors are the rows; None: they are whole. Each rank of a gang writes its rows into the
    same file, in any order; the ``first`` also writes the header and all that is whole on every rank.
    """
    parts = parts or {name: whole(tensor.shape) for name, tensor in tensors.items()}
    names = _order_names(tensors)
    offsets = _offsets(names, tensors, parts)
    header = _header_of(offsets, tensors, parts)
    path.touch()
    with path.open("r+b") as file:
        if first:
            file.write(header)
            file.truncate(len(header) + max((end for _, end in offsets.values()), default=0))
        for name in names:
            part, (start, end) = parts[name], offsets[name]
            if tensors[name].numel() and (first or not part.is_whole):
                row_bytes = (end - start) // (part.shape[0] if part.shape else 1)
                file.seek(len(header) + start + part.start * row_bytes)
                file.write(_bytes(tensors[name]))


def write_one_by_one(
    path: Path, outline: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """The same of whole tensors that are taken one after the other, in any order. ``outline``: names, shapes and dtypes
    of all of them, such as tensors on ``meta``."""
    parts = {name: whole(tensor.shape) for name, tensor in outline.items()}
    offsets = _offsets(_order_names(outline), outline, parts)
    header = _header_of(offsets, outline, parts)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + max((end for _, end in offsets.values()), default=0))
        for name, tensor in tensors:
            file.seek(len(header) + offsets[name][0])
            file.write(_bytes(tensor))


def _order_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """By size of an element, so that each tensor is aligned, as in safetensors' own files."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _header_of(
    offsets: Mapping[str, tuple[int, int]], tensors: Mapping[str, Tensor], parts: Mapping[str, Shard]
) -> bytes:
    return _header({name: (tensors[name].dtype, parts[name].shape, at) for name, at in offsets.items()})


def _offsets(
    names: Sequence[str], tensors: Mapping[str, Tensor], parts: Mapping[str, Shard]
) -> dict[str, tuple[int, int]]:
    """The bytes of every whole tensor behind the header: the first, and the end."""
    sizes = [tensors[name].element_size() * prod(parts[name].shape) for name in names]
    ends = list(accumulate(sizes))
    return {name: (end - size, end) for name, size, end in zip(names, sizes, ends, strict=True)}


def _header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...], tuple[int, int]]]) -> bytes:
    """That of a safetensors file (https://github.com/huggingface/safetensors#format), a multiple of 8 bytes long."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers looks for it before it reads
    for name, (dtype, shape, offsets) in tensors.items():
        entries[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def check_tensors(
    path: Path, expected: Mapping[str, Tensor], parts: Mapping[str, Shard] | None = None
) -> None:
    """Reads the header of ``path`` and compares names, dtypes and shapes with ``expected``, of which each tensor is
    whole, or the rows that ``parts`` says.

    Raises CheckpointIncomplete if the file is missing, cut short or not a safetensors file, and
    CheckpointMismatch naming the first tensor that is absent, unexpected or of another dtype or shape.
    """
    with _open_tensors(path) as file:
        present = set(file.keys())
        for name, tensor in expected.items():
            declared = f"{_DTYPES[tensor.dtype]} {list(parts[name].shape if parts else tensor.shape)}"
            if name not in present:
                raise CheckpointMismatch(path, name, declared, "no such tensor")
            header = file.get_slice(name)
            stored = f"{header.get_dtype()} {list(header.get_shape())}"
            if stored != declared:
                raise CheckpointMismatch(path, name, declared, stored)
    for name in sorted(present - expected.keys()):
        raise CheckpointMismatch(path, name, "no such tensor", "a tensor the policy does not have")


def outline_of_file(path: Path) -> dict[str, Tensor]:
    """The tensors of ``path`` without memory. Raises CheckpointIncomplete."""
    types = {code: dtype for dtype, code in _DTYPES.items()}
    with _open_tensors(path) as file:
        headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        return {
            name: torch.empty(header.get_shape(), dtype=types[header.get_dtype()], device="meta")
            for name, header in headers.items()
        }


def read_tensors_into(
    path: Path, destination: Mapping[str, Tensor], parts: Mapping[str, Shard] | None = None
) -> None:
    """Copies every tensor of ``destination``, or the rows of it that ``parts`` says, from ``path`` in place, bit for
    bit, one at a time.

    The file must have passed ``check_tensors``. Raises CheckpointIncomplete if it vanished since.
    """
    with _open_tensors(path) as file, torch.no_grad():
        for name, tensor in destination.items():
            part = parts[name] if parts else whole(tensor.shape)
            if part.is_whole:
                tensor.copy_(file.get_tensor(name))
            elif tensor.numel():
                tensor.copy_(file.get_slice(name)[part.start : part.stop])


def _open_tensors(path: Path) -> Any:
    """A context manager over the file, which safetensors checks against its header at opening."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise CheckpointIncomplete(path, "the file is missing") from None
    except SafetensorError as error:
        raise CheckpointIncomplete(path, f"not readable as safetensors ({error})") from error
