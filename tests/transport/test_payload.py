"""Payloads: layout, copying in pieces that can be stopped, and the digest of the whole payload."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.transport.errors import TransportClosed
from flexmarl.transport.handle import TensorSpec
from flexmarl.transport.host_memory.block import CHUNK_BYTES
from flexmarl.transport.payload import Copying, Layout, Part, WrongDigest, fetch, make_views, parts_of, put
from flexmarl.transport.tensors.torch_tensors import KIND as TORCH

NEVER = threading.Event()


def state(elements: int = 3) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(elements, dtype=torch.float32), "b": torch.ones(2, 5, dtype=torch.bfloat16)}


def test_a_layout_aligns_every_tensor() -> None:
    layout = Layout.of(state())
    assert [(spec.offset, spec.size_bytes) for spec in layout.specs] == [(0, 12), (64, 20)]
    assert layout.size_bytes == 84
    assert Layout.of({}).size_bytes == 0


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.ones(2, 5, dtype=torch.bfloat16), "a": torch.ones(3)},
        {"a": torch.ones(3)},
        {"a": torch.ones(4), "b": torch.ones(2, 5, dtype=torch.bfloat16)},
        {"a": torch.ones(3), "b": torch.ones(2, 5)},
    ],
    ids=["order", "missing", "shape", "dtype"],
)
def test_a_layout_fits_the_same_names_shapes_and_dtypes(other: dict[str, torch.Tensor]) -> None:
    layout = Layout.of(state())
    assert layout.fits(state()) and not layout.fits(other)


def shared(count: int, do: Any) -> None:
    do(iter(reversed(range(count))))  # any order


def copying_of(targets: list[torch.Tensor], sources: list[torch.Tensor], layout: Layout) -> Copying:
    return Copying(TORCH, targets, sources, layout.specs, layout.size_bytes)


def test_views_are_the_bytes_of_the_payload() -> None:
    layout = Layout.of(state())
    memory = torch.zeros(128 + layout.size_bytes, dtype=torch.uint8)
    views = make_views(TORCH, memory, 128, layout.specs)
    copying = copying_of(views, list(state().values()), layout)
    for part in copying.parts:
        copying.begin(part)()
    assert memory[128 : 128 + 12].view(torch.float32).tolist() == [0, 1, 2]
    assert [view.dtype for view in views] == [torch.float32, torch.bfloat16] and views[1].eq(1).all()
    assert not memory[:128].any()


specs = st.lists(st.tuples(st.integers(0, 5 * CHUNK_BYTES), st.sampled_from([0, 1, 3])), max_size=6)


@given(specs)
def test_parts_cover_every_byte_of_every_tensor_once_in_whole_chunks(sizes: list[tuple[int, int]]) -> None:
    found, end = [], 0
    for number, (size, _) in enumerate(sizes):
        begin = -(-end // 64) * 64
        found.append(TensorSpec(str(number), (size,), "uint8", begin))
        end = begin + size
    parts = parts_of(found, [chunks * CHUNK_BYTES for _, chunks in sizes], end)
    position = 0
    for part in parts:
        assert part.start == position and part.start % CHUNK_BYTES == 0 and part.cuts
        assert part.end % CHUNK_BYTES == 0 or part.end == end
        position = part.end
        assert all(
            part.start <= found[index].offset + begin < found[index].offset + stop <= part.end
            for index, begin, stop in part.cuts
        )
    assert position == end or not parts
    for index, (size, chunks) in enumerate(sizes):
        cuts = [(begin, stop) for part in parts for i, begin, stop in part.cuts if i == index]
        assert not cuts or (cuts[0][0], cuts[-1][1]) == (0, size)
        assert [begin for begin, _ in cuts[1:]] == [stop for _, stop in cuts[:-1]]
        assert len(cuts) == min(size, 1) if not chunks else sum(b - a for a, b in cuts) == size
        assert chunks == 0 or all(b - a <= chunks * CHUNK_BYTES for a, b in cuts)


def test_parts_of_a_selection_leave_out_the_chunks_between() -> None:
    selected = [
        TensorSpec("a", (10,), "uint8", 3 * CHUNK_BYTES + 5),
        TensorSpec("b", (2 * CHUNK_BYTES,), "uint8", 7 * CHUNK_BYTES + 1),
    ]
    parts = parts_of(selected, [CHUNK_BYTES] * 2, 10 * CHUNK_BYTES)
    chunks_ = [(part.start // CHUNK_BYTES, part.end // CHUNK_BYTES) for part in parts]
    assert chunks_ == [(3, 4), (7, 8), (8, 9), (9, 10)]


@pytest.mark.parametrize("elements", [3, CHUNK_BYTES])  # the latter: four chunks and a part of one
def test_the_digest_is_that_of_all_bytes(elements: int) -> None:
    tensors = state(elements)
    layout = Layout.of(tensors)
    memory = bytearray(layout.size_bytes)
    table = memoryview(bytearray(8 * 10)).cast("Q")
    views = make_views(TORCH, torch.frombuffer(memory, dtype=torch.uint8), 0, layout.specs)
    copying = copying_of(views, list(tensors.values()), layout)
    digest = put(copying, memoryview(memory), table, shared, NEVER)
    pieces = [memory[start : start + CHUNK_BYTES] for start in range(0, len(memory), CHUNK_BYTES)]
    digests = [xxhash.xxh3_64_intdigest(piece) for piece in pieces]
    assert list(table[: len(digests)]) == digests and not any(table[len(digests) :])
    assert digest == xxhash.xxh3_64_intdigest(b"".join(one.to_bytes(8, "little") for one in digests))
    for changed in range(0, len(memory), max(1, len(memory) // 7)):
        memory[changed] ^= 1
        with pytest.raises(WrongDigest):
            fetch(copying, memoryview(memory), table, shared, NEVER)
        memory[changed] ^= 1
    fetch(copying, memoryview(memory), table, shared, NEVER)


def test_a_copy_stops_between_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    copied = []

    class Stopping(Copying):
        def begin(self, part: Part) -> Callable[[], None]:
            wait = super().begin(part)
            copied.append(part)
            if len(copied) == 2:
                stop.set()
            return wait

    source = {"w": torch.ones(CHUNK_BYTES)}  # four parts
    layout = Layout.of(source)
    memory = bytearray(layout.size_bytes)
    views = make_views(TORCH, torch.frombuffer(memory, dtype=torch.uint8), 0, layout.specs)
    copying = Stopping(TORCH, views, list(source.values()), layout.specs, layout.size_bytes)
    with pytest.raises(TransportClosed):
        put(copying, memoryview(memory), memoryview(bytearray(64)).cast("Q"), shared, stop)
    assert len(copied) == 2 and views[0].sum() == 2 * CHUNK_BYTES // 4
