"""Buckets (the tensors of a state in one block of bytes): layout, views, check of a destination, copy with a digest."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import xxhash
from torch import Tensor

from ..errors import StateMismatch, TransportClosed
from ..handle import ALIGNMENT, TensorSpec
from .torch_dtypes import DTYPE_NAMES, TORCH_DTYPES

# A copy can be stopped between two pieces; a piece takes about a millisecond.
PIECE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """The position of every tensor in its bucket: in the mapping's order, each aligned to ``ALIGNMENT`` bytes."""

    specs: tuple[TensorSpec, ...]
    dtypes: tuple[torch.dtype, ...]
    size_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Layout":
        """Raises TypeError for a sparse tensor, one without storage (meta) or one of an unknown dtype."""
        specs = []
        end = 0
        for name, tensor in tensors.items():
            if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
                raise TypeError(f"{name}: {tensor.dtype}, {tensor.layout}, on {tensor.device}: can't travel")
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            specs.append(TensorSpec(name, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], offset))
            end = offset + specs[-1].size_bytes
        return cls(tuple(specs), tuple(tensor.dtype for tensor in tensors.values()), end)

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """True if ``tensors`` have this layout, order of names included. Much cheaper than ``of``."""
        return len(tensors) == len(self.specs) and all(
            name == spec.name and tensor.shape == spec.shape and tensor.dtype == dtype
            for (name, tensor), spec, dtype in zip(tensors.items(), self.specs, self.dtypes, strict=True)
        )


def bucket_views(flat: Tensor, offset: int, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Views of the bucket that starts at byte ``offset`` of ``flat`` (uint8, one dimension)."""
    views = []
    for spec in specs:
        start = offset + spec.offset
        views.append(flat[start : start + spec.size_bytes].view(TORCH_DTYPES[spec.dtype]).view(spec.shape))
    return views


def destinations(key: str, specs: Sequence[TensorSpec], into: Mapping[str, Tensor] | None) -> list[Tensor]:
    """Returns the tensors to fill, in the order of ``specs``: those of ``into``, or new ones on the CPU.

    Raises StateMismatch, with every difference of names, shapes and dtypes, if ``into`` does not fit.
    """
    if into is None:
        return [torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype]) for spec in specs]
    problems = []
    for spec in specs:
        tensor = into.get(spec.name)
        if tensor is None:
            problems.append(f"{spec.name}: missing in the destination")
        elif tensor.shape != spec.shape or tensor.dtype != TORCH_DTYPES[spec.dtype]:
            problems.append(
                f"{spec.name}: {spec.dtype}{list(spec.shape)} does not go into "
                f"{DTYPE_NAMES.get(tensor.dtype, tensor.dtype)}{list(tensor.shape)}"
            )
    if problems or len(into) != len(specs):
        surplus = into.keys() - {spec.name for spec in specs}
        problems += [f"{name}: not in the state" for name in sorted(surplus)]
        raise StateMismatch(key, problems)
    return [into[spec.name] for spec in specs]


def copy(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    stop: threading.Event,
    bucket: "Bucket | None" = None,
) -> None:
    """Copies every source to its target, on any device and with any strides.

    The digest of ``bucket`` is computed along with the copy, while its bytes are in the cache. Raises TransportClosed
    soon after ``stop`` is set.
    """
    # Not no_grad: engines have weights that may only be written in inference mode; all others may be, too.
    with torch.inference_mode():
        for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
            for end, part, origin in _pieces(target, source):
                if stop.is_set():
                    raise TransportClosed
                part.copy_(origin)
                if bucket is not None:
                    bucket.reached(index, end)


def _pieces(target: Tensor, source: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Pairs of parts of about PIECE_BYTES, each with the offset of its end; one pair if either tensor is strided."""
    size = target.nbytes
    if size <= PIECE_BYTES or not (target.is_contiguous() and source.is_contiguous()):
        yield size, target, source
        return
    count = PIECE_BYTES // target.element_size()
    end = 0
    for part, origin in zip(
        torch.split(target.view(-1), count), torch.split(source.view(-1), count), strict=True
    ):
        end += part.nbytes
        yield end, part, origin


class Bucket:
    """The bytes of a bucket and the xxh3_64 of those copied so far."""

    def __init__(self, memory: memoryview, specs: Sequence[TensorSpec]) -> None:
        self._memory = memory
        self._specs = specs
        self._hasher = xxhash.xxh3_64()
        self._passed = 0

    def reached(self, index: int, end: int) -> None:
        """Notes that ``end`` bytes of tensor ``index`` are copied, and all tensors before it."""
        end += self._specs[index].offset
        if end - self._passed >= PIECE_BYTES:
            self._hasher.update(self._memory[self._passed : end])
            self._passed = end

    def digest(self) -> int:
        """The digest of the whole bucket, the gaps between tensors included."""
        self._hasher.update(self._memory[self._passed :])
        self._passed = len(self._memory)
        return self._hasher.intdigest()
