"""A token bucket: limits how many lines or redraws pass per second."""

from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds, monotonic."""


class RateLimit:
    """Lets ``per_s`` events pass per second, and up to ``burst`` at once after a pause."""

    def __init__(self, per_s: float, burst: float, clock: Clock) -> None:
        """``burst``: infinite to let all events pass."""
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._tokens, self._filled_at = burst, clock()

    def take(self, leave: int = 0) -> bool:
        """Lets one event pass if ``leave`` more may pass after it; returns False if it may not pass now."""
        self._fill()
        # Times add up with rounding errors: 0.999... is one event.
        if self._tokens < 1 + leave - 1e-6:
            return False
        self._tokens -= 1
        return True

    def spend(self) -> None:
        """Lets one event pass in any case: later ones wait for it."""
        self._fill()
        self._tokens -= 1

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + self._per_s * (now - self._filled_at))
        self._filled_at = now
