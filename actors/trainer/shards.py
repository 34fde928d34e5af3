"""Tensors divided over the ranks of a policy by their first dimension, and their way to another number of ranks. Pure.

The rows of a rank are those of ``torch.chunk``, as in FSDP2: each rank has ``ceil(rows / ranks)``, the last ones less
or none. A tensor without dimensions is whole on every rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a tensor: the rows ``start`` to ``stop`` of one with ``shape``. Without dimensions: 0 to 1."""

    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """True if the rank has all rows: the tensor is not divided, or only one rank has rows of it."""
        return self.own_shape == self.shape

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of this part alone: its rows, and the other dimensions of the whole."""
        return (self.stop - self.start, *self.shape[1:]) if self.shape else ()


def whole(shape: Sequence[int]) -> Shard:
    """All rows: of a tensor that is not divided."""
    return Shard(tuple(shape), 0, shape[0] if shape else 1)


def shard_of(shape: Sequence[int], rank: int, ranks: int) -> Shard:
    """The part of ``rank`` (from 0)."""
    if not shape:
        return whole(shape)
    size = -(-shape[0] // ranks)
    return Shard(tuple(shape), min(rank * size, shape[0]), min((rank + 1) * size, shape[0]))


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a tensor to copy: from ``start`` on, ``rows`` of them, from the part of rank ``source``.

    ``source_start``, ``own_start``: the first of them within the part of the source, and within the reader's.
    """

    name: str
    source: int
    source_start: int
    own_start: int
    rows: int


def pieces(
    shards: Mapping[str, Shard],
    sources: Sequence[Mapping[str, Shard]],
    row_bytes: Mapping[str, int],
    most_bytes: int,
) -> Iterator[Piece]:
    """All rows of the reader's parts ``shards``, each from one of the ``sources``, the parts of another gang by rank.

    Each piece has at most ``most_bytes``, or one row. Raises ``ValueError`` which names the first tensor that the
    sources don't have, have in another shape, or have gaps in.
    """
    for name, shard in shards.items():
        most_rows = max(1, most_bytes // max(1, row_bytes[name]))
        row = shard.start
        while row < shard.stop:
            rank, part = _holder(name, shard, row, sources)
            rows = min(shard.stop, part.stop, row + most_rows) - row
            yield Piece(name, rank, row - part.start, row - shard.start, rows)
            row += rows


def _holder(name: str, shard: Shard, row: int, sources: Sequence[Mapping[str, Shard]]) -> tuple[int, Shard]:
    for rank, parts in enumerate(sources):
        part = parts.get(name)
        if part is None or part.shape != shard.shape:
            problem = "no such tensor" if part is None else str(list(part.shape))
            raise ValueError(f"tensor {name}: need {list(shard.shape)}, rank {rank} has {problem}")
        if part.start <= row < part.stop:
            return rank, part
    raise ValueError(f"tensor {name}: no rank has row {row}")


def divide(weights: NDArray[np.int64], ranks: int) -> list[NDArray[np.int64]]:
    """The numbers of the items of each rank, in increasing order: sums of ``weights`` that differ little.

    The heaviest first, each to the rank with the least so far (Graham's rule): the largest sum is at most 4/3 of the
    least possible. A rank may have none.
    """
    if ranks == 1:
        return [np.arange(weights.size)]
    sums = [0] * ranks
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    for index in np.argsort(-weights, kind="stable").tolist():
        rank = min(range(ranks), key=sums.__getitem__)
        sums[rank] += int(weights[index])
        chosen[rank].append(index)
    return [np.array(sorted(indices), np.int64) for indices in chosen]


def even_ranks(weights: Sequence[int]) -> float:
    """The number of ranks that items of positive ``weights`` keep busy all the time: on more of them the others wait
    for the rank with the heaviest. In [1, the number of items]."""
    return sum(weights) / max(weights)
