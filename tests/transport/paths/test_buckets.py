"""Buckets: layout, copying in pieces that can be stopped, and the digest of the whole bucket."""

import threading
from typing import Any

import pytest
import torch
import xxhash

from flexmarl.transport.errors import TransportClosed
from flexmarl.transport.paths import buckets
from flexmarl.transport.paths.buckets import PIECE_BYTES, Bucket, Layout, bucket_views, copy
from flexmarl.transport.paths.torch_tensors import KIND as TORCH

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


def test_views_are_the_bytes_of_the_bucket() -> None:
    layout = Layout.of(state())
    memory = torch.zeros(128 + layout.size_bytes, dtype=torch.uint8)
    views = bucket_views(TORCH, memory, 128, layout.specs)
    copy(TORCH, views, list(state().values()), NEVER)
    assert memory[128 : 128 + 12].view(torch.float32).tolist() == [0, 1, 2]
    assert [view.dtype for view in views] == [torch.float32, torch.bfloat16] and views[1].eq(1).all()
    assert not memory[:128].any()


@pytest.mark.parametrize("elements", [3, PIECE_BYTES])  # the latter: four pieces
def test_the_digest_is_that_of_all_bytes(elements: int) -> None:
    tensors = state(elements)
    layout = Layout.of(tensors)
    memory = bytearray(layout.size_bytes)
    bucket = Bucket(memoryview(memory), layout.specs)
    views = bucket_views(TORCH, torch.frombuffer(memory, dtype=torch.uint8), 0, layout.specs)
    copy(TORCH, views, list(tensors.values()), NEVER, bucket)
    assert bucket.digest() == xxhash.xxh3_64_intdigest(memory)


def test_a_copy_stops_between_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    pieces: Any = buckets._pieces

    def stopping(*kind_and_tensors: Any) -> Any:
        for number, piece in enumerate(pieces(*kind_and_tensors)):
            if number == 2:
                stop.set()
            yield piece

    monkeypatch.setattr(buckets, "_pieces", stopping)
    target, source = torch.zeros(PIECE_BYTES), torch.ones(PIECE_BYTES)
    with pytest.raises(TransportClosed):
        copy(TORCH, [target], [source], stop)
    assert target.sum() == 2 * PIECE_BYTES // 4
