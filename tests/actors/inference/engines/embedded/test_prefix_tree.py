"""The prefix tree against a list of everything that was stored."""

from collections.abc import Callable, Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.inference.engines.embedded.prefix_tree import (
    KeyValues,
    Prefix,
    PrefixTree,
)

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)


def states_of(tokens: Sequence[int]) -> Callable[[int, int], KeyValues]:
    """Two buffers, in which the state of a token is a digest of the text up to there."""
    known = torch.tensor([hash(tuple(tokens[: at + 1])) % (1 << 40) for at in range(len(tokens))])
    return lambda start, end: [known[start:end].clone(), -known[start:end]]


def assert_right(found: Prefix, tokens: Sequence[int]) -> None:
    pieces = [torch.cat(buffers) for buffers in zip(*found.pieces, strict=True)]
    for piece, expected in zip(pieces, states_of(tokens)(0, found.tokens), strict=bool(found.tokens)):
        assert piece.equal(expected)


def agreed(left: Sequence[int], right: Sequence[int]) -> int:
    return next(
        (n for n, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
        min(len(left), len(right)),
    )


@given(st.lists(TOKENS, max_size=12), st.lists(TOKENS, min_size=1, max_size=6))
def test_the_longest_known_beginning_is_found(
    stored: list[tuple[int, ...]], asked: list[tuple[int, ...]]
) -> None:
    tree = PrefixTree(10_000)
    for tokens in stored:
        tree.insert(tokens, states_of(tokens))
    for tokens in [*asked, *stored]:
        found = tree.match(tokens)
        assert found.tokens == max((agreed(tokens, other) for other in stored), default=0)
        assert_right(found, tokens)
    # common beginnings are stored once
    assert tree.tokens == len({tokens[:end] for tokens in stored for end in range(1, len(tokens) + 1)})


@given(st.lists(st.tuples(TOKENS, st.booleans()), max_size=30), st.integers(1, 25))
def test_the_capacity_is_kept_and_what_is_found_is_right(
    calls: list[tuple[tuple[int, ...], bool]], capacity: int
) -> None:
    tree = PrefixTree(capacity)
    for tokens, stored in calls:
        if stored:
            tree.insert(tokens, states_of(tokens))
            assert tree.match(tokens).tokens == len(tokens) or len(tokens) > capacity
        assert_right(tree.match(tokens), tokens)
        assert tree.tokens <= capacity
    tree.limit(capacity // 2)
    assert tree.tokens <= capacity // 2
    for tokens, _ in calls:
        assert_right(tree.match(tokens), tokens)
    tree.limit(0)
    assert tree.tokens == 0


def test_the_least_recently_used_ends_go_first() -> None:
    tree = PrefixTree(10)
    for tokens in ((1, 1, 1, 2, 2), (1, 1, 1, 3, 3), (4, 4, 4)):
        tree.insert(tokens, states_of(tokens))
    assert tree.tokens == 10
    tree.match((1, 1, 1, 2, 2))
    tree.insert((5, 5), states_of((5, 5)))
    assert [tree.match(tokens).tokens for tokens in ((1, 1, 1, 3, 3), (4, 4, 4), (1, 1, 1, 2, 2))] == [
        3,
        3,
        5,
    ]
    tree.insert((6, 6, 6), states_of((6, 6, 6)))
    assert tree.match((5, 5)).tokens == 0 and tree.match((1, 1, 1, 2, 2)).tokens == 5


def test_nothing_is_left_after_clear() -> None:
    tree = PrefixTree(10)
    tree.insert((1, 2, 3), states_of((1, 2, 3)))
    tree.clear()
    assert tree.tokens == 0 and tree.match((1, 2, 3)) == Prefix()
    tree.insert((1, 2), states_of((1, 2)))
    assert tree.match((1, 2, 3)).tokens == 2


def test_what_was_found_stays_valid_after_an_eviction() -> None:
    tree = PrefixTree(4)
    tree.insert((1, 2, 3, 4), states_of((1, 2, 3, 4)))
    found = tree.match((1, 2, 3))
    tree.insert((5, 6, 7, 8), states_of((5, 6, 7, 8)))
    assert tree.match((1, 2, 3)).tokens == 0
    assert_right(found, (1, 2, 3))
