"""The handle that names a state in messages: plain data, checked when it is made, without torch.

Handles arrive from the network. Sizes are checked here, when a handle is made or decoded; the path that reads the
state checks its source.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Final, Literal

from pydantic import Field

from .errors import StateMismatch

PathName = Literal["shm", "cuda_ipc", "tcp"]
Rows = Mapping[str, tuple[int, int]]
"""Parts of tensors by name: the first row of dimension 0, and the one after the last."""

# Bytes. Every tensor starts on a cache line, which suits vector instructions and GPU copies too.
ALIGNMENT: Final = 64

_HEXADECIMAL: Final = re.compile(r"[0-9a-f]{128}")

# Bytes per element of every dtype that can travel, by torch's name: a table, not torch's own sizes, so that a process
# can check a handle without importing torch.
DTYPE_BYTES: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a payload: row-major, ``offset`` bytes after the payload's start.

    Raises ValueError for an unknown dtype, a negative size or offset.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"{self.name}: dtype {self.dtype!r} can't travel (known: {', '.join(DTYPE_BYTES)})"
            )
        if any(size < 0 for size in self.shape):
            raise ValueError(f"{self.name}: negative size in shape {self.shape}")
        if self.offset < 0:
            raise ValueError(f"{self.name}: negative offset {self.offset}")

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements, without gaps."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def rows(self, start: int, stop: int) -> "TensorSpec":
        """Rows ``start`` to ``stop`` (not included) of dimension 0. Raises ValueError if it has no such rows."""
        if not self.shape or not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"{self.name}: no rows {start} to {stop} in shape {list(self.shape)}")
        row_bytes = math.prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]
        return replace(self, shape=(stop - start, *self.shape[1:]), offset=self.offset + start * row_bytes)


@dataclass(frozen=True, slots=True)
class ShmSource:
    """Shared memory of ``node`` (``select.this_node``): the file ``block``, a plain name in its directory.

    ``process``: its owner. Bytes that are set later have another ``generation``: a source never names other bytes.
    """

    path: Literal["shm"]
    node: str
    process: str
    block: str
    generation: int

    def served_at(self, address: str, *, encrypted: bool) -> "TcpSource":
        """The same memory for other nodes: its owner serves it there."""
        return TcpSource("tcp", self.node, self.process, address, encrypted, self.block, self.generation)


@dataclass(frozen=True, slots=True)
class LentMemory:
    """Memory that ``process`` lends to one writer at a time, for states of at most ``size_bytes``: the file ``block``,
    a plain name in the directory of ``node``. A state that is set there outlives the writer.

    ``address``: at which ``process`` serves the memory to other nodes, and ``encrypted`` (``remote/bulk.py``); None:
    it does not. ``side``: of the host (NUMA node), on which it was reserved; None: on any.
    """

    process: str
    block: str
    size_bytes: int
    node: str
    address: str | None = None
    encrypted: bool = True
    side: int | None = None

    def sources(self, generation: int) -> "tuple[Source, ...]":
        """All sources of the state that was set there, and published with that generation."""
        shm = ShmSource("shm", self.node, self.process, self.block, generation)
        return (
            (shm,) if self.address is None else (shm, shm.served_at(self.address, encrypted=self.encrypted))
        )


@dataclass(frozen=True, slots=True)
class BufferSource:
    """Bytes ``start`` to ``start + size_bytes`` of the state's payload, in a buffer of a device.

    ``handle``: to open the memory, in hexadecimal digits. ``checksum``: see ``Devices.checksum``.
    """

    handle: str
    start: int
    size_bytes: int
    checksum: int

    def __post_init__(self) -> None:
        if not _HEXADECIMAL.fullmatch(self.handle):
            raise ValueError("a device's handle has 64 bytes in hexadecimal digits")
        if self.start < 0 or self.start % ALIGNMENT or self.size_bytes < 0:
            raise ValueError(f"invalid buffer: {self.size_bytes} bytes from byte {self.start}")


@dataclass(frozen=True, slots=True)
class CudaIpcSource:
    """Memory of ``device`` (a UUID), of ``process`` on ``node``. ``block``, a plain name in the run's directory, orders
    its use; bytes that are set later have another ``generation``."""

    path: Literal["cuda_ipc"]
    node: str
    process: str
    device: str
    block: str
    generation: int
    buffers: tuple[BufferSource, ...]


@dataclass(frozen=True, slots=True)
class TcpSource:
    """Shared memory of ``process`` on ``node``, as ``ShmSource``, which it serves at ``address`` (host and port) to
    processes that have the keys of the run. ``encrypted``: see ``remote/bulk.py``."""

    path: Literal["tcp"]
    node: str
    process: str
    address: str
    encrypted: bool
    block: str
    generation: int


Source = Annotated[ShmSource | CudaIpcSource | TcpSource, Field(discriminator="path")]


@dataclass(frozen=True, slots=True)
class StateHandle:
    """One version of a named collection of tensors: its layout, and the sources that it can be read from.

    ``size_bytes``: the length of the payload. ``digest``: xxh3_64 of the xxh3_64 of every ``block.CHUNK_BYTES`` of the
    payload; None without a source in host memory. ``sources``: each has the data of its path. The reader
    chooses one of them (``select.py``). ``withheld``: by path, the reason why its owner does not offer it.

    Raises ValueError if a number is out of range, two tensors have one name, or a tensor is unaligned or exceeds the
    payload.
    """

    key: str
    version: int
    size_bytes: int
    digest: int | None
    tensors: tuple[TensorSpec, ...]
    sources: tuple[Source, ...]
    withheld: dict[PathName, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        # Here, not by those that read: a handle comes from the network, and each path would have to check it again.
        if not 0 <= self.version < 2**63:
            raise ValueError(f"{self.key}: version {self.version} is outside 0 .. 2**63-1")
        if len({spec.name for spec in self.tensors}) != len(self.tensors):
            raise ValueError(f"{self.key}: two tensors have the same name")
        for spec in self.tensors:
            if spec.offset % ALIGNMENT:
                raise ValueError(
                    f"{self.key}: {spec.name}: offset {spec.offset} is not a multiple of {ALIGNMENT}"
                )
            if spec.offset + spec.size_bytes > self.size_bytes:
                raise ValueError(
                    f"{self.key}: {spec.name} ends at byte {spec.offset + spec.size_bytes} "
                    f"of a payload of {self.size_bytes}"
                )

    def source(self, path: PathName) -> Source | None:
        """The source of that path, if the state is offered there."""
        return next((source for source in self.sources if source.path == path), None)

    def lies_in(self, lent: LentMemory) -> bool:
        """True if the state was set in that memory."""
        source = self.source("shm")
        return isinstance(source, ShmSource) and source.block == lent.block

    def moved(self, old: LentMemory, new: LentMemory) -> "StateHandle":
        """The handle of the state after its memory ``old`` has become ``new``; itself if it does not lie there."""
        if not self.lies_in(old):
            return self
        return replace(
            self,
            sources=tuple(
                replace(source, process=new.process, block=new.block)
                if isinstance(source, ShmSource | TcpSource)
                else source
                for source in self.sources
            ),
        )

    def select(
        self, names: Collection[str] | None = None, rows: Rows | None = None
    ) -> tuple[TensorSpec, ...]:
        """The tensors of ``names`` (None: all), those in ``rows`` cut, in the order of the state.

        Raises StateMismatch, with every name that the state lacks and every part outside of its tensor.
        """
        if names is None and not rows:
            return self.tensors
        chosen = {spec.name for spec in self.tensors} if names is None else set(names)
        rows = rows or {}
        state_names = {spec.name for spec in self.tensors}
        problems = [f"{name}: not in the state" for name in sorted((chosen | rows.keys()) - state_names)]
        problems += [
            f"{name}: rows of a tensor that is not asked for"
            for name in sorted((rows.keys() - chosen) & state_names)
        ]
        specs = []
        for spec in self.tensors:
            if spec.name in chosen:
                try:
                    specs.append(spec.rows(*rows[spec.name]) if spec.name in rows else spec)
                except ValueError as error:
                    problems.append(str(error))
        if problems:
            raise StateMismatch(self.key, problems)
        return tuple(specs)
