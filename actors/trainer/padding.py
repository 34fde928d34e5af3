"""Token lists to tensors: rows padded on the right or laid end to end, the positions that need logits, batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..routers import ReplayedRoutes
from .prefix_chains import prefix_chains

TokenRow = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt tokens, completion tokens."""

WORTH_SPLITTING_TOKENS = 512
"""A further forward/backward has a fixed cost, worth about 200 tokens of a tiny model on a CPU and 1000 of
a large one on a GPU: a batch is split if that saves at least this much padding."""

WORTH_DIVIDING_TOKENS = 256
"""The padding that a further call of attention must save: the call alone costs less than a whole forward."""

MOST_TOKENS_PER_FORWARD = 16384
"""Padded positions of one forward/backward, to bound its memory: with a vocabulary of 150 000 the logits of one
completion token and their gradient alone are about 1.5 MB (bfloat16 and float32)."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Neighbouring rows of a packed forward, the tokens ``start`` to ``stop`` of it, which attention without variable
    lengths pads to the ``longest`` of them. ``cells``: ``[stop - start]`` int64, the place of each token in the padded
    ``[rows * longest]``; None if all rows are as long."""

    rows: int
    longest: int
    start: int
    stop: int
    cells: Tensor | None


@dataclass(slots=True)
class Packing:
    """The rows that lie end to end in one: ``T`` tokens, the longest rows first.

    ``token_positions``: ``[1, T]`` int64, of each token within its row. ``ends``: ``[rows + 1]`` int32, 0 and the end
    of each row. ``longest``: tokens of the first row. ``groups``: all rows, divided by length. ``was_read``: an
    attention has divided a forward by it.
    """

    token_positions: Tensor
    ends: Tensor
    longest: int
    groups: tuple[RowGroup, ...]
    was_read: bool = False

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> "Packing":
        """The same, not read yet, with each tensor changed."""
        groups = tuple(
            group if group.cells is None else replace(group, cells=change(group.cells))
            for group in self.groups
        )
        return Packing(change(self.token_positions), change(self.ends), self.longest, groups)


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows padded on the right, or laid end to end, ready for one forward.

    ``input_ids``: ``[rows, longest]`` int64, prompt and completion without the last token, whose logits
    are not needed. The padding is token 0; causal attention never looks right, so no mask is needed. With ``packing``
    ``[1, T]``, without padding. ``positions``: ``[N]`` int64, indices into the flattened input whose logits predict
    the completion tokens, row by row. ``targets``: ``[N]`` int64, those tokens. ``padding``: positions that are.
    ``routes``: of all positions, for a policy that replays them.
    """

    input_ids: Tensor
    positions: Tensor
    targets: Tensor
    padding: int
    packing: Packing | None = None
    routes: ReplayedRoutes | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self.input_ids.shape[1] if self.packing is None else self.packing.longest

    @property
    def model_inputs(self) -> dict[str, Any]:
        """The arguments for the forward of a Hugging Face model."""
        inputs = {"input_ids": self.input_ids, "use_cache": False}
        if self.packing is None:
            return inputs
        return inputs | {"position_ids": self.packing.token_positions, "packing": self.packing}

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> "PaddedRows":
        """The same with each tensor changed."""
        return PaddedRows(
            change(self.input_ids),
            change(self.positions),
            change(self.targets),
            self.padding,
            None if self.packing is None else self.packing.with_tensors(change),
            None if self.routes is None else self.routes.with_tensors(change),
        )


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of tokens, without padding. ``tokens``: ``[T]`` int64; ``is_completion``: ``[T]`` bool, true for those whose
    logits are needed. ``starts``, ``prompts`` and ``lengths``: ``[rows]`` int64, the place of each row's first token,
    the number of its tokens before the first completion, and of all."""

    tokens: NDArray[np.int64]
    is_completion: NDArray[np.bool_]
    starts: NDArray[np.int64]
    prompts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[TokenRow], vocab_size: int) -> "TokenRows":
        """Raises ``ValueError`` for an empty prompt or completion, and for a token outside ``0 .. vocab_size - 1`` (a
        GPU would answer with a device-side assertion that kills the process)."""
        _check_filled(rows)
        prompts = np.fromiter((len(prompt) for prompt, _ in rows), np.int64, len(rows))
        completions = np.fromiter((len(completion) for _, completion in rows), np.int64, len(rows))
        lengths = prompts + completions
        tokens = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), np.int64, int(lengths.sum()))
        if rows:
            _check_range(int(tokens.min()), int(tokens.max()), vocab_size)
        parts = np.stack([prompts, completions], 1).ravel()
        is_completion = np.repeat(np.tile([False, True], len(rows)), parts)
        return cls(tokens, is_completion, lengths.cumsum() - lengths, prompts, lengths)

    def merged(self) -> tuple["TokenRows", list[list[int]]]:
        """The same completions in fewer rows, and the numbers of the rows that each has in it, the shortest first: see
        ``prefix_chains``."""
        ends = self.starts + self.lengths
        # Half the bytes of int64 to compare; no vocabulary has as many tokens.
        packed, size = self.tokens.astype(np.int32).tobytes(), np.dtype(np.int32).itemsize
        bounds = zip((self.starts * size).tolist(), (ends * size).tolist(), strict=True)
        chains = prefix_chains([packed[start:end] for start, end in bounds], (self.prompts * size).tolist())
        if len(chains) == len(self.lengths):
            return self, chains
        is_completion = np.zeros_like(self.is_completion)
        for numbers in chains:
            row = self.starts[numbers[-1]]
            for number in numbers:
                is_completion[row + self.prompts[number] : row + self.lengths[number]] = True
        first, last = ([numbers[place] for numbers in chains] for place in (0, -1))
        rows = TokenRows(
            self.tokens, is_completion, self.starts[last], self.prompts[first], self.lengths[last]
        )
        return rows, chains

    def padded(self, indices: NDArray[np.int64]) -> PaddedRows:
        """The rows of these numbers (at least one), padded to the longest of them."""
        starts, lengths = self.starts[indices], self.lengths[indices]
        columns = np.arange(lengths.max())
        filled = columns < lengths[:, None]
        sources = (starts[:, None] + columns)[filled]
        tokens, completion = np.zeros(filled.shape, np.int64), np.zeros(filled.shape, np.bool_)
        tokens[filled], completion[filled] = self.tokens[sources], self.is_completion[sources]
        return PaddedRows(
            input_ids=torch.from_numpy(np.ascontiguousarray(tokens[:, :-1])),
            positions=torch.from_numpy(np.flatnonzero(completion[:, 1:])),
            targets=torch.from_numpy(tokens[completion]),
            padding=tokens.size - int(lengths.sum()),
        )

    def packed(self, indices: NDArray[np.int64]) -> PaddedRows:
        """The rows of these numbers (at least one, the longest first) laid end to end."""
        inputs = self.lengths[indices] - 1
        ends = np.concatenate([[0], inputs.cumsum()])
        rows = np.repeat(np.arange(len(indices)), inputs)
        columns = np.arange(ends[-1]) - ends[rows]
        sources = self.starts[indices][rows] + columns
        predicting = np.flatnonzero(self.is_completion[sources + 1])
        return PaddedRows(
            input_ids=torch.from_numpy(self.tokens[sources][None]),
            positions=torch.from_numpy(predicting),
            targets=torch.from_numpy(self.tokens[sources[predicting] + 1]),
            padding=0,
            packing=Packing(
                token_positions=torch.from_numpy(columns[None]),
                ends=torch.from_numpy(ends.astype(np.int32)),
                longest=int(inputs[0]),
                groups=tuple(_row_groups(inputs, ends)),
            ),
        )


def _row_groups(inputs: NDArray[np.int64], ends: NDArray[np.int64]) -> Iterator[RowGroup]:
    """``inputs``: tokens of each row, the longest first."""
    for rows in split_by_length(inputs, WORTH_DIVIDING_TOKENS, int(ends[-1]) * len(inputs)):
        lengths = inputs[rows]
        first, longest = int(rows[0]), int(lengths[0])
        cells = np.flatnonzero(np.arange(longest) < lengths[:, None])
        yield RowGroup(
            rows=len(rows),
            longest=longest,
            start=int(ends[first]),
            stop=int(ends[first + len(rows)]),
            cells=None if cells.size == len(rows) * longest else torch.from_numpy(cells),
        )


def pad_rows(rows: Sequence[TokenRow], vocab_size: int) -> PaddedRows:
    """Pads ``rows`` (at least one) to the longest. Raises as ``TokenRows.of``."""
    return TokenRows.of(rows, vocab_size).padded(np.arange(len(rows)))


def pack_rows(rows: Sequence[TokenRow], vocab_size: int) -> PaddedRows:
    """Lays ``rows`` (at least one) end to end, the longest first. Raises as ``TokenRows.of``."""
    token_rows = TokenRows.of(rows, vocab_size)
    return token_rows.packed(np.argsort(-token_rows.lengths, kind="stable"))


def check_tokens(rows: Sequence[TokenRow], vocab_size: int) -> None:
    """Raises ``ValueError`` as ``pad_rows`` does."""
    _check_filled(rows)
    if rows:
        every = [tokens for row in rows for tokens in row]
        _check_range(min(map(min, every)), max(map(max, every)), vocab_size)


def _check_filled(rows: Sequence[TokenRow]) -> None:
    if not all(prompt and completion for prompt, completion in rows):
        raise ValueError("every row needs at least one prompt token and one completion token")


def _check_range(lowest: int, highest: int, vocab_size: int) -> None:
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(f"token {lowest} or {highest} is outside the vocabulary of {vocab_size}")


def split_by_length(
    lengths: NDArray[np.int64],
    worth_tokens: int = WORTH_SPLITTING_TOKENS,
    most_tokens: int = MOST_TOKENS_PER_FORWARD,
) -> list[NDArray[np.int64]]:
    """Groups rows of similar length, so that one long row does not pad all others to its length.

    ``lengths``: ``[rows]`` tokens, each at least 1. Returns arrays of row indices, every row in exactly one,
    longest rows first. A group is cut at the row where that saves the most padding, as long as it saves
    ``worth_tokens`` or more. It has at most ``most_tokens`` tokens, padding included, unless it is one row.
    """
    order = np.argsort(-lengths, kind="stable")
    pending, groups = [order] if lengths.size else [], []
    while pending:
        group = pending.pop()
        longest_first = lengths[group]
        # Cutting before row i pads the rows from i on to length[i] instead of length[0].
        saved = (longest_first[0] - longest_first) * np.arange(group.size, 0, -1)
        cut = int(saved.argmax())
        if saved[cut] < worth_tokens:
            cut = max(1, int(most_tokens // longest_first[0]))
        if cut >= group.size:
            groups.append(group)
        else:
            pending += [group[cut:], group[:cut]]
    return groups


def fill_forwards(
    lengths: NDArray[np.int64], most_tokens: int = MOST_TOKENS_PER_FORWARD
) -> list[NDArray[np.int64]]:
    """Groups rows of any length that are to be laid end to end, in few forwards.

    ``lengths``: ``[rows]`` tokens, each at least 1. Returns arrays of row indices, every row in exactly one, the
    longest rows of each first. A group has at most ``most_tokens`` tokens, unless it is one row. The longest rows come
    first, each into the first group with room for it: at most 11/9 of the least number of groups (Johnson, 1973).
    """
    rooms: list[int] = []
    groups: list[list[int]] = []
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        group = next((number for number, room in enumerate(rooms) if length <= room), len(groups))
        if group == len(groups):
            groups.append([])
            rooms.append(most_tokens)
        groups[group].append(index)
        rooms[group] -= length
    return [np.array(group, np.int64) for group in groups]
