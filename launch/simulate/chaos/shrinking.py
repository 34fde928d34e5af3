"""A smaller set of faults that still fails: delta debugging (Zeller and Hildebrandt 2002, algorithm ddmin). Pure."""

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import TypeVar

Item = TypeVar("Item")


def shrink(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """A part of ``items``, in their order, that fails, and that does not without any one of its own. ``items`` fail.

    ``fails`` is asked at most once for each part: about ``len(items)`` times if one item is the cause, and the square
    of it at worst.
    """
    answers: dict[tuple[int, ...], bool] = {}

    def fails_with(numbers: Sequence[int]) -> bool:
        key = tuple(numbers)
        if key not in answers:
            answers[key] = fails([items[number] for number in numbers])
        return answers[key]

    kept, parts = list(range(len(items))), 2
    if kept and fails_with(()):
        return []
    while len(kept) >= 2:
        chunks = _divide(kept, parts)
        complements = [
            list(chain.from_iterable(other for other in chunks if other is not chunk)) for chunk in chunks
        ]
        smaller = next((part for part in chunks if fails_with(part)), None)
        if smaller is not None:
            kept, parts = smaller, 2
            continue
        smaller = next((part for part in complements if fails_with(part)), None)
        if smaller is not None:
            kept, parts = smaller, max(2, parts - 1)
        elif parts < len(kept):
            parts = min(len(kept), 2 * parts)
        else:
            break
    return [items[number] for number in kept]


def _divide(numbers: Sequence[int], parts: int) -> list[list[int]]:
    """Parts of about equal length, in order; none is empty while there are as many numbers."""
    count = len(numbers)
    bounds = [count * part // parts for part in range(parts + 1)]
    return [list(numbers[start:end]) for start, end in pairwise(bounds) if start < end]
