"""Means that follow a changing quantity. Pure."""

from typing import Final

_WINDOW: Final = 256
_NEWEST_SHARE: Final = 0.2
"""About the last ten values count: enough to even out one slow computation, and few enough to follow a run whose
sequences grow."""


def rolling_mean(old: float | None, value: float, newest_share: float = _NEWEST_SHARE) -> float:
    """The exponential mean after one more ``value``, in its unit. ``old``: the mean before it; None before the first.
    ``newest_share``: the weight of ``value``, in (0, 1]."""
    return value if old is None else old + newest_share * (value - old)


class RollingMean:
    """The plain mean of the first values, later an exponential one over about the last 256. ``value``: 0 without any.

    For single requests, which differ much more than the computations of one policy do: the first few say little.
    """

    __slots__ = ("_count", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        """Moves the mean towards a finite value: by 1/n of the way for the n-th one, at last by 1/256."""
        self._count = min(self._count + 1, _WINDOW)
        self.value += (value - self.value) / self._count
