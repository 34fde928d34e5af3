"""Notices that a run stands still. Pure: counts of work and the time in, notices out.

    observe ──> Still(31 s) ──> Still(60 s) ──> Still(120 s) ... ──> Moving(140 s)

A run stands still if none of its actors ends a work item (``Actor.progress``): no token, turn, group, micro-batch,
step, install or checkpoint. How long that may take depends on the model; so this class learns the longest time between
two work items, and ``patience_s`` is a multiple of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_PART_S: Final = 5.0
# An actor sends the count of its work once a second, and the counts are looked at as often; a busy machine is late.
_SEEN_S: Final = 5.0
_PATIENCE: Final = 3.0


@dataclass(frozen=True, slots=True)
class Still:
    """Nothing has ended for ``seconds``."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Moving:
    """Something has ended, for the first time in ``seconds``, after a ``Still``."""

    seconds: float


class Standstill:
    """``idle_s``: seconds since the last work item ended, as of the last ``observe``.

    The time is counted in parts of at most 5 s: a longer time between two observations is one in which this process was
    stopped (ctrl-Z, a frozen container), and counts as one of that length.
    """

    def __init__(self, limit_s: float) -> None:
        """``limit_s``: seconds without progress until the first ``Still``; the next ones follow after twice the time of
        the one before."""
        self._limit_s = limit_s
        self._next_s = limit_s
        self._counts: dict[str, int] = {}
        self._longest_s = 0.0
        self._last: float | None = None
        self.idle_s = 0.0

    @property
    def is_still(self) -> bool:
        """True after a ``Still``, until the ``Moving`` that follows."""
        return self._next_s > self._limit_s

    def patience_s(self, least_s: float) -> float:
        """The time to wait for the next work item before it is given up: at least ``least_s``, and three times the
        longest time that passed between two work items without a notice."""
        return max(least_s, _PATIENCE * self._longest_s)

    def is_given_up(self, least_s: float, asked_s: float) -> bool:
        """True for a run that was asked to stop ``asked_s`` seconds ago and whose steps under way may never end. Work
        that has ended just before the stop, or by it, is seen seconds later: it may end them."""
        return asked_s >= _SEEN_S and self.idle_s >= self.patience_s(least_s)

    def observe(self, counts: Mapping[str, int], now: float) -> Still | Moving | None:
        """``counts``: by process or file, work items that have ended. A process that is missing has not answered; one
        that is new, a restarted one say, counts from its first number on."""
        last, self._last = self._last, now
        if last is not None:
            self.idle_s += min(now - last, _PART_S)
        moved = any(count > self._counts.get(name, count) for name, count in counts.items())
        for name, count in counts.items():
            self._counts[name] = max(count, self._counts.get(name, count))
        if moved:
            return self._move()
        if self.idle_s < self._next_s:
            return None
        self._next_s *= 2
        return Still(self.idle_s)

    def _move(self) -> Moving | None:
        seconds, self.idle_s = self.idle_s, 0.0
        if self.is_still:
            self._next_s = self._limit_s
            return Moving(seconds)
        self._longest_s = max(self._longest_s, seconds)
        return None
