"""Which ids were passed over: what tells a request that was overtaken from one that comes for the second time."""

from bisect import bisect_right

# So many ranges are remembered. An id of one that is forgotten is taken for a duplicate when it comes after all; its
# sender learns from the next PONG that it was lost.
_LIMIT = 256


class Skipped:
    """Ranges of ids, ascending. Takes bounded time and memory, however large the ranges are."""

    __slots__ = ("_ranges",)

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, first: int, last: int) -> None:
        """``first`` is above all that was added before."""
        self._ranges.append((first, last))
        del self._ranges[:-_LIMIT]

    def take(self, number: int) -> bool:
        """Whether ``number`` was passed over and has not been taken before."""
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
