"""Decides about restarts when a supervised actor fails; ``supervisor.py`` acts on it. Sans-I/O.

The rules are those of OTP (https://www.erlang.org/doc/system/sup_princ.html), one for one: a child that fails is
restarted alone. Restarts are counted for the supervisor as a whole: a failure that would exceed its intensity is
escalated, and after that nothing is restarted.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Intensity:
    """At most ``max_restarts`` within any ``period_s`` seconds; 0 restarts nothing."""

    max_restarts: int = 3
    period_s: float = 60.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0 or not self.period_s > 0:
            raise ValueError(f"invalid intensity: {self.max_restarts} restarts within {self.period_s} s")


@dataclass(frozen=True, slots=True)
class Escalate:
    """``child`` failed after ``restarts`` restarts within ``period_s`` seconds, the most that are allowed."""

    child: str
    restarts: int
    period_s: float


class Restarts:
    """The children of one supervisor that have been started, and their recent restarts."""

    def __init__(self, intensity: Intensity) -> None:
        self.intensity = intensity
        self.escalation: Escalate | None = None
        """The reason for which nothing is restarted any more."""
        self._children = set[str]()
        self._restarted_at: deque[float] = deque()

    def add(self, child: str) -> None:
        """Adds a child that has been started for the first time, or that is started again after ``remove``."""
        self._children.add(child)

    def remove(self, child: str) -> None:
        """Removes a child that was stopped in good order and is not started again."""
        self._children.discard(child)

    def __contains__(self, child: str) -> bool:
        return child in self._children

    def died(self, child: str, now: float) -> Escalate | None:
        """Decides about ``child``, which failed at ``now`` (seconds of any monotonic clock): None if it is restarted.
        A start that fails counts too."""
        if self.escalation is None:
            # Times, and no counter that begins at zero after each period: around its end that would let twice as many
            # pass.
            intensity = self.intensity
            while self._restarted_at and self._restarted_at[0] < now - intensity.period_s:
                self._restarted_at.popleft()
            if len(self._restarted_at) < intensity.max_restarts:
                self._restarted_at.append(now)
                return None
            self.escalation = Escalate(child, len(self._restarted_at), intensity.period_s)
        return self.escalation

    def give_up(self, child: str) -> Escalate:
        """Decides about ``child``, which has failed for a reason that another start would meet again."""
        if self.escalation is None:
            self.escalation = Escalate(child, 0, self.intensity.period_s)
        return self.escalation
