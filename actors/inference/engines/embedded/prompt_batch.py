"""The inputs of one forward over prompts, or over parts of prompts behind what is in the cache already."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .slot_cache import SlotCache, round_up


@dataclass(frozen=True, slots=True)
class PromptPart:
    """``tokens`` of a prompt (one or more), behind its first ``start`` ones, which are in the cache."""

    tokens: Sequence[int]
    start: int = 0

    @property
    def end(self) -> int:
        """The number of the prompt's tokens that are in the cache once this part is computed."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """n parts of prompts, on the device.

    ``tokens``: int64 [n, tokens], padded at their ends. ``lengths``: int64 [n], without the padding. ``mask`` ([n, 1,
    tokens, columns] of the model's dtype, added to the attention scores) and ``positions`` (int64 [n, tokens]): None if
    the cache has no tokens of these rows; attention is causal then.
    """

    tokens: Tensor
    lengths: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None

    @classmethod
    def of(cls, parts: Sequence[PromptPart], cache: SlotCache, first: int) -> "PromptBatch":
        """The batch of ``parts``, whose rows begin at ``first``; prepares ``cache``, where they are reserved."""
        device = cache.device
        lengths = np.array([len(part.tokens) for part in parts])
        # Padded with the last token: no value is computed that the prompt itself would not have.
        padded = np.empty((len(parts), lengths.max()), np.int64)
        for line, part in zip(padded, parts, strict=True):
            line[: len(part.tokens)] = part.tokens
            line[len(part.tokens) :] = part.tokens[-1]
        tokens, counts = (torch.from_numpy(array).to(device) for array in (padded, lengths))
        if not any(part.start for part in parts):
            cache.prefill(first, *padded.shape)
            return cls(tokens, counts)
        starts = np.array([part.start for part in parts])
        # The padding goes to the cell behind the part, which the next token overwrites.
        positions = starts[:, None] + np.minimum(np.arange(padded.shape[1]), lengths[:, None])
        columns = round_up(int(positions.max()) + 1)
        rows = np.arange(first, first + len(parts))[:, None]
        cells = torch.from_numpy((rows * cache.row_columns + positions).reshape(-1)).to(device)
        cache.extend(first, len(parts), columns, cells)
        places = torch.from_numpy(positions).to(device)
        mask = torch.zeros(*padded.shape, columns, dtype=cache.dtype, device=device)
        mask.masked_fill_(torch.arange(columns, device=device) > places.unsqueeze(2), -torch.inf)
        return cls(tokens, counts, mask.unsqueeze(1), places)
