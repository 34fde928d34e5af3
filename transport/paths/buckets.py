"""Buckets (the tensors of a state in one block of bytes): layout, views, check of a destination, copy with a digest."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from ..errors import StateMismatch, TransportClosed
from ..handle import ALIGNMENT, TensorSpec
from .kinds import kind_of, torch_kind
from .tensor_kind import TensorKind

# A copy can be stopped between two pieces; a piece takes about a millisecond.
PIECE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """The position of every tensor in its bucket: in the mapping's order, each aligned to ``ALIGNMENT`` bytes."""

    kind: TensorKind[Any]
    specs: tuple[TensorSpec, ...]
    dtypes: tuple[Any, ...]
    size_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> "Layout":
        """Raises TypeError for a sparse tensor, one without storage (meta) or one of an unknown dtype."""
        kind = kind_of(tensors.values())
        specs = []
        end = 0
        for name, tensor in tensors.items():
            dtype = kind.dtype_name(tensor)
            if dtype is None:
                what = f"{tensor.dtype}, {getattr(tensor, 'layout', 'an array')}, on {tensor.device}"
                raise TypeError(f"{name}: {what}: can't travel")
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            specs.append(TensorSpec(name, tuple(tensor.shape), dtype, offset))
            end = offset + specs[-1].size_bytes
        return cls(kind, tuple(specs), tuple(tensor.dtype for tensor in tensors.values()), end)

    def fits(self, tensors: Mapping[str, Any]) -> bool:
        """True if ``tensors`` have this layout, order of names included. Much cheaper than ``of``."""
        if len(tensors) != len(self.specs) or kind_of(tensors.values()) is not self.kind:
            return False
        return all(
            name == spec.name and tensor.shape == spec.shape and tensor.dtype == dtype
            for (name, tensor), spec, dtype in zip(tensors.items(), self.specs, self.dtypes, strict=True)
        )


def bucket_views(kind: TensorKind[Any], flat: Any, offset: int, specs: Sequence[TensorSpec]) -> list[Any]:
    """Views of the bucket that starts at byte ``offset`` of ``flat`` (uint8, one dimension)."""
    starts = [offset + spec.offset for spec in specs]
    return [
        kind.view(flat[start : start + spec.size_bytes], spec)
        for start, spec in zip(starts, specs, strict=True)
    ]


def destinations(
    key: str, specs: Sequence[TensorSpec], into: Mapping[str, Any] | None
) -> tuple[TensorKind[Any], list[Any]]:
    """Returns the tensors to fill, in the order of ``specs``: those of ``into``, or new ones of PyTorch on the CPU.

    Raises StateMismatch, with every difference of names, shapes and dtypes, if ``into`` does not fit.
    """
    if into is None:
        kind = torch_kind()
        return kind, [kind.empty(spec) for spec in specs]
    kind = kind_of(into.values())
    problems = []
    for spec in specs:
        tensor = into.get(spec.name)
        if tensor is None:
            problems.append(f"{spec.name}: missing in the destination")
        elif tensor.shape != spec.shape or tensor.dtype != kind.dtype(spec.dtype):
            problems.append(
                f"{spec.name}: {spec.dtype}{list(spec.shape)} does not go into "
                f"{kind.dtype_name(tensor) or tensor.dtype}{list(tensor.shape)}"
            )
    if problems or len(into) != len(specs):
        surplus = into.keys() - {spec.name for spec in specs}
        problems += [f"{name}: not in the state" for name in sorted(surplus)]
        raise StateMismatch(key, problems)
    return kind, [into[spec.name] for spec in specs]


def copy(
    kind: TensorKind[Any],
    targets: Sequence[Any],
    sources: Sequence[Any],
    stop: threading.Event,
    bucket: "Bucket | None" = None,
) -> None:
    """Copies every source to its target, all of ``kind``, on any device and with any strides.

    The digest of ``bucket`` is computed along with the copy, while its bytes are in the cache. Raises TransportClosed
    soon after ``stop`` is set.
    """
    with kind.writing():
        for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
            for end, part, origin in _pieces(kind, target, source):
                if stop.is_set():
                    raise TransportClosed
                kind.write(part, origin)
                if bucket is not None:
                    bucket.reached(index, end)


def _pieces(kind: TensorKind[Any], target: Any, source: Any) -> Iterator[tuple[int, Any, Any]]:
    """Pairs of parts of about PIECE_BYTES, each with the offset of its end; one pair if either tensor is strided."""
    size = kind.size_bytes(target)
    if size <= PIECE_BYTES or not (kind.is_contiguous(target) and kind.is_contiguous(source)):
        yield size, target, source
        return
    parts = zip(kind.split(target, PIECE_BYTES), kind.split(source, PIECE_BYTES), strict=True)
    end = 0
    for part, origin in parts:
        end += kind.size_bytes(part)
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
