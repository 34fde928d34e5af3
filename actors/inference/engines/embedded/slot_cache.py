"""Keys and values of the sequences being decoded, one row each, and the attention that reads them in place.

Consecutive rows are the running sequences, always without gaps: when sequences finish, the last rows move into
their places (``move``). So decoding reads a plain slice, never a gathered copy. Token number p of a sequence
is at column p of its row. The buffers grow by doubling, up to the memory allowed, and are never freed; between two
growths nothing is allocated.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .prefix_tree import KeyValues

# Widths are multiples of it: memory-efficient attention on GPUs needs aligned masks.
COLUMN_STEP = 8
_FIRST_COLUMNS = 64
_FIRST_ROWS = 8

# Of a layer: all cells of keys and of values; then both as attended to, [rows, kv_heads, columns, head_dim].
_LayerView = tuple[Tensor, Tensor, Tensor, Tensor]


class SlotCache(Cache):
    """The cache of a whole model, for at most ``max_rows`` sequences of ``max_columns`` tokens.

    ``prefill``, ``extend`` or ``decode`` sets the rows of the following forwards; then every layer calls ``update``. To
    the model it looks like an empty cache, for which the masks of prompts are made. ``max_bytes``: of the buffers, as
    long as what ``reserve`` is asked for fits.
    """

    def __init__(
        self,
        max_rows: int,
        max_columns: int,
        dtype: torch.dtype,
        device: torch.device,
        max_bytes: int | None = None,
        routes: tuple[tuple[int, int], torch.dtype] | None = None,
    ) -> None:
        """``routes``: shape and type of the routes of a token, which lie beside its keys and values."""
        super().__init__(layers=[])
        self._limits = max_rows, round_up(max_columns)
        self._max_bytes = max_bytes
        self.dtype = dtype
        self.device = device
        self._rows = self._columns = 0
        # per layer [rows, columns, kv_heads, head_dim], made by the first prefill
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._routes: list[Tensor] = []  # one, [rows, columns, layers, experts], if routes are recorded
        self._route = routes
        self._first = self._prefilled = 0  # the row that prefilling starts at, and the number of rows
        # int64 [n * tokens], the cells of the next tokens; None: they are whole prompts, from column 0 on
        self._cells: Tensor | None = None
        self._views: list[_LayerView] = []
        self._decode_views: list[_LayerView] = []

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the allocated rows have room for."""
        return self._rows * self._columns

    @property
    def token_bytes(self) -> int:
        """Memory of one token, all layers; 0 before the first prefill."""
        return sum(buffer[0, 0].nbytes for buffer in self._buffers)

    @property
    def _buffers(self) -> tuple[Tensor, ...]:
        return (*self._keys, *self._values, *self._routes)

    @property
    def row_columns(self) -> int:
        """Cells between two rows, c: token p of row r belongs in cell r * c + p."""
        return self._columns

    def prefill(self, first: int, rows: int, columns: int) -> None:
        """Prepares a forward of ``rows`` new rows from ``first`` on, of up to ``columns`` tokens each."""
        self.reserve(first + rows, columns)
        self._first, self._prefilled = first, rows
        self._cells = None

    def extend(self, first: int, rows: int, columns: int, cells: Tensor) -> None:
        """Prepares a forward of several tokens each of ``rows`` rows from ``first`` on, behind those in the cache.

        They attend to ``columns``. ``cells``: int64 [rows * tokens], their cells (see ``row_columns``), which must have
        been reserved.
        """
        self._views = self._views_of(first, rows, columns)
        self._cells = cells

    def decode(self, rows: int, columns: int, first: int = 0) -> int:
        """Prepares forwards of one token of each of ``rows`` rows from ``first`` on, which attend to ``columns``.

        Before each one, ``write_to`` sets the cells. Others may come between them. Returns ``row_columns``.
        """
        self.reserve(first + rows, columns)
        self._decode_views = self._views_of(first, rows, columns)
        return self._columns

    def _views_of(self, first: int, rows: int, columns: int) -> list[_LayerView]:
        return [
            (
                keys.flatten(0, 1),
                values.flatten(0, 1),
                keys[first : first + rows, :columns].transpose(1, 2),
                values[first : first + rows, :columns].transpose(1, 2),
            )
            for keys, values in zip(self._keys, self._values, strict=True)
        ]

    def write_to(self, cells: Tensor) -> None:
        """Sets the cells of the next decoding forward's tokens: int64 [rows]."""
        self._views = self._decode_views
        self._cells = cells

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores new keys and values ([batch, kv_heads, tokens, head_dim]); returns those to attend to."""
        if self._cells is None:
            self._store_prompts(key_states, value_states, layer_idx)
            return key_states, value_states
        keys, values = (states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states))
        return self.append(layer_idx, keys, values)

    def append(self, layer: int, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        """``update`` with one line per cell: [n * tokens, kv_heads, head_dim]."""
        assert self._cells is not None
        key_cells, value_cells, keys, values = self._views[layer]
        key_cells.index_copy_(0, self._cells, new_keys)
        value_cells.index_copy_(0, self._cells, new_values)
        return keys, values

    def _store_prompts(self, key_states: Tensor, value_states: Tensor, layer: int) -> None:
        rows = slice(self._first, self._first + key_states.shape[0])
        for buffers, states in ((self._keys, key_states), (self._values, value_states)):
            if layer == len(buffers):
                buffers.append(self._buffer(states.shape[1], states.shape[3], self.dtype))
            buffers[layer][rows, : states.shape[2]] = states.transpose(1, 2)

    def store_routes(self, routes: Tensor) -> None:
        """Stores the routes of the forward that has just been computed: ``[n * tokens, layers, experts]``, row by
        row."""
        if not self._routes:
            assert self._route is not None, "routes are recorded"
            (layers, experts), dtype = self._route
            self._routes.append(self._buffer(layers, experts, dtype))
        (buffer,) = self._routes
        if self._cells is not None:
            buffer.flatten(0, 1).index_copy_(0, self._cells, routes)
            return
        by_row = routes.view(self._prefilled, -1, *routes.shape[1:])
        buffer[self._first : self._first + self._prefilled, : by_row.shape[1]] = by_row

    def routes_of(self, row: int, tokens: int) -> Tensor | None:
        """The routes of the first ``tokens`` tokens of a row, ``[tokens, layers, experts]``; None if they are not
        recorded."""
        return self._routes[0][row, :tokens] if self._routes else None

    def copy_of(self, row: int, start: int, end: int) -> KeyValues:
        """All that the cache has of the columns ``start`` to ``end`` of a row."""
        return [buffer[row, start:end].clone() for buffer in self._buffers]

    def put(self, row: int, pieces: Iterable[KeyValues]) -> None:
        """Writes consecutive pieces, each as ``copy_of`` returns it, from column 0 of a row on; they are reserved."""
        column = 0
        for states in pieces:
            end = column + len(states[0])
            for buffer, state in zip(self._buffers, states, strict=True):
                buffer[row, column:end] = state
            column = end

    def move(self, sources: list[int], targets: list[int], columns: int) -> None:
        """Copies the first ``columns`` columns of row ``sources[i]`` to row ``targets[i]``."""
        come_from = torch.tensor(sources, device=self.device)
        go_to = torch.tensor(targets, device=self.device)
        for buffer in self._buffers:
            used = buffer[:, :columns]
            used.index_copy_(0, go_to, used.index_select(0, come_from))

    def clear(self) -> None:
        """Fills the cache with zeros: masked cells are multiplied too, so a NaN from broken weights would stay."""
        for buffer in self._buffers:
            buffer.zero_()

    def shape_for(self, rows: int, columns: int) -> tuple[int, int]:
        """The rows and columns that the buffers will have after ``reserve``."""
        if rows <= self._rows and columns <= self._columns:
            return self._rows, self._columns
        most_rows, most_columns = self._limits
        more_rows = min(_power_of_two(max(rows, _FIRST_ROWS)), most_rows)
        more_columns = min(_power_of_two(max(columns, _FIRST_COLUMNS)), most_columns)
        shape = max(more_rows, self._rows), max(more_columns, self._columns)
        if self._max_bytes is None:
            return shape
        if not self.token_bytes:
            return rows, round_up(columns)
        allowed = self._max_bytes // self.token_bytes
        if shape[0] * shape[1] <= allowed:
            return shape
        # no row more than needed, and as many columns as the memory allows
        return rows, max(min(more_columns, allowed // rows // COLUMN_STEP * COLUMN_STEP), round_up(columns))

    def reserve(self, rows: int, columns: int) -> None:
        """Makes room for ``rows`` rows of ``columns`` columns; what is outside of them may be lost."""
        kept_rows, kept_columns = self._rows, self._columns
        shape = self._rows, self._columns = self.shape_for(rows, columns)
        if shape == (kept_rows, kept_columns):
            return
        kept = slice(min(kept_rows, self._rows)), slice(min(kept_columns, self._columns))
        for buffers in (self._keys, self._values, self._routes):
            for number, old in enumerate(buffers):
                buffers[number] = self._buffer(old.shape[2], old.shape[3], old.dtype)
                buffers[number][kept] = old[kept]

    def _buffer(self, lines: int, numbers: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self._rows, self._columns, lines, numbers, dtype=dtype, device=self.device)


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


def round_up(columns: int) -> int:
    """The next multiple of ``COLUMN_STEP``."""
    return -(-columns // COLUMN_STEP) * COLUMN_STEP


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()
