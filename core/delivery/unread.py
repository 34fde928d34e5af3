"""Marks, which the peer returns, and the large answers that it has not confirmed to have received. Sans-I/O.

Answers of at most ``SMALL_BYTES`` are not counted: the window of requests bounds them. After each quarter of the window
a mark is sent. Messages are in order, so a mark that came back confirms all before it, and a peer that reads is never
waited for. A peer that does not read (it is frozen, say) gets a window of answers, no more.
"""

from collections import deque

SMALL_BYTES = 4096


class Unread:
    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._marks: deque[tuple[int, int, float]] = deque()
        """Marks under way: their number, the bytes that were sent between the one before and each, and its time."""
        self._last_mark = 0
        self._since_mark = 0
        self._unconfirmed = 0

    def sent(self, size_bytes: int) -> bool:
        """An answer was sent; True if it is time for a mark."""
        self._unconfirmed += size_bytes
        self._since_mark += size_bytes
        return 4 * self._since_mark >= self._window_bytes

    def mark(self, now: float) -> int:
        """A number, from 1, to be sent to the peer, which returns it."""
        size_bytes, self._since_mark = self._since_mark, 0
        if not size_bytes and self._marks:  # it stands for the one before too, which may have been lost
            size_bytes = self._marks.pop()[1]
        self._last_mark += 1
        self._marks.append((self._last_mark, size_bytes, now))
        return self._last_mark

    def confirmed(self, mark: int) -> float | None:
        """The peer has received all that was sent before ``mark``. Marks before it may have been lost. Returns the time
        of the last mark that is confirmed by this one; None if it confirms no mark."""
        sent_at = None
        while self._marks and self._marks[0][0] <= mark:
            _, size_bytes, sent_at = self._marks.popleft()
            self._unconfirmed -= size_bytes
        return sent_at

    @property
    def is_full(self) -> bool:
        return self._unconfirmed >= self._window_bytes
