"""The lease under which the requests of one peer begin (Gray and Cheriton, Leases, 1989). Sans-I/O.

A caller that hears nothing from a process for some heartbeats fails its requests to it. They must not begin here later:
when this process was stopped and continues, or when a network that was cut delivers the bytes that it held back. The
age of a message can't be seen. But a peer that has confirmed a mark of this side has heard this side after the mark was
sent, and does not give up before the time of that silence has passed since then. Until then its requests begin at once,
after that they wait until it has confirmed another mark: a peer that has given up has cancelled them by then.
"""

import math

from .session import Settings


class Lease:
    """``check_at``: the next time at which something has to be done for it."""

    __slots__ = ("_ends", "_length_s", "check_at")

    def __init__(self, settings: Settings) -> None:
        """It begins when the peer has confirmed its first mark."""
        self._length_s = settings.heartbeat_s * max(settings.missed_heartbeats - 1, 1)
        self._ends = self.check_at = -math.inf

    def is_over(self, now: float) -> bool:
        return now >= self._ends

    def check(self, now: float) -> None:
        """A message arrived at ``check_at`` or later, and a mark is being sent."""
        self.check_at = math.inf if self.is_over(now) else self._ends

    def confirmed(self, sent_at: float) -> None:
        """The peer has confirmed a mark that was sent at ``sent_at``."""
        self._ends = max(self._ends, sent_at + self._length_s)
        self.check_at = self._ends - self._length_s / 2
