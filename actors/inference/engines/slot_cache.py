"""Keys and values of the sequences being decoded, one row each, and the attention that reads them in place.

Rows 0..n-1 are the running sequences, always without gaps: when sequences finish, the last rows move into
their places (``move``). So decoding reads a plain slice, never a gathered copy. Token number p of a sequence
is at column p of its row. The buffers grow by doubling and are never freed; between two growths nothing is
allocated.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# Widths are multiples of it: memory-efficient attention on GPUs needs aligned masks.
COLUMN_STEP = 8
_FIRST_COLUMNS = 64
_FIRST_ROWS = 8


class SlotCache(Cache):
    """The cache of a whole model, for at most ``max_rows`` sequences of ``max_columns`` tokens.

    ``prefill`` or ``decode`` sets the rows of the following forwards; then every layer calls ``update``. To the model
    it looks like an empty cache, for which the masks of prompts are made.
    """

    def __init__(self, max_rows: int, max_columns: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layers=[])
        self._limits = max_rows, _round_up(max_columns, COLUMN_STEP)
        self._dtype = dtype
        self._device = device
        self._rows = min(_FIRST_ROWS, self._limits[0])
        self._columns = min(_FIRST_COLUMNS, self._limits[1])
        # per layer [rows, columns, kv_heads, head_dim], made by the first prefill
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._first = 0  # the row that prefilling starts at
        self._cells: Tensor | None = None  # int64 [n], the cell of each row's next token; None: prefilling
        self._views: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the allocated rows have room for."""
        return self._rows * self._columns

    def prefill(self, first: int, rows: int, columns: int) -> None:
        """Prepares a forward of ``rows`` new rows from ``first`` on, of up to ``columns`` tokens each."""
        self._reserve(first + rows, columns)
        self._first = first
        self._cells = None

    def decode(self, rows: int, columns: int) -> int:
        """Prepares forwards of one token of each of the first ``rows``, which attend to ``columns``.

        Returns the cells per row, c: token p of row r belongs in cell r * c + p (see ``write_to``).
        """
        self._reserve(rows, columns)
        self._views = [
            (
                keys.flatten(0, 1),
                values.flatten(0, 1),
                keys[:rows, :columns].transpose(1, 2),
                values[:rows, :columns].transpose(1, 2),
            )
            for keys, values in zip(self._keys, self._values, strict=True)
        ]
        return self._columns

    def write_to(self, cells: Tensor) -> None:
        """Sets the cells of the next forward's tokens: int64 [rows]."""
        self._cells = cells

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores new keys and values ([batch, kv_heads, tokens, head_dim]); returns those to attend to."""
        if self._cells is None:
            self._store_prompts(key_states, value_states, layer_idx)
            return key_states, value_states
        return self.append(layer_idx, key_states.squeeze(2), value_states.squeeze(2))

    def append(self, layer: int, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        """``update`` for decoding: one token per row ([n, kv_heads, head_dim])."""
        assert self._cells is not None
        key_cells, value_cells, keys, values = self._views[layer]
        key_cells.index_copy_(0, self._cells, new_keys)
        value_cells.index_copy_(0, self._cells, new_values)
        return keys, values

    def _store_prompts(self, key_states: Tensor, value_states: Tensor, layer: int) -> None:
        rows = slice(self._first, self._first + key_states.shape[0])
        for buffers, states in ((self._keys, key_states), (self._values, value_states)):
            if layer == len(buffers):
                buffers.append(self._buffer(states.shape[1], states.shape[3]))
            buffers[layer][rows, : states.shape[2]] = states.transpose(1, 2)

    def move(self, sources: list[int], targets: list[int], columns: int) -> None:
        """Copies the first ``columns`` columns of row ``sources[i]`` to row ``targets[i]``."""
        come_from = torch.tensor(sources, device=self._device)
        go_to = torch.tensor(targets, device=self._device)
        for buffer in (*self._keys, *self._values):
            used = buffer[:, :columns]
            used.index_copy_(0, go_to, used.index_select(0, come_from))

    def clear(self) -> None:
        """Fills the cache with zeros: masked cells are multiplied too, so a NaN from broken weights would stay."""
        for buffer in (*self._keys, *self._values):
            buffer.zero_()

    def _reserve(self, rows: int, columns: int) -> None:
        if rows <= self._rows and columns <= self._columns:
            return
        kept_rows, kept_columns = self._rows, self._columns
        self._rows = min(max(_power_of_two(rows), kept_rows), self._limits[0])
        self._columns = min(max(_power_of_two(columns), kept_columns), self._limits[1])
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                buffers[layer] = self._buffer(*old.shape[2:])
                buffers[layer][:kept_rows, :kept_columns] = old

    def _buffer(self, heads: int, head_dim: int) -> Tensor:
        return torch.zeros(self._rows, self._columns, heads, head_dim, dtype=self._dtype, device=self._device)


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The ``sdpa`` attention of transformers, but decoding with grouped heads copies no keys and values.

    ``query``: [n, heads, tokens, head_dim]; ``key``, ``value``: [n, kv_heads, columns, head_dim]. With one query token,
    heads that share keys are computed as several query tokens of one head; the function of transformers repeats keys
    and values for each head instead. Returns [n, tokens, heads, head_dim].
    """
    n, heads, tokens, _ = query.shape
    same_for_all_heads = attention_mask is not None and attention_mask.shape[1:3] == (1, 1)
    if tokens > 1 or not same_for_all_heads or kwargs.get("position_bias") is not None:
        stock: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return stock
    kv_heads = key.shape[1]
    grouped = query.reshape(n, kv_heads, heads // kv_heads, -1)
    attended = nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return attended.reshape(n, 1, heads, -1), None


# With its mask function registered too, a model set to this implementation behaves as under `sdpa` elsewhere.
ATTENTION = "flexmarl_slots"
AttentionInterface.register(ATTENTION, slot_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()
