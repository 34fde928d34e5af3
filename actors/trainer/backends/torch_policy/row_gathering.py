"""Tensors of a gang on their way into memory of its first rank, which never has a whole copy beside that.

Rows of all ranks of the first replica move a range at a time. A rank sends its own, in the type of the destination; the
first one receives them where they belong, or, for memory of the host and rows on a device, in a buffer for that range.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from ....errors import WeightsNotGathered
from ...rank_bytes import RANGE_BYTES
from ...shards import Shard, shard_of
from .gang_rank import GangRank, local

c10d: Any = distributed  # half of its names have no types


@dataclass(frozen=True, slots=True)
class _Range:
    """Rows ``start`` to ``stop`` of every rank's part of a tensor, which has ``shape``. ``tensor``: this rank's part.
    ``dtype``: to move in. ``is_divided``: else the first rank has all rows."""

    name: str
    tensor: Tensor
    shape: torch.Size
    dtype: torch.dtype
    is_divided: bool
    start: int
    stop: int

    def rows_of(self, part: Shard) -> tuple[int, int]:
        """Those in the ``part`` of a rank, by their numbers in the whole tensor: fewer, or none, if it ends before."""
        return min(part.start + self.start, part.stop), min(part.start + self.stop, part.stop)

    def own_rows(self) -> Tensor:
        """This rank's, live."""
        return self.tensor[self.start : self.stop]


def gather_rows(
    gang: GangRank,
    tensors: Iterable[tuple[str, Tensor]],
    into: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    most_bytes: int = RANGE_BYTES,
) -> None:
    """Copies every tensor into that of the same name on the first rank, and returns when all is there.

    All ranks of the first replica call this, with the same names in the same order; for the others it does nothing.
    ``into`` is of interest on the first rank. A tensor that is not divided is the first rank's. ``dtype``: of those in
    ``into`` whose numbers have fractions; None: that of ``tensors``. Each range has ``most_bytes``, or one row of each
    rank. Raises WeightsNotGathered.
    """
    if not gang.is_in_first_replica:
        return
    batch: list[_Range] = []
    size_bytes = 0
    device = torch.device("cpu")
    with torch.no_grad():
        for name, tensor in tensors:
            device = tensor.device
            for part, part_bytes in _ranges(gang, name, tensor, dtype, most_bytes):
                if batch and size_bytes + part_bytes > most_bytes:
                    _move(gang, batch, into)
                    batch, size_bytes = [], 0
                batch.append(part)
                size_bytes += part_bytes
        _move(gang, batch, into)
    if device.type == "cuda":  # copies to pinned memory
        torch.cuda.current_stream(device).synchronize()


def _ranges(
    gang: GangRank, name: str, tensor: Tensor, dtype: torch.dtype | None, most_bytes: int
) -> Iterator[tuple[_Range, int]]:
    """All rows of a tensor, and the bytes of each range on all ranks of a replica."""
    is_divided = isinstance(tensor, DTensor)
    if dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    part = local(tensor)
    part = part if part.dim() else part.view(1)
    shape = tensor.shape if tensor.dim() else torch.Size((1,))
    rows = shard_of(shape, 0, gang.replica_size).stop if is_divided else shape[0]
    # Of the wider type: a rank has rows in both for a moment.
    row_bytes = shape[1:].numel() * max(dtype.itemsize, tensor.element_size())
    row_bytes *= gang.replica_size if is_divided else 1
    step = max(1, most_bytes // max(1, row_bytes))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield _Range(name, part, shape, dtype, is_divided, start, stop), (stop - start) * row_bytes


def _move(gang: GangRank, batch: list[_Range], into: Mapping[str, Tensor]) -> None:
    """Moves the rows of all ranges, at the same time."""
    if gang.rank:
        divided = [part for part in batch if part.is_divided]
        _wait(_begin(gang, c10d.isend, [(part.name, 0, part.own_rows().to(part.dtype)) for part in divided]))
        return
    received: list[_Move] = []
    copied: list[tuple[Tensor, Tensor]] = []
    landed: list[tuple[Tensor, Tensor]] = []
    for part in batch:
        target = into[part.name]
        target = target if target.dim() else target.view(1)
        copied.append((target[part.start : part.start + len(part.own_rows())], part.own_rows()))
        for rank in range(1, gang.replica_size) if part.is_divided else ():
            rows = target[slice(*part.rows_of(shard_of(part.shape, rank, gang.replica_size)))]
            if rows.device == part.tensor.device:
                received.append((part.name, rank, rows))
            else:
                landed.append((rows, torch.empty_like(rows, device=part.tensor.device)))
                received.append((part.name, rank, landed[-1][1]))
    moves = _begin(gang, c10d.irecv, received)
    for target, rows in copied:
        target.copy_(rows, non_blocking=True)
    _wait(moves)
    for target, rows in landed:
        target.copy_(rows, non_blocking=True)


_Move = tuple[str, int, Tensor]
"""Rows of which tensor go to or come from which rank."""


def _begin(gang: GangRank, operation: Any, moves: list[_Move]) -> list[tuple[_Move, Any]]:
    """Begins to send or to receive; with what ``_wait`` waits for."""
    moves = [(name, rank, rows.contiguous()) for name, rank, rows in moves if rows.numel()]
    if not moves:
        return []
    name, rank, _ = moves[0]
    with _name_failure(name, rank):
        operations = [c10d.P2POp(operation, rows, peer, gang.replica_group) for _, peer, rows in moves]
        # NCCL has one for all of them. The rows are kept: they must not be freed before.
        return list(zip(moves, c10d.batch_isend_irecv(operations), strict=False))


def _wait(moves: Iterable[tuple[_Move, Any]]) -> None:
    for (name, rank, _), work in moves:
        with _name_failure(name, rank):
            work.wait()


@contextmanager
def _name_failure(name: str, rank: int) -> Iterator[None]:
    """Raises WeightsNotGathered in place of torch's error."""
    try:
        yield
    except RuntimeError as error:
        raise WeightsNotGathered(rank, name, str(error)) from error
