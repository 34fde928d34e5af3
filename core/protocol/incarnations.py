"""Incarnations of a process: the numbers by which peers distinguish a process from its successor. Sans-I/O.

An epoch is a number of 63 bits. The upper 39 are drawn at random for a lineage: one supervised actor with all of its
restarts, or one system that no supervisor starts. The lower 24 count the restarts of the lineage. The wall clock has no
part in it: an actor that is restarted after the clock was set back is still a later incarnation.
"""

import secrets
from collections import OrderedDict

# Together 63: an epoch is positive as a signed number of 64 bits too. Two of a thousand lineages, which is more than a
# run has, are equal with a probability of one in a million.
_LINEAGE_BITS = 39
_COUNT_BITS = 24


def new_epoch() -> int:
    """The epoch of the first incarnation of a new lineage. A restart adds one."""
    return secrets.randbits(_LINEAGE_BITS) << _COUNT_BITS | 1


def lineage_of(epoch: int) -> int:
    """The lineage of an epoch."""
    return epoch >> _COUNT_BITS


class Incarnations:
    """The latest known incarnation of each lineage; of the ``limit`` lineages that were heard last."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._latest: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._latest)

    def is_over(self, epoch: int) -> bool:
        """True if a later incarnation is known."""
        return epoch < self._latest.get(lineage_of(epoch), 0)

    def heard(self, epoch: int) -> bool:
        """A message of ``epoch`` arrived, or its process is being started; True if it replaces one that was known."""
        latest = self._latest.get(lineage_of(epoch), epoch)
        self._set(lineage_of(epoch), max(latest, epoch))
        return epoch > latest

    def end(self, epoch: int) -> None:
        """The lineage of ``epoch`` has ended: all of its incarnations are over."""
        lineage = lineage_of(epoch)
        self._set(lineage, (lineage + 1) << _COUNT_BITS)

    def _set(self, lineage: int, latest: int) -> None:
        self._latest[lineage] = latest
        self._latest.move_to_end(lineage)
        if len(self._latest) > self._limit:
            self._latest.popitem(last=False)
