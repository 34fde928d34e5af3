"""The memory for keys and values: rows of the running sequences, and beside them what earlier ones left."""

from collections.abc import Sequence

import torch

from .forward import Forward
from .prefix_tree import Prefix, PrefixTree
from .prompt_batch import PromptBatch, PromptPart
from .slot_cache import COLUMN_STEP, SlotCache

# Fewer tokens are computed about as fast as their keys and values are found and copied.
REUSE_TOKENS = 16


class KeyValueMemory:
    """At most ``tokens`` tokens: the rows of ``cache``, which come first, and kept prompts and answers."""

    def __init__(self, cache: SlotCache, forward: Forward, max_bytes: int, keeps: bool) -> None:
        """``keeps``: prefixes are kept. ``forward`` computes a token: it makes the cache's buffers and shows their
        size."""
        with torch.inference_mode():
            forward.prefill(cache, PromptBatch.of([PromptPart((0,))], cache, 0))
            cache.clear()
        self.cache = cache
        self.tokens = max_bytes // cache.token_bytes // COLUMN_STEP * COLUMN_STEP
        self._tree = PrefixTree(self.tokens) if keeps else None

    @property
    def kept_tokens(self) -> int:
        """Tokens of earlier prompts and answers in memory, beside the running rows; 0 if nothing is to be kept."""
        return 0 if self._tree is None else self._tree.tokens

    def reserve(self, rows: int, columns: int) -> None:
        """Makes room for ``rows`` rows of ``columns`` columns; kept prefixes are evicted for it."""
        if self._tree is not None:
            planned_rows, planned_columns = self.cache.shape_for(rows, columns)
            self._tree.limit(self.tokens - planned_rows * planned_columns)
        self.cache.reserve(rows, columns)

    def known_prefix(self, prompt: tuple[int, ...]) -> Prefix:
        """The beginning of ``prompt`` whose keys and values are kept, without its last token: it gives the logits."""
        if self._tree is None or len(prompt) <= REUSE_TOKENS:
            return Prefix()
        prefix = self._tree.match(prompt[:-1])
        return prefix if prefix.tokens >= REUSE_TOKENS else Prefix()

    def keep(self, row: int, tokens: Sequence[int]) -> None:
        """Keeps the keys and values of ``tokens``, the first ones of a row, as long as there is memory."""
        if self._tree is not None and len(tokens) >= REUSE_TOKENS:
            self._tree.insert(tuple(tokens), lambda start, end: self.cache.copy_of(row, start, end))

    @torch.inference_mode()
    def forget(self, were_finite: bool) -> None:
        """Drops all keys and values: they are of other weights.

        ``were_finite``: none of them was infinite or not a number, so that masked cells do no harm and may stay.
        """
        if self._tree is not None:
            self._tree.clear()
        if not were_finite:
            self.cache.clear()
