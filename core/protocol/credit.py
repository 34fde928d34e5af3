"""Credit: the requests and bytes that a sender may have in flight to one actor of a peer. Sans-I/O.

A request takes credit when it is sent and returns it when the receiver has processed it (a reply, or DONE for a one-way
message), not when it has arrived: so a slow actor slows its senders, and both sides hold a bounded amount.
"""

from collections import deque
from typing import Generic, Protocol, TypeVar


class CreditWaiter(Protocol):
    """A waiter for credit: a future, say."""

    def done(self) -> bool:
        """True if it has given up, or has been failed."""
        ...


Waiter = TypeVar("Waiter", bound=CreditWaiter)


class Credit(Generic[Waiter]):
    """The window towards one actor: a number of requests, and a number of bytes.

    One more request may leave as long as there is room for any: a message larger than the window passes alone.
    Waiters are granted credit one at a time, as only a request that is sent shows its size.
    """

    __slots__ = ("_max_bytes", "_max_requests", "_unsized", "requests", "size_bytes", "waiting")

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._unsized = False
        """A waiter was granted credit and has not sent yet."""
        self.requests = 0
        self.size_bytes = 0
        self.waiting: deque[Waiter] = deque()

    @property
    def is_used(self) -> bool:
        return self.requests > 0 or bool(self.waiting)

    def take(self) -> bool:
        """Takes credit for a request; False if its sender must wait behind others."""
        if self.waiting or self._unsized:
            return False
        if self.requests >= self._max_requests or self.size_bytes >= self._max_bytes:
            return False
        self.requests += 1
        return True

    def use(self, size_bytes: int) -> None:
        """The request is sent. ``grant`` may have a waiter to grant credit to now."""
        self.size_bytes += size_bytes
        self._unsized = False

    def forgo(self) -> list[Waiter]:
        """Credit was taken, or granted, and is not used: as ``give``."""
        self._unsized = False
        return self.give(0)

    def give(self, size_bytes: int) -> list[Waiter]:
        """Takes a request's credit back and grants it to waiters, oldest first: they hold it already."""
        self.requests -= 1
        self.size_bytes -= size_bytes
        return self.grant() if self.waiting else []

    def grant(self) -> list[Waiter]:
        while self.waiting and not self._unsized:
            if self.requests >= self._max_requests or self.size_bytes >= self._max_bytes:
                break
            waiter = self.waiting.popleft()
            if not waiter.done():  # else it has given up this moment, and its credit would never come back
                self.requests += 1
                self._unsized = True
                return [waiter]
        return []
