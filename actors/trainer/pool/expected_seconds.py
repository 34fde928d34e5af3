"""Expected durations of computations and swaps, from the measured ones."""

from collections.abc import Collection, Iterable
from typing import Final

from .gangs import Gang

_UNKNOWN_S: Final = 1.0
"""Seconds of a computation, as long as none was measured."""


class ExpectedSeconds:
    """Each is the rolling mean of the policy itself; if it has none yet, the mean of the other policies'."""

    def __init__(self, gangs: Collection[Gang]) -> None:
        self._gangs = gangs

    def computation(self, gang: Gang) -> float:
        """Seconds of one computation."""
        return _expect(gang.compute_s, (other.compute_s for other in self._gangs), _UNKNOWN_S)

    def load(self, gang: Gang) -> float:
        """Seconds until its state is on its slots."""
        return _expect(gang.load_s, (other.load_s for other in self._gangs), 0.0)

    def swap(self, leaves: Gang, comes: Gang) -> float:
        """Seconds until one state is out, and the other one in."""
        return self.load(comes) + _expect(leaves.save_s, (other.save_s for other in self._gangs), 0.0)

    def work(self, gang: Gang) -> float:
        """Seconds for its ready computations and the running one, from its beginning, if it always has slots."""
        return (gang.ready + gang.computing) * self.computation(gang)

    def running(self, gang: Gang, now: float) -> float:
        """Seconds until the running computation ends."""
        return max(0.0, self.computation(gang) - (now - gang.began)) if gang.computing else 0.0

    def work_left(self, gang: Gang, now: float) -> float:
        """Seconds until the gang has no work."""
        return gang.ready * self.computation(gang) + self.running(gang, now)

    def step_end(self, slots: int) -> float:
        """Seconds until all that is ready can have ended: all work on all slots, or the longest policy's work."""
        works = [(self.work(gang), gang.width) for gang in self._gangs]
        return max(
            sum(work_s * width for work_s, width in works) / max(1, slots),
            *(work_s for work_s, _ in works),
            0.0,
        )


def _expect(own_s: float | None, all_s: Iterable[float | None], unknown_s: float) -> float:
    if own_s is not None:
        return own_s
    measured = [work_s for work_s in all_s if work_s is not None]
    return sum(measured) / len(measured) if measured else unknown_s
