"""A sum over device memory: xxh3 runs on CPUs only."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def checksum(tensor: Tensor) -> int:
    """The sum of the 64-bit words of ``tensor`` (uint8, one dimension), modulo 2**64, computed by its device."""
    whole = tensor.numel() // 8 * 8
    total = int(tensor[:whole].view(torch.int64).sum()) if whole else 0
    if whole < tensor.numel():
        total += int(
            pad(tensor[whole:].contiguous(), (0, 8 - tensor.numel() + whole)).view(torch.int64).sum()
        )
    return total % 2**64
