"""Digests of tensors, to compare those of an engine with others."""

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """By name, of the bytes in row-major order, wherever they are."""
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def _digest(tensor: Tensor) -> int:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return xxhash.xxh3_64_intdigest(data.numpy().data)
