"""Payloads (the tensors of a state as one range of bytes): layout, views, check of a destination, copies with digests.

A copy is divided into parts, for several threads. A part is one chunk of the payload as a rule: small enough that its
digest is computed while the bytes are in the cache, large enough that a switch of threads costs little beside it.
"""

import ctypes
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import xxhash

from .errors import StateMismatch, TransportClosed
from .handle import ALIGNMENT, TensorSpec
from .host_memory.block import CHUNK_BYTES, Share
from .tensors.tensor_kind import TensorKind

_DEVICE_BYTES: Final = 16 * CHUNK_BYTES
"""Bytes of one copy with a device: for a small one the call takes as long as the copy, and a large one's digests begin
late. With embeddings of a gigabyte in one copy each, a state's last seconds would be one thread's."""

_UNDER_WAY: Final = 4
"""Copies with a device that a thread has under way at most. With one, it would wait for the bus, and the bus for its
digest."""


def kind_of(tensors: Iterable[Any]) -> TensorKind[Any]:
    """NumPy's for arrays, else PyTorch's. Raises TypeError for a mixture."""
    kinds = {isinstance(tensor, np.ndarray) for tensor in tensors}
    if len(kinds) > 1:
        raise TypeError("a state has either tensors of PyTorch or arrays of NumPy")
    if kinds == {True}:
        from .tensors import numpy_arrays

        return numpy_arrays.KIND
    return torch_kind()


@functools.cache
def torch_kind() -> TensorKind[Any]:
    """PyTorch's kind; imports PyTorch."""
    # Not at the top: it takes a second and 170 MB, which a process of arrays alone, such as the store, does not need.
    from .tensors import torch_tensors

    return torch_tensors.KIND


@dataclass(frozen=True, slots=True)
class Layout:
    """The position of every tensor in its payload: in the mapping's order, each aligned to ``ALIGNMENT`` bytes."""

    kind: TensorKind[Any]
    specs: tuple[TensorSpec, ...]
    dtypes: tuple[Any, ...]
    size_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Any], *, outline: bool = False) -> "Layout":
        """Raises TypeError for a sparse tensor, one of an unknown dtype, or one without storage (on the device
        ``meta``), unless they are the ``outline`` of a state."""
        kind = kind_of(tensors.values())
        specs = []
        end = 0
        for name, tensor in tensors.items():
            dtype = kind.dtype_name(tensor)
            if dtype is None or (not outline and kind.device(tensor) == "meta"):
                what = f"{tensor.dtype}, {getattr(tensor, 'layout', 'an array')}, on {tensor.device}"
                raise TypeError(f"{name}: {what}: can't travel")
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            specs.append(TensorSpec(name, tuple(tensor.shape), dtype, offset))
            end = offset + specs[-1].size_bytes
        return cls(kind, tuple(specs), tuple(tensor.dtype for tensor in tensors.values()), end)

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in their order."""
        return [spec.name for spec in self.specs]

    def fits(self, tensors: Mapping[str, Any]) -> bool:
        """True if ``tensors`` have this layout, order of names included. Much cheaper than ``of``."""
        if len(tensors) != len(self.specs) or kind_of(tensors.values()) is not self.kind:
            return False
        return all(
            name == spec.name and tensor.shape == spec.shape and tensor.dtype == dtype
            for (name, tensor), spec, dtype in zip(tensors.items(), self.specs, self.dtypes, strict=True)
        )


def make_views(kind: TensorKind[Any], flat: Any, offset: int, specs: Sequence[TensorSpec]) -> list[Any]:
    """Views of the payload that starts at byte ``offset`` of ``flat`` (uint8, one dimension)."""
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


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes ``start`` to ``end`` of a payload, whole chunks, and the tensors in them.

    ``cuts``: the index of a tensor, and the bytes of it that are in this part.
    """

    start: int
    end: int
    cuts: tuple[tuple[int, int, int], ...]


def parts_of(specs: Sequence[TensorSpec], steps: Sequence[int], size_bytes: int) -> list[Part]:
    """The parts of a payload of ``size_bytes`` that have the tensors of ``specs``, in the order of their offsets.

    ``steps``: the tensor is cut where the payload has a multiple of so many bytes, a multiple of ``CHUNK_BYTES``; 0: it
    is not (strided). So each part has whole chunks. Chunks without a tensor are in no part.
    """
    parts: list[Part] = []
    cuts: list[tuple[int, int, int]] = []
    start = last = 0

    def close(end: int) -> None:
        nonlocal start
        if cuts:
            parts.append(Part(start, min(end, size_bytes), tuple(cuts)))
            cuts.clear()
        start = end

    for index, spec in enumerate(specs):
        begin, end = spec.offset, spec.offset + spec.size_bytes
        if begin == end:
            continue
        if begin >= (reached := -(-last // CHUNK_BYTES) * CHUNK_BYTES):
            close(reached)
            start = begin // CHUNK_BYTES * CHUNK_BYTES
        # A strided tensor can't be cut: the library copies it as a whole.
        step = steps[index]
        while step and (limit := (begin // step + 1) * step) <= end:
            cuts.append((index, begin - spec.offset, limit - spec.offset))
            close(limit)
            begin = limit
        if begin < end:
            cuts.append((index, begin - spec.offset, end - spec.offset))
        last = end
    close(-(-last // CHUNK_BYTES) * CHUNK_BYTES)
    return parts


class DeviceCopies(Protocol):
    """Copies with tensors on devices. May be used by several threads."""

    def is_on_device(self, tensor: Any) -> bool:
        """True for a tensor in the memory of a device."""
        ...

    def is_divisible(self, target: Any, source: Any) -> bool:
        """True if both have the same bytes in the same order, and may be copied a range at a time."""
        ...

    def begin(self, target: Any, source: Any, begin: int = 0, end: int | None = None) -> Callable[[], None]:
        """Begins to copy the bytes from ``begin`` to ``end``, None: to the last. Returns the function that waits until
        that is done, which may be called again."""
        ...


class Copying:
    """A copy of tensors, all of ``kind``, on any device and with any strides, in parts that may run in any order."""

    def __init__(
        self,
        kind: TensorKind[Any],
        targets: Sequence[Any],
        sources: Sequence[Any],
        specs: Sequence[TensorSpec],
        size_bytes: int,
        device_copies: "DeviceCopies | None" = None,
    ) -> None:
        """``device_copies``: None: there are no devices, or copies with them are the kind's."""
        self._begin = _copying_at_once(kind) if device_copies is None else device_copies.begin
        self._pairs = list(zip(targets, sources, strict=True))

        def address(tensor: Any) -> int | None:
            is_far = device_copies is not None and device_copies.is_on_device(tensor)
            return None if is_far else kind.address(tensor)

        addresses = [(address(target), address(source)) for target, source in self._pairs]
        self._addresses = [
            None if target is None or source is None else (target, source) for target, source in addresses
        ]
        steps = [
            CHUNK_BYTES if pair is not None else self._step_of(*tensors, device_copies)
            for pair, tensors in zip(self._addresses, self._pairs, strict=True)
        ]
        self._is_cut = [step > 0 for step in steps]
        self.parts = parts_of(specs, steps, size_bytes)
        """In the order of their bytes."""
        is_far = device_copies is not None and None in self._addresses
        self.parts_at_once = _UNDER_WAY if is_far else 1
        """So many parts a thread should have under way."""

    def _step_of(self, target: Any, source: Any, device_copies: "DeviceCopies | None") -> int:
        if device_copies is None or not any(map(device_copies.is_on_device, (target, source))):
            return 0
        return _DEVICE_BYTES if device_copies.is_divisible(target, source) else 0

    def begin(self, part: Part) -> Callable[[], None]:
        """Begins to copy the bytes of ``part`` from the sources to the targets. Returns the function that waits until
        they are copied, which may be called again. May be called by several threads, each for other parts."""
        waits: list[Callable[[], None]] = []
        try:
            self._begin_cuts(part, waits)
        except BaseException:
            _wait_for(waits)
            raise
        return functools.partial(_wait_for, waits) if waits else _do_nothing

    def _begin_cuts(self, part: Part, waits: list[Callable[[], None]]) -> None:
        for index, begin, end in part.cuts:
            addresses = self._addresses[index]
            if addresses is None:
                cut = (begin, end) if self._is_cut[index] else ()
                waits.append(self._begin(*self._pairs[index], *cut))
            else:
                # Not the libraries' copy, which is as fast: it would need a view for each cut, and PyTorch's would
                # start threads of its own beside these. This call is without the GIL, too.
                ctypes.memmove(addresses[0] + begin, addresses[1] + begin, end - begin)


def _copying_at_once(kind: TensorKind[Any]) -> Callable[..., Callable[[], None]]:
    def copy(target: Any, source: Any) -> Callable[[], None]:
        kind.write(target, source)
        return _do_nothing

    return copy


def _do_nothing() -> None:
    """The copy is done already, or nothing follows."""


def _wait_for(copies: Iterable[Callable[[], None]]) -> None:
    for wait in copies:
        wait()


class _CopiesUnderWay:
    """Copies that one thread has begun, fewer than ``most`` while it does something else. At the end of the block none
    is under way, also behind an error: the caller frees the memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._copies: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()

    def __enter__(self) -> "_CopiesUnderWay":
        return self

    def __exit__(self, *_: object) -> None:
        _wait_for(wait for wait, _ in self._copies)

    def add(self, wait: Callable[[], None], then: Callable[[], None]) -> None:
        """Adds a copy, which ``wait`` waits for, which may be called again; ``then`` is called when it is done."""
        self._copies.append((wait, then))
        if len(self._copies) == self._most:
            self._end_oldest()

    def end(self) -> None:
        """Waits for all."""
        while self._copies:
            self._end_oldest()

    def _end_oldest(self) -> None:
        wait, then = self._copies[0]
        wait()
        self._copies.popleft()
        then()


def chunks(part: Part) -> Iterator[tuple[int, int, int]]:
    """Number, first byte and end of each chunk of ``part``."""
    for start in range(part.start, part.end, CHUNK_BYTES):
        yield start // CHUNK_BYTES, start, min(start + CHUNK_BYTES, part.end)


def put(
    copying: Copying,
    payload: memoryview,
    table: memoryview,
    share: Share,
    stop: threading.Event,
    compare: Callable[[int], None] | None = None,
) -> int:
    """Copies into ``payload``, and the digests of its chunks into ``table``, while they are in the cache. Then
    ``compare`` is called with the first byte of the chunk.

    Returns the digest of the whole. Raises TransportClosed soon after ``stop`` is set.
    """
    return _put_parts(
        copying.parts, copying.parts_at_once, copying.begin, payload, table, share, stop, compare
    )


def seal(
    specs: Sequence[TensorSpec],
    payload: memoryview,
    table: memoryview,
    share: Share,
    stop: threading.Event,
    compare: Callable[[int], None] | None = None,
) -> int:
    """As ``put``, of tensors that were written in place."""
    parts = parts_of(specs, [CHUNK_BYTES] * len(specs), len(payload))
    return _put_parts(parts, 1, lambda _part: _do_nothing, payload, table, share, stop, compare)


def _put_parts(
    parts: Sequence[Part],
    parts_at_once: int,
    begin: Callable[[Part], Callable[[], None]],
    payload: memoryview,
    table: memoryview,
    share: Share,
    stop: threading.Event,
    compare: Callable[[int], None] | None,
) -> int:
    def write_digests(part: Part) -> None:
        for number, start, end in chunks(part):
            # Of the copy, not of the source: if the source is changed meanwhile, the digest is still that of the bytes
            # which readers get.
            table[number] = xxhash.xxh3_64_intdigest(payload[start:end])
            if compare is not None:
                compare(start)

    def write_parts(numbers: Iterator[int]) -> None:
        with _CopiesUnderWay(parts_at_once) as copies:
            for number in numbers:
                if stop.is_set():
                    raise TransportClosed
                # The next copy before the digests of the last one: the bus has work meanwhile.
                part = parts[number]
                copies.add(begin(part), functools.partial(write_digests, part))
            copies.end()

    share(len(parts), write_parts)
    return table_digest(table, len(payload))


def fetch(
    copying: Copying, payload: memoryview, table: memoryview | None, share: Share, stop: threading.Event
) -> None:
    """Copies out of ``payload``. Raises WrongDigest if a chunk has another digest than in ``table`` (None: the caller
    has compared them), and TransportClosed soon after ``stop`` is set."""

    def read_parts(numbers: Iterator[int]) -> None:
        with _CopiesUnderWay(copying.parts_at_once) as copies:
            for number in numbers:
                if stop.is_set():
                    raise TransportClosed
                part = copying.parts[number]
                if table is not None:
                    _check_part(part, payload, table)
                copies.add(copying.begin(part), _do_nothing)
            copies.end()

    share(len(copying.parts), read_parts)


def check(
    specs: Sequence[TensorSpec], payload: memoryview, table: memoryview, share: Share, stop: threading.Event
) -> None:
    """Compares the bytes of the tensors with their digests. Raises as ``fetch``."""
    parts = parts_of(specs, [CHUNK_BYTES] * len(specs), len(payload))

    def check_parts(numbers: Iterator[int]) -> None:
        for number in numbers:
            if stop.is_set():
                raise TransportClosed
            _check_part(parts[number], payload, table)

    share(len(parts), check_parts)


def _check_part(part: Part, payload: memoryview, table: memoryview) -> None:
    for number, start, end in chunks(part):
        digest = xxhash.xxh3_64_intdigest(payload[start:end])
        if digest != table[number]:
            raise WrongDigest(table[number], digest)


class WrongDigest(Exception):
    """Bytes have the digest ``actual`` instead of ``expected``."""

    def __init__(self, expected: int, actual: int) -> None:
        super().__init__(f"digest {actual:#x} instead of {expected:#x}")
        self.expected = expected
        self.actual = actual


def table_digest(table: memoryview, size_bytes: int) -> int:
    """The digest of a payload of ``size_bytes``, by those of its chunks."""
    # A digest of digests, not of the bytes from end to end: several threads compute it, in any order, and a reader of
    # some tensors checks their chunks alone. xxh3 keeps up with memory, as no cryptographic digest does: it is against
    # mistakes, and the encryption of the network against enemies.
    return xxhash.xxh3_64_intdigest(table[: -(-size_bytes // CHUNK_BYTES)])
