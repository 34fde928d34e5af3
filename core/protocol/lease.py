"""The lease under which the requests of one peer begin (Gray and Cheriton, Leases, 1989). Sans-I/O.

A caller that hears nothing from a process for some heartbeats fails its requests to it. They must not begin here later:
when this process was stopped and continues, when a handler has blocked its loop, or when a network that was cut
delivers the bytes that it held back. The age of a message can't be seen. But a peer that has confirmed a mark of this
side has heard this side after the mark was sent, and does not give up before the time of that silence has passed since
then. Until then its requests begin. After that they wait until it has confirmed another mark: a peer that has given up
has withdrawn them by then, since it does so before anything else when it has made another connection.
"""

import math

from .session import Settings

# The rates of the clocks of two machines may differ by this: twice the most that a kernel slews one (adjtimex(2)).
_RATE_DIFFERENCE = 0.001


class Lease:
    """``check_at``: from this time on it has to be checked before a request begins."""

    __slots__ = ("_ends", "_length_s", "check_at")

    def __init__(self, settings: Settings) -> None:
        """It begins when the peer has confirmed its first mark."""
        self._length_s = settings.silence_s * (1 - _RATE_DIFFERENCE)
        self._ends = self.check_at = -math.inf

    def is_over(self, now: float) -> bool:
        """True if no request may begin at ``now``, in seconds of the clock of ``confirmed``."""
        return now >= self._ends

    def renewing(self) -> None:
        """A mark is under way: only the end of the lease remains to be noticed."""
        self.check_at = self._ends

    def confirmed(self, sent_at: float) -> None:
        """The peer has confirmed a mark that was sent at ``sent_at``."""
        self._ends = max(self._ends, sent_at + self._length_s)
        self.check_at = self._ends - self._length_s / 2
