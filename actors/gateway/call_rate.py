"""The rate of a session's calls: a token bucket. Pure: the time in, a delay out."""

from typing import Final

BURST_S: Final = 10.0
"""A program that has rested may make the calls of so many seconds at once."""


class CallRate:
    """Allows ``per_s`` calls a second in the long run, and those of ``BURST_S`` at once."""

    def __init__(self, per_s: float) -> None:
        self.per_s = per_s
        self._most = max(1.0, per_s * BURST_S)
        self._calls = self._most
        self._at_s: float | None = None

    def take(self, now_s: float) -> float:
        """Counts a call at ``now_s``, in seconds of any clock that never goes back. Returns 0; or the seconds until one
        is allowed, and then this one is not counted."""
        if self._at_s is not None:
            self._calls = min(self._most, self._calls + (now_s - self._at_s) * self.per_s)
        self._at_s = now_s
        if self._calls < 1.0:
            return (1.0 - self._calls) / self.per_s
        self._calls -= 1.0
        return 0.0
