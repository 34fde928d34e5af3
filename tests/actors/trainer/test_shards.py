"""The rows of ranks, their way to another number of ranks, and items divide by weight."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.trainer.shards import Shard, divide, even_ranks, pieces, shard_of, whole

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
RANKS = st.integers(1, 6)


@given(shape=SHAPES.filter(lambda shape: shape and shape[0] > 0), ranks=RANKS)
def test_the_rows_of_a_rank_are_those_of_torch_chunk(shape: tuple[int, ...], ranks: int) -> None:
    chunks = torch.arange(shape[0]).chunk(ranks)
    for rank in range(ranks):
        part = shard_of(shape, rank, ranks)
        rows = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(part.start, part.stop)) == rows
        assert part.own_shape == (len(rows), *shape[1:])


@given(shape=SHAPES, before=RANKS, after=RANKS, most_bytes=st.integers(1, 200))
def test_all_rows_come_to_another_number_of_ranks_in_pieces_of_bounded_size(
    shape: tuple[int, ...], before: int, after: int, most_bytes: int
) -> None:
    tensor = np.random.default_rng(0).random(shape)
    sources = [shard_of(shape, rank, before) for rank in range(before)]
    parts = [np.atleast_1d(tensor)[part.start : part.stop] for part in sources]
    row_bytes = int(np.prod(shape[1:])) * tensor.itemsize
    for rank in range(after):
        own = shard_of(shape, rank, after)
        found = np.full(np.atleast_1d(np.empty(own.own_shape)).shape, np.nan)
        for piece in pieces({"w": own}, [{"w": each} for each in sources], {"w": row_bytes}, most_bytes):
            assert piece.rows == 1 or piece.rows * row_bytes <= most_bytes
            rows = parts[piece.source][piece.source_start : piece.source_start + piece.rows]
            assert len(rows) == piece.rows
            found[piece.own_start : piece.own_start + piece.rows] = rows
        assert np.array_equal(found, np.atleast_1d(tensor)[own.start : own.stop])


def test_sources_that_do_not_have_all_rows_are_refused_by_name() -> None:
    own = {"w": whole((4, 2))}
    for sources, problem in (
        ([{}], "no such tensor"),
        ([{"w": whole((4, 3))}], r"\[4, 3\]"),
        ([{"w": Shard((4, 2), 0, 2)}], "row 2"),
    ):
        with pytest.raises(ValueError, match=f"tensor w: .*{problem}"):
            list(pieces(own, sources, {"w": 8}, 64))


@given(weights=st.lists(st.integers(1, 100), max_size=30), ranks=RANKS)
def test_every_item_has_one_rank_and_no_rank_much_more_than_its_share(weights: list[int], ranks: int) -> None:
    shares = divide(np.array(weights, np.int64), ranks)
    assert sorted(index for share in shares for index in share.tolist()) == list(range(len(weights)))
    largest = max(sum(weights[index] for index in share) for share in shares)
    assert largest <= sum(weights) / ranks + max(weights, default=0)


def test_one_rank_has_all_items_in_their_order() -> None:
    assert divide(np.array([3, 1, 2]), 1)[0].tolist() == [0, 1, 2]


@given(weights=st.lists(st.integers(1, 100), min_size=1, max_size=30), ranks=RANKS)
def test_no_more_ranks_are_busy_all_the_time_than_the_heaviest_item_allows(
    weights: list[int], ranks: int
) -> None:
    shares = divide(np.array(weights, np.int64), ranks)
    largest = max(sum(weights[index] for index in share) for share in shares)
    assert 1.0 <= sum(weights) / largest <= even_ranks(weights) <= len(weights)


def test_one_item_that_is_as_heavy_as_the_others_together_keeps_two_ranks_busy() -> None:
    assert even_ranks([4, 2, 2]) == 2.0
