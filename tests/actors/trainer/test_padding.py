import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.trainer.padding import MOST_TOKENS_PER_FORWARD, TokenRow, pad_rows, split_by_length

token_lists = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple)
row_lists = st.lists(st.tuples(token_lists, token_lists), min_size=1, max_size=6)


@given(row_lists)
def test_every_completion_token_is_predicted_from_the_position_before_it(rows: list[TokenRow]) -> None:
    padded = pad_rows(rows, vocab_size=10)
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    assert padded.input_ids.shape == (len(rows), longest - 1)
    assert padded.targets.tolist() == [token for _, completion in rows for token in completion]
    expected: list[int] = []
    for index, (prompt, completion) in enumerate(rows):
        padding = [0] * (longest - len(prompt) - len(completion))
        assert padded.input_ids[index].tolist() == [*prompt, *completion, *padding][: longest - 1]
        start = index * (longest - 1) + len(prompt) - 1
        expected += range(start, start + len(completion))
    assert padded.positions.tolist() == expected


def test_the_tensors_are_plain_int64() -> None:
    padded = pad_rows([((1, 2), (3,)), ((4,), (5, 6, 7))], vocab_size=10)
    assert {t.dtype for t in (padded.input_ids, padded.positions, padded.targets)} == {torch.int64}
    assert padded.input_ids.is_contiguous()


@pytest.mark.parametrize("row", [((), (1,)), ((1,), ()), ((10,), (1,)), ((1,), (10,)), ((-1,), (1,))])
def test_impossible_rows_are_refused(row: TokenRow) -> None:
    with pytest.raises(ValueError, match=r"row|vocabulary"):
        pad_rows([((1,), (2,)), row], vocab_size=10)


@given(st.lists(st.integers(1, 400), max_size=30), st.integers(1, 600), st.integers(1, 2000))
def test_splitting_keeps_every_row_once_within_the_bound_and_leaves_no_worthwhile_cut(
    lengths: list[int], worth: int, most: int
) -> None:
    groups = split_by_length(np.array(lengths, np.int64), worth, most)
    assert sorted(index for group in groups for index in group.tolist()) == list(range(len(lengths)))
    for group in groups:
        inside = [lengths[index] for index in group]
        assert inside == sorted(inside, reverse=True)
        savings = [(inside[0] - inside[cut]) * (len(inside) - cut) for cut in range(len(inside))]
        assert max(savings) < worth
        assert len(inside) == 1 or inside[0] * len(inside) <= most


def test_one_long_row_does_not_pad_the_others() -> None:
    groups = split_by_length(np.array([100, 8000, 120, 90]), worth_tokens=512)
    assert [group.tolist() for group in groups] == [[1], [2, 0, 3]]


def test_similar_rows_stay_together() -> None:
    assert len(split_by_length(np.array([12, 10, 11, 9] * 8))) == 1


def test_a_forward_has_a_bounded_number_of_tokens_and_a_longer_row_is_one_forward() -> None:
    lengths = np.array([1000] * 100 + [2 * MOST_TOKENS_PER_FORWARD])
    first, *others = split_by_length(lengths)
    assert first.tolist() == [100]
    assert [group.size for group in others] == [16, 16, 16, 16, 16, 16, 4]
