"""Decides about restarts when a supervised actor fails; ``supervisor.py`` acts on it. Sans-I/O.

The rules are those of OTP (https://www.erlang.org/doc/system/sup_princ.html): a child that fails is restarted, alone or
with all its siblings. Restarts are counted for the supervisor as a whole: a failure that would exceed its intensity is
escalated, and after that nothing is restarted.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum


class Strategy(StrEnum):
    ONE_FOR_ONE = "one-for-one"
    """Children are independent of each other: only the failed one is restarted."""
    ONE_FOR_ALL = "one-for-all"
    """Children depend on each other: the others are stopped, and all are restarted."""


@dataclass(frozen=True, slots=True)
class Intensity:
    """At most ``max_restarts`` within any ``period_s`` seconds; 0 restarts nothing."""

    max_restarts: int = 3
    period_s: float = 60.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0 or not self.period_s > 0:
            raise ValueError(f"invalid intensity: {self.max_restarts} restarts within {self.period_s} s")


@dataclass(frozen=True, slots=True)
class Restart:
    """Stop the children in ``stop``, then start those in ``start``; both in this order."""

    stop: tuple[str, ...]
    start: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Escalate:
    """``child`` failed after ``restarts`` restarts within ``period_s`` seconds, the most that are allowed."""

    child: str
    restarts: int
    period_s: float


class Restarts:
    """The children of one supervisor in the order in which they were started, and their recent restarts."""

    def __init__(self, strategy: Strategy, intensity: Intensity) -> None:
        self.strategy = strategy
        self.intensity = intensity
        self.escalation: Escalate | None = None
        """The reason for which nothing is restarted any more."""
        self._children: dict[str, None] = {}
        self._restarted_at: deque[float] = deque()

    def add(self, child: str) -> None:
        """Adds a child that has been started for the first time, after all others."""
        self._children[child] = None

    def remove(self, child: str) -> None:
        """Removes a child that was stopped in good order and is not started again."""
        self._children.pop(child, None)

    def __contains__(self, child: str) -> bool:
        return child in self._children

    def died(self, child: str, now: float) -> Restart | Escalate:
        """Decides about ``child``, which failed at ``now`` (seconds of any monotonic clock).

        A start that fails counts too. For one-for-all a decision replaces the one before, even an unfinished one.
        """
        if self.escalation is None:
            intensity = self.intensity
            while self._restarted_at and self._restarted_at[0] < now - intensity.period_s:
                self._restarted_at.popleft()
            if len(self._restarted_at) < intensity.max_restarts:
                self._restarted_at.append(now)
                return self._restart(child)
            self.escalation = Escalate(child, len(self._restarted_at), intensity.period_s)
        return self.escalation

    def give_up(self, child: str) -> Escalate:
        """Decides about ``child``, which has failed for a reason that another start would meet again."""
        if self.escalation is None:
            self.escalation = Escalate(child, 0, self.intensity.period_s)
        return self.escalation

    def _restart(self, child: str) -> Restart:
        if self.strategy is Strategy.ONE_FOR_ONE:
            return Restart((), (child,))
        order = tuple(self._children)
        return Restart(tuple(other for other in reversed(order) if other != child), order)
