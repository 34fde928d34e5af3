"""The large answers to a peer that it has not confirmed to have received. Sans-I/O.

Answers of at most ``SMALL_BYTES`` are not counted: the window of requests bounds them. After each quarter of the window
a mark is sent, which the peer returns. Messages are in order, so a mark that came back confirms all before it, and a
peer that reads is never waited for. A peer that does not read (it is frozen, say) gets a window of answers, no more.
"""

from collections import deque

SMALL_BYTES = 4096


class Unread:
    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._marks: deque[tuple[int, int]] = deque()
        """Marks under way, with the bytes that were sent between the one before and each."""
        self._last_mark = 0
        self._since_mark = 0
        self._unconfirmed = 0

    def sent(self, size_bytes: int) -> bool:
        """An answer was sent; True if it is time for a mark."""
        self._unconfirmed += size_bytes
        self._since_mark += size_bytes
        return 4 * self._since_mark >= self._window_bytes

    def mark(self) -> int:
        """A number, from 1, to be sent to the peer, which returns it."""
        self._last_mark += 1
        self._marks.append((self._last_mark, self._since_mark))
        self._since_mark = 0
        return self._last_mark

    def confirmed(self, mark: int) -> None:
        """The peer has received all that was sent before ``mark``. Marks before it may have been lost."""
        while self._marks and self._marks[0][0] <= mark:
            self._unconfirmed -= self._marks.popleft()[1]

    @property
    def last_mark(self) -> int:
        return self._last_mark

    @property
    def is_full(self) -> bool:
        return self._unconfirmed >= self._window_bytes
