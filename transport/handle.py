"""The handle that names a state in messages: plain data, checked when it is made, without torch.

Handles arrive from the network. Sizes are checked here, when a handle is made or decoded; the path that reads the
state checks its location.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

PathName = Literal["local", "shm"]

# Bytes. Every tensor starts on a cache line, which suits vector instructions and GPU copies too.
ALIGNMENT: Final = 64

# Bytes per element of every dtype that can travel, by torch's name.
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
    """One tensor of a bucket: row-major, ``offset`` bytes after the bucket's start.

    Raises ValueError for an unknown dtype, a negative size or an unaligned offset.
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
        if self.offset < 0 or self.offset % ALIGNMENT:
            raise ValueError(f"{self.name}: offset {self.offset} is not a multiple of {ALIGNMENT}")

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateHandle:
    """One version of a named collection of tensors, and its location.

    ``host`` (a machine) and ``process``: the process that set it. ``path``: the path to read it by.
    ``size_bytes``: the length of the bucket. ``digest``: its xxh3_64; None if nothing is copied (``local``).

    Path ``shm`` reads ``slot`` (0 or 1) of the arena file ``location``, a plain name in the run's directory. Path
    ``local`` uses neither of them. For both, a state that is set later has another ``generation``: a handle never names
    other bytes.

    Raises ValueError if a number is out of range, two tensors have one name or a tensor exceeds the bucket.
    """

    key: str
    version: int
    path: PathName
    host: str
    process: str
    location: str
    slot: int
    generation: int
    size_bytes: int
    digest: int | None
    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.version < 2**63:
            raise ValueError(f"{self.key}: version {self.version} is outside 0 .. 2**63-1")
        if self.slot not in (0, 1):
            raise ValueError(f"{self.key}: slot {self.slot} is neither 0 nor 1")
        if len({spec.name for spec in self.tensors}) != len(self.tensors):
            raise ValueError(f"{self.key}: two tensors have the same name")
        for spec in self.tensors:
            if spec.offset + spec.size_bytes > self.size_bytes:
                raise ValueError(
                    f"{self.key}: {spec.name} ends at byte {spec.offset + spec.size_bytes} "
                    f"of a bucket of {self.size_bytes}"
                )


@dataclass(frozen=True, slots=True)
class LentMemory:
    """Memory that its owner lends to one writer at a time: slot (0 or 1) of the arena file ``location`` of the process
    ``process``, ``size_bytes`` long. A state that is set there outlives the writer."""

    process: str
    location: str
    slot: int
    size_bytes: int
