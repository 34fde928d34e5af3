"""A mean that follows a changing quantity. Pure."""

from typing import Final

_WINDOW: Final = 256


class RollingMean:
    """The plain mean of the first values, later an exponential one over about the last 256. ``value``: 0 without
    any."""

    __slots__ = ("_count", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        """Moves the mean towards a finite value: by 1/n of the way for the n-th one, at last by 1/256."""
        self._count = min(self._count + 1, _WINDOW)
        self.value += (value - self.value) / self._count
