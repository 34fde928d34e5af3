from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.actors.trainer.padding import (
    MOST_TOKENS_PER_FORWARD,
    TokenRow,
    TokenRows,
    fill_forwards,
    pack_rows,
    pad_rows,
    split_by_length,
)

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


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9), min_size=1)),
        min_size=1,
    )
)
def test_packed_rows_are_the_padded_ones_without_padding(rows: list[tuple[list[int], list[int]]]) -> None:
    token_rows = [(tuple(prompt), tuple(completion)) for prompt, completion in rows]
    packed = pack_rows(token_rows, 10)
    packing = packed.packing
    assert packing is not None and packed.padding == 0
    longest_first = sorted(token_rows, key=lambda row: -len(row[0]) - len(row[1]))
    ends = packing.ends.tolist()
    assert ends[0] == 0 and len(ends) == len(rows) + 1 and ends[-1] == packed.input_ids.numel()
    assert packing.longest == packed.longest == ends[1]
    targets: list[int] = []
    positions: list[int] = []
    for number, (prompt, completion) in enumerate(longest_first):
        row = slice(ends[number], ends[number + 1])
        assert packed.input_ids[0, row].tolist() == [*prompt, *completion][:-1]
        assert packing.token_positions[0, row].tolist() == list(range(row.stop - row.start))
        targets += completion
        positions += range(row.start + len(prompt) - 1, row.stop)
    assert packed.targets.tolist() == targets and packed.positions.tolist() == positions
    assert {t.dtype for t in (packed.input_ids, packed.positions, packed.targets)} == {torch.int64}
    assert packing.ends.dtype == torch.int32


def test_rows_of_similar_length_are_a_group_of_their_own() -> None:
    packing = pack_rows([((1,) * n, (2,)) for n in (3, 900, 2, 900, 3)], 10).packing
    assert packing is not None
    equal, uneven = packing.groups
    assert (equal.rows, equal.longest, equal.start, equal.stop, equal.cells) == (2, 900, 0, 1800, None)
    assert (uneven.rows, uneven.longest, uneven.start, uneven.stop) == (3, 3, 1800, 1808)
    assert uneven.cells is not None and uneven.cells.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@given(st.lists(st.integers(1, 400), max_size=30), st.integers(1, 2000))
def test_filling_forwards_keeps_every_row_once_within_the_bound_and_wastes_no_forward(
    lengths: list[int], most: int
) -> None:
    groups = fill_forwards(np.array(lengths, np.int64), most)
    assert sorted(index for group in groups for index in group.tolist()) == list(range(len(lengths)))
    sizes = [sum(lengths[index] for index in group) for group in groups]
    for group, size in zip(groups, sizes, strict=True):
        inside = [lengths[index] for index in group]
        assert inside == sorted(inside, reverse=True)
        assert size <= most or len(inside) == 1
    assert all(first + second > most for first, second in pairwise(sizes))


turns = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), min_size=1, max_size=3), token_lists),
    min_size=1,
    max_size=8,
)


@given(turns)
def test_a_merged_row_has_the_completions_of_all_its_samples(
    drawn: list[tuple[int, list[int], tuple[int, ...]]],
) -> None:
    """Each prompt extends one of the samples before, or none."""
    samples: list[TokenRow] = []
    for before, between, completion in drawn:
        prefix = samples[-before] if 0 < before <= len(samples) else ((), ())
        samples.append(((*prefix[0], *prefix[1], *between), completion))
    merged, members = TokenRows.of(samples, 10).merged()
    every = np.argsort(-merged.lengths, kind="stable")
    padded, packed = merged.padded(every), merged.packed(every)
    assert padded.input_ids.shape[0] == len(members) <= len(samples)
    expected = [samples[number] for row in every for number in members[row]]
    flat = padded.input_ids.flatten().tolist()
    place = 0
    for prompt, completion in expected:
        for number, token in enumerate(completion):
            position = int(padded.positions[place])
            row_start = position - position % padded.longest
            sequence = [*prompt, *completion[:number]]
            assert flat[row_start : position + 1] == sequence
            packing = packed.packing
            assert packing is not None
            position = int(packed.positions[place])
            row_start = position - int(packing.token_positions[0, position])
            assert packed.input_ids[0, row_start : position + 1].tolist() == sequence
            assert padded.targets[place] == packed.targets[place] == token
            place += 1
    assert place == len(padded.targets) == len(packed.targets)


def test_rows_without_prefixes_are_left_as_they_are() -> None:
    rows = TokenRows.of([((1, 2), (3,)), ((1,), (2, 3)), ((1, 2), (4,))], 10)
    merged, members = rows.merged()
    assert merged is rows and members == [[0], [1], [2]]
