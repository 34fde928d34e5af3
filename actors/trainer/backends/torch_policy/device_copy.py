"""Tensors of the host to a device by one copy that nothing waits for."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

_ALIGNMENT: Final = 16
"""Bytes: the start of each tensor in the copy is a multiple, as every dtype needs."""


def copy_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """``tensors``, on the CPU, on ``device``: as they are for the CPU itself, else parts of one buffer.

    For a GPU the buffer is pinned. Torch keeps its memory until the copy is done, so the caller may forget it.
    """
    if device.type == "cpu":
        return list(tensors)
    buffer = pack(tensors, pinned=device.type == "cuda").to(device, non_blocking=True)
    return unpack(buffer, tensors)


def pack(tensors: Sequence[Tensor], *, pinned: bool) -> Tensor:
    """The bytes of all ``tensors`` in one uint8 tensor."""
    *starts, total = _starts(tensors)
    buffer = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
    for start, tensor in zip(starts, tensors, strict=True):
        _part(buffer, start, tensor).copy_(tensor)
    return buffer


def unpack(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in a ``buffer`` that ``pack`` made of tensors ``like`` these.

    To autograd each is a tensor of its own: to write to one does not change the others that a backward needs.
    """
    *starts, _ = _starts(like)
    # Views have one count of changes together, by which autograd refuses them all; ``data`` has one of its own.
    return [_part(buffer, start, tensor).data for start, tensor in zip(starts, like, strict=True)]


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """The first byte of each tensor, and the end."""
    sizes = (-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
    return list(accumulate(sizes, initial=0))


def _part(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
