"""Gaps in the received ids: they tell a late request from a duplicate."""

from bisect import bisect_right

# The number of ranges that are remembered. A late id of a forgotten range is taken for a duplicate; its sender learns
# from the next PONG that it was lost.
_LIMIT = 256


class IdGaps:
    """Ranges of ids, ascending. Takes bounded time and memory, however large the ranges are."""

    __slots__ = ("_ranges",)

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, first: int, last: int) -> None:
        """``first`` is above all ids that were added before."""
        self._ranges.append((first, last))
        del self._ranges[:-_LIMIT]

    def take(self, number: int) -> bool:
        """Removes ``number``; False if it is in no gap."""
        at = bisect_right(self._ranges, number, key=lambda known: known[0]) - 1
        if at < 0 or number > self._ranges[at][1]:
            return False
        first, last = self._ranges[at]
        left = ((first, number - 1), (number + 1, last))
        self._ranges[at : at + 1] = [known for known in left if known[0] <= known[1]]
        del self._ranges[:-_LIMIT]
        return True

    def clear(self) -> None:
        self._ranges.clear()
