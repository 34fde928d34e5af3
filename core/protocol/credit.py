"""Credit: the requests and bytes that a sender may have in flight to one actor of a peer. Sans-I/O.

A request takes credit when it is sent and returns it when the receiver has processed it (a reply, or DONE for a one-way
message), not when it has arrived: so a slow actor slows its senders, and both sides hold a bounded amount.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol


class CreditWaiter(Protocol):
    """A waiter for credit: a request that is packed already, say."""

    @property
    def size_bytes(self) -> int:
        """The bytes that it needs credit for."""
        ...

    def done(self) -> bool:
        """True if it has given up, or has been failed."""
        ...

    def set_exception(self, error: Exception, /) -> None:
        """It will get no credit."""
        ...


class Credit:
    """The window towards one actor: a number of requests, and a number of bytes.

    One more request may leave as long as there is room for any: a message larger than the window passes alone.
    """

    __slots__ = ("__weakref__", "_max_bytes", "_max_requests", "requests", "size_bytes", "waiting")

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self.requests = 0
        self.size_bytes = 0
        self.waiting: deque[CreditWaiter] = deque()

    def take(self, size_bytes: int) -> bool:
        """Takes credit for a request of that size; False if its sender must wait behind others."""
        if self.waiting or self.requests >= self._max_requests or self.size_bytes >= self._max_bytes:
            return False
        self.requests += 1
        self.size_bytes += size_bytes
        return True

    def give_back(self, requests: int, size_bytes: int) -> Sequence[CreditWaiter]:
        """So many requests, of so many bytes together, are processed or lost. Returns the waiters, oldest first, that
        have credit from now on."""
        self.requests -= requests
        self.size_bytes -= size_bytes
        return self._grant() if self.waiting else ()

    def _grant(self) -> list[CreditWaiter]:
        granted = []
        while self.waiting and self.requests < self._max_requests and self.size_bytes < self._max_bytes:
            waiter = self.waiting.popleft()
            if not waiter.done():  # else it has given up this moment, and its credit would never come back
                self.requests += 1
                self.size_bytes += waiter.size_bytes
                granted.append(waiter)
        return granted
