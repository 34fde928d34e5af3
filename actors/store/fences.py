"""Micro-batches under fencing tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..column_refs import ColumnRefs
from ..errors import StoreError

_SERIAL_BITS: Final = 32
# Fences whose end is remembered, to tell a late acknowledgement what became of its lease.
_ENDED: Final = 4096


@dataclass(frozen=True, slots=True)
class Lease:
    """A micro-batch under its fencing token. ``columns``: ``sample_id``, ``policy_version``, ``query_position`` and
    all of the schema's: None where a column that is not required was not written, bulk columns packed
    (``column_refs.py``)
    where no row lacks them. ``deadline``: a reading of the store's clock."""

    agent: str
    token: int
    consumer: str
    deadline: float
    columns: dict[str, Sequence[Any] | ColumnRefs]


class Fences:
    """Fencing tokens of all tables: strictly increasing over all incarnations of the store, with the epoch, which
    counts them, in the high bits. Before the first epoch there are none."""

    def __init__(self) -> None:
        self.epoch = 0
        self._serial = 0
        self._ended: dict[int, str] = {}

    def begin(self, epoch: int) -> None:
        """Raises StoreError unless ``epoch`` is later than all before."""
        if not self.epoch < epoch < 2**31:
            raise StoreError(f"epoch {epoch} does not follow epoch {self.epoch}")
        self.epoch, self._serial = epoch, 0

    def next(self) -> int:
        """Raises StoreError before the first epoch."""
        if not self.epoch:
            raise StoreError("no lease is given out before the store's epoch has begun")
        self._serial += 1
        return self.epoch << _SERIAL_BITS | self._serial

    def end(self, token: int, why: str) -> None:
        """Its lease is not out any more."""
        self._ended[token] = why
        if len(self._ended) > _ENDED:
            del self._ended[next(iter(self._ended))]

    def revive(self, token: int) -> None:
        """Its end did not happen."""
        self._ended.pop(token, None)

    def why_not_out(self, token: int) -> str:
        epoch = token >> _SERIAL_BITS
        if 0 < epoch < self.epoch:
            return f"it is of epoch {epoch}, the store is in epoch {self.epoch}: its rows went back at the restart"
        if epoch != self.epoch or not 0 < token & (2**_SERIAL_BITS - 1) <= self._serial:
            return "it was never given out"
        return self._ended.get(token, "it ended long ago or is another table's")
