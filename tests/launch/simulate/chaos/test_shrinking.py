"""Delta debugging."""

import random
from collections.abc import Sequence

import pytest

from flexmarl.launch.simulate.chaos.shrinking import shrink


def shrunk(count: int, causes: set[int]) -> tuple[list[int], int]:
    """The rest of numbers of which all ``causes`` are needed, and the number of questions."""
    asked: list[tuple[int, ...]] = []

    def fails(items: Sequence[int]) -> bool:
        asked.append(tuple(items))
        return causes <= set(items)

    kept = shrink(range(count), fails)
    assert len(set(asked)) == len(asked), "no part is played twice"
    return kept, len(asked)


@pytest.mark.parametrize("seed", range(50))
def test_only_the_causes_are_left(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 20)
    causes = set(draw.sample(range(count), draw.randint(0, min(4, count))))
    kept, questions = shrunk(count, causes)
    assert kept == sorted(causes) and questions <= count * count + 3 * count


def test_one_cause_of_many_takes_few_questions() -> None:
    kept, questions = shrunk(64, {17})
    assert kept == [17] and questions < 30


def test_a_failure_without_any_item_leaves_none() -> None:
    assert shrunk(8, set()) == ([], 1)


def test_a_failure_of_any_two_leaves_two() -> None:
    """No single cause: each of the rest is needed."""
    assert len(shrink(range(9), lambda items: len(items) >= 2)) == 2
