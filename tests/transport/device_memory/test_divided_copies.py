"""A large tensor of a device is copied in pieces, each with its digest, so that several threads are at it."""

from typing import Any

import torch

from flexmarl.transport.host_memory.block import CHUNK_BYTES
from flexmarl.transport.payload import Copying, Layout, make_views

PIECE = 16 * CHUNK_BYTES


class Copies:
    """Notes the copies of tensors that are on a device by their identity."""

    def __init__(self, on_device: list[torch.Tensor]) -> None:
        self._on_device = on_device
        self.ranges: list[tuple[int, int | None]] = []

    def is_on_device(self, tensor: Any) -> bool:
        return any(tensor is other for other in self._on_device)

    def is_divisible(self, target: Any, source: Any) -> bool:
        return bool(target.is_contiguous() and source.is_contiguous())

    def write(self, target: Any, source: Any, begin: int = 0, end: int | None = None) -> None:
        self.ranges.append((begin, end))
        if end is None:
            target.copy_(source)
        else:
            target.view(-1).view(torch.uint8)[begin:end] = source.view(-1).view(torch.uint8)[begin:end]


def test_a_range_of_bytes_is_copied_at_a_time_but_of_strided_tensors_all() -> None:
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(PIECE // 2, generator=generator)  # two pieces
    strided = torch.randn(1000, 700, generator=generator).t()
    small = torch.arange(5)  # in the memory of the host
    sources = {"small": small, "large": large, "strided": strided}
    layout = Layout.of(sources)
    memory = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    views = make_views(layout.kind, memory, 0, layout.specs)
    copies = Copies([large, strided])
    copying = Copying(layout.kind, views, list(sources.values()), layout.specs, layout.size_bytes, copies)
    for part in reversed(copying.parts):
        copying.copy(part)
    offset = layout.specs[1].offset
    pieces = [(0, PIECE - offset), (PIECE - offset, 2 * PIECE - offset), (2 * PIECE - offset, 2 * PIECE)]
    assert sorted(copies.ranges, key=str) == sorted([*pieces, (0, None)], key=str)
    assert all(torch.equal(view, source) for view, source in zip(views, sources.values(), strict=True))
