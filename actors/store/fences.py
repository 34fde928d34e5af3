"""Fences: the growing numbers under which micro-batches are leased.

A commit names the fences of the leases that it used. A fence that has ended is refused, so a consumer that was too
slow, or that leased before the store was restarted, can't commit rows that another consumer has by now.
"""

from typing import Final

from ..errors import StoreError

_SERIAL_BITS: Final = 32
# Fences with a known reason of their end, for the error text of a late commit.
_REMEMBERED: Final = 4096


class Fences:
    """The fences of all policies. They strictly increase over all restarts of the store: the high bits hold the epoch,
    which counts the restarts. The first epoch gives out the first fence."""

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
            raise StoreError("nothing can be leased before the store's epoch has begun")
        self._serial += 1
        return self.epoch << _SERIAL_BITS | self._serial

    def end(self, fence: int, why: str) -> None:
        """Remembers the reason for which a lease has ended."""
        self._ended[fence] = why
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def undo_end(self, fence: int) -> None:
        """Makes the lease valid again, whose end could not be journaled."""
        self._ended.pop(fence, None)

    def why_ended(self, fence: int) -> str:
        """The reason for which no lease with this fence is active."""
        epoch = fence >> _SERIAL_BITS
        if 0 < epoch < self.epoch:
            return f"it is of epoch {epoch}, the store is in epoch {self.epoch}: its rows went back at the restart"
        if epoch != self.epoch or not 0 < fence & (2**_SERIAL_BITS - 1) <= self._serial:
            return "it was never given out"
        return self._ended.get(fence, "it ended long ago or is another policy's")
