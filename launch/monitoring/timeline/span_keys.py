"""An index of spans by their attributes: a span's links are found without another look at the file of spans.

Each block of the file is read once, when a link is asked for first, and the last one again after it has grown. In
memory are ten bytes for each span and each set of attributes that it is compared by.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from .stored_spans import DAMAGED, Array, Block, StoredSpans

Attributes = tuple[str, ...]
"""The attributes in which two spans of a relation are equal."""


class _BlockKeys(NamedTuple):
    """``size``: spans of ``block`` that are in it. ``entries``: keys in ascending order, with their places in the
    block, by kind and attributes."""

    block: Block
    size: int
    entries: dict[tuple[str, Attributes], tuple[Array, Array]]


class SpanKeys:
    """``sets``: kinds, each with attributes that its spans are sought by."""

    def __init__(self, stored: StoredSpans, sets: Collection[tuple[str, Attributes]]) -> None:
        self._stored = stored
        self._sets: dict[str, list[Attributes]] = {}
        for kind, by in sets:
            self._sets.setdefault(kind, []).append(by)
        self._blocks: list[_BlockKeys] = []

    def refresh(self) -> None:
        """Takes the spans that ``stored`` has read since the last call."""
        del self._blocks[len(self._stored.blocks) :]
        for number, block in enumerate(self._stored.blocks):
            if number < len(self._blocks):
                newest = self._blocks[number]
                if newest.block is not block or newest.size != block.size:
                    self._blocks[number] = self._keys_of(number, block)
            else:
                self._blocks.append(self._keys_of(number, block))

    def find(self, kind: str, by: Attributes, keys: Array, begin_s: float, end_s: float) -> Iterator[int]:
        """The ids of the spans with one of ``keys`` (see ``StoredSpans.keys``) that overlap a window of time."""
        for number, (block, _, entries) in enumerate(self._blocks):
            if (kind, by) not in entries or block.first_s > end_s or block.last_s < begin_s:
                continue
            ascending, places = entries[kind, by]
            firsts = np.searchsorted(ascending, keys, side="left")
            ends = np.searchsorted(ascending, keys, side="right")
            for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
                hits = places[first:end].astype(np.intp)
                is_in = (block.begin[hits] <= end_s) & (block.end[hits] >= begin_s)
                yield from (self._stored.first_of(number) + hits[is_in]).tolist()

    def _keys_of(self, number: int, block: Block) -> _BlockKeys:
        stored, first = self._stored, self._stored.first_of(number)
        records = stored.records_of_block(number)
        is_whole = block.is_whole[: len(records)]
        kinds = np.full(len(records), -1)
        kinds[is_whole] = np.array([kind for _, kind in stored.rows])[block.row[: len(records)][is_whole]]
        entries: dict[tuple[str, Attributes], tuple[Array, Array]] = {}
        for kind, sets in self._sets.items():
            place = stored.kinds.index(kind) if kind in stored.kinds else DAMAGED
            places = np.flatnonzero(kinds == place)
            of_kind = records[places]
            for by in sets if len(places) else ():
                keys = stored.keys(first + places, of_kind, by)
                order = np.argsort(keys)
                entries[kind, by] = keys[order], places[order].astype("<u2")
        return _BlockKeys(block, block.size, entries)
