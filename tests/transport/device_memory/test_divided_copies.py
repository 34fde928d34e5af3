"""A large tensor of a device is copied in pieces, each with its digest, so that several threads are at it, and the
device copies the next ones meanwhile."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flexmarl.transport.host_memory.block import CHUNK_BYTES
from flexmarl.transport.payload import Copying, Layout, WrongDigest, fetch, make_views, put

PIECE = 16 * CHUNK_BYTES


class Copies:
    """Notes the copies of tensors that are on a device by their identity. Waiting for a copy completes the copy."""

    def __init__(self, on_device: list[torch.Tensor], refused: int | None = None) -> None:
        self._on_device = on_device
        self._refused = refused
        self.ranges: list[tuple[int, int | None]] = []
        self.under_way = self.most_under_way = 0

    def is_on_device(self, tensor: Any) -> bool:
        return any(tensor is other for other in self._on_device)

    def is_divisible(self, target: Any, source: Any) -> bool:
        return bool(target.is_contiguous() and source.is_contiguous())

    def begin(self, target: Any, source: Any, begin: int = 0, end: int | None = None) -> Callable[[], None]:
        if len(self.ranges) == self._refused:
            raise OSError("no device")
        self.ranges.append((begin, end))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        is_done = False

        def wait() -> None:
            nonlocal is_done
            if is_done:
                return
            is_done = True
            self.under_way -= 1
            if end is None:
                target.copy_(source)
            else:
                target.view(-1).view(torch.uint8)[begin:end] = source.view(-1).view(torch.uint8)[begin:end]

        return wait


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
        copying.begin(part)()
    offset = layout.specs[1].offset
    pieces = [(0, PIECE - offset), (PIECE - offset, 2 * PIECE - offset), (2 * PIECE - offset, 2 * PIECE)]
    assert sorted(copies.ranges, key=str) == sorted([*pieces, (0, None)], key=str)
    assert all(torch.equal(view, source) for view, source in zip(views, sources.values(), strict=True))


def copying_of_device(
    copies: Copies, source: torch.Tensor
) -> tuple[Copying, bytearray, memoryview, torch.Tensor]:
    """A copy of ``source`` to the host: it, the memory, the table of its digests, and the memory as a tensor."""
    layout = Layout.of({"w": source})
    memory = bytearray(layout.size_bytes)
    views = make_views(layout.kind, torch.frombuffer(memory, dtype=torch.uint8), 0, layout.specs)
    table = memoryview(bytearray(8 * -(-layout.size_bytes // CHUNK_BYTES))).cast("Q")
    return (
        Copying(layout.kind, views, [source], layout.specs, layout.size_bytes, copies),
        memory,
        table,
        views[0],
    )


def each(count: int, do: Callable[[Iterator[int]], None]) -> None:
    do(iter(range(count)))


def test_a_thread_has_several_copies_under_way_and_waits_for_each_before_its_digest() -> None:
    source = torch.randn(6 * PIECE // 4, generator=torch.Generator().manual_seed(0))
    copies = Copies([source])
    copying, memory, table, view = copying_of_device(copies, source)
    beside_digests: list[int] = []

    def note(start: int) -> None:
        if start % PIECE == 0:
            beside_digests.append(copies.under_way)

    put(copying, memoryview(memory), table, each, threading.Event(), note)
    assert torch.equal(view, source)
    assert (copies.most_under_way, copies.under_way) == (4, 0)
    assert beside_digests == [3, 3, 3, 2, 1, 0]
    back = torch.zeros_like(source)
    to_device = Copies([back])
    layout = Layout.of({"w": source})
    copying = Copying(layout.kind, [back], [view], layout.specs, layout.size_bytes, to_device)
    fetch(copying, memoryview(memory), table, each, threading.Event())  # the digests are those of the copies
    assert torch.equal(back, source)
    assert (to_device.most_under_way, to_device.under_way) == (4, 0)


def test_behind_an_error_no_copy_is_under_way() -> None:
    source = torch.ones(3 * PIECE // 4)
    copies = Copies([source], refused=2)
    copying, memory, table, view = copying_of_device(copies, source)
    with pytest.raises(OSError, match="no device"):
        put(copying, memoryview(memory), table, each, threading.Event())
    assert (len(copies.ranges), copies.under_way) == (2, 0)
    # In the other direction a digest may be wrong.
    back = Copies([source])
    layout = Layout.of({"w": source})
    copying = Copying(layout.kind, [source], [view], layout.specs, layout.size_bytes, back)
    table[2 * PIECE // CHUNK_BYTES] = 1
    with pytest.raises(WrongDigest):
        fetch(copying, memoryview(memory), table, each, threading.Event())
    assert back.under_way == 0
