"""The two ends of a stream: items wait at the reader, the writer waits for room.

The reader grants room for as many items as its consumer has taken (GRANT), not for those that have arrived: so a slow
consumer slows the writer, and a window of items is the most that is held on the way.
"""

import asyncio
from collections import deque
from typing import Any

from ..errors import ActorDead


class StreamReader:
    """The receiver's end. Holds at most the window of items: the sender has no credit for more."""

    def __init__(self, actor: str) -> None:
        """``actor``: the name of the sender."""
        self._actor = actor
        self._items: deque[Any] = deque()
        self._count = 0
        self._error: BaseException | None = None
        self._ended = False
        self._arrived = asyncio.Event()

    def push(self, number: int, item: Any) -> None:
        """Adds an item. Ignores a duplicate; if an item before this one is missing, the stream ends with an error."""
        # Items are numbered, as their loss would show nowhere else: requests have ids without a gap, items have not.
        if self._ended or number < self._count:
            return
        if number > self._count:
            self._miss(number)
            return
        self._count += 1
        self._items.append(item)
        self._arrived.set()

    def set_result(self, count: Any) -> None:
        """The stream ends after ``count`` items."""
        if self._ended:
            return
        if count != self._count:
            self._miss(count)
            return
        self._end()

    def _miss(self, number: Any) -> None:
        words = f"item {self._count} of its stream was lost on the way, or arrived after item {number}"
        self.set_exception(ActorDead(self._actor, words))

    def _end(self) -> None:
        self._ended = True
        self._arrived.set()

    def set_exception(self, error: BaseException) -> None:
        """The stream ends with ``error`` after the items that have arrived."""
        if not self._ended:
            self._error = error
            self._end()

    def done(self) -> bool:
        """True if no item will arrive any more; some may still have to be taken."""
        return self._ended

    def holds_items(self) -> bool:
        """True if ``wait_item`` would not wait."""
        return bool(self._items)

    async def wait_item(self, timeout_s: float) -> Any:
        """The next item. Raises TimeoutError, StopAsyncIteration at the end, or the error that ended the stream."""
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        return self._items.popleft()


class StreamWriter:
    """The sender's end: the room for further items and bytes."""

    def __init__(self, window: int, window_bytes: int) -> None:
        self.count = 0
        """The number of items that were sent."""
        self._room = max(window, 1)
        self._window_bytes = window_bytes
        # Sizes of the items that the receiver has not taken yet: GRANT counts items, not bytes.
        self._unread: deque[int] = deque()
        self._unread_bytes = 0
        self._granted = asyncio.Event()

    def sent(self, size_bytes: int) -> None:
        """Takes room for an item of that size, which has left."""
        self.count += 1
        self._room -= 1
        self._unread.append(size_bytes)
        self._unread_bytes += size_bytes

    def grant(self, count: int) -> None:
        """The receiver has taken ``count`` items."""
        # A peer that grants more than it was sent gets no more room by it.
        for _ in range(min(count, len(self._unread))):
            self._unread_bytes -= self._unread.popleft()
            self._room += 1
        self._granted.set()

    async def wait_room(self) -> None:
        """Waits until an item may leave. Its task is cancelled when the receiver leaves."""
        while self._room <= 0 or self._unread_bytes >= self._window_bytes:
            self._granted.clear()
            await self._granted.wait()
