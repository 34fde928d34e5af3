"""Credit: how much a sender may have under way to one actor of a peer. Sans-I/O.

A request takes credit when it is sent and gives it back when the receiver has worked it off (a reply, or DONE for a
one-way message), not when it has arrived: so a slow actor slows its senders, and both sides hold a bounded amount.
"""

from collections import deque
from typing import Generic, Protocol, TypeVar


class Turn(Protocol):
    """Who waits: a future, say."""

    def done(self) -> bool:
        """Whether they have given up, or were told already that it was in vain."""
        ...


Token = TypeVar("Token", bound=Turn)


class Credit(Generic[Token]):
    """The window towards one actor: so many requests, and so many bytes.

    One request more may leave as long as there is room for any: a message larger than the window passes alone.
    Who waits is granted credit one at a time, as only a request that is sent says how large it is.
    """

    __slots__ = ("_max_bytes", "_max_requests", "_unsized", "requests", "size_bytes", "waiting")

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._unsized = False
        """Somebody was granted credit and has not sent yet."""
        self.requests = 0
        self.size_bytes = 0
        self.waiting: deque[Token] = deque()

    def take(self) -> bool:
        """Takes credit for a request; False where its sender must wait its turn behind others."""
        if self.waiting or self._unsized:
            return False
        if self.requests >= self._max_requests or self.size_bytes >= self._max_bytes:
            return False
        self.requests += 1
        return True

    def use(self, size_bytes: int) -> None:
        """The request is sent. ``grant`` may have somebody to grant credit to now."""
        self.size_bytes += size_bytes
        self._unsized = False

    def forgo(self) -> list[Token]:
        """Credit was taken, or granted, and is not used: as ``give``."""
        self._unsized = False
        return self.give(0)

    def give(self, size_bytes: int) -> list[Token]:
        """Takes a request's credit back and hands it to those who wait, oldest first: they hold it already."""
        self.requests -= 1
        self.size_bytes -= size_bytes
        return self.grant() if self.waiting else []

    def grant(self) -> list[Token]:
        while self.waiting and not self._unsized:
            if self.requests >= self._max_requests or self.size_bytes >= self._max_bytes:
                break
            turn = self.waiting.popleft()
            if not turn.done():  # else it has given up in this moment, and nobody would give its credit back
                self.requests += 1
                self._unsized = True
                return [turn]
        return []
