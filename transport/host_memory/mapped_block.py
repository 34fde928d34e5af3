"""A block of host memory with tensors as views of its bytes, pinned while devices copy from it or to it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .. import payload
from ..handle import TensorSpec
from ..tensors.tensor_kind import T, TensorKind
from .block import Block

Pin = Callable[[int, int], Callable[[], None]]
"""Pins memory of that address and size; returns the function that undoes it."""


class MappedBlock:
    """The views are made once per layout. ``pin``: for memory that another process has made; None: its pages are not
    pinned here, or its maker, this process, has pinned them."""

    def __init__(self, block: Block, pin: Pin | None = None) -> None:
        self.block = block
        self._views: tuple[TensorKind[Any], Sequence[TensorSpec], list[Any]] | None = None
        self._pin = pin
        self._unpin: Callable[[], None] | None = None
        self._copies = 0
        self._lock = threading.Lock()

    def views(self, kind: TensorKind[T], specs: Sequence[TensorSpec]) -> list[T]:
        """Views of its payload."""
        entry = self._views
        if entry is None or entry[0] is not kind or (entry[1] is not specs and entry[1] != specs):
            flat = kind.flat(self.block.memory)
            entry = self._views = kind, specs, payload.make_views(kind, flat, Block.START, specs)
        return entry[2]

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Pins the memory if it is not, until ``forget``: pinning takes longer than a copy, and a block is copied again
        and again. May be called by several threads."""
        with self._lock:
            if self._pin is not None and self._unpin is None:
                self._unpin = self._pin(self.block.address, len(self.block.memory))
            self._copies += 1
        try:
            yield
        finally:
            with self._lock:
                self._copies -= 1
            self._undo_pinning()

    def forget(self) -> None:
        """It is used no more: its memory is pinned no longer, from the end of the last copy on."""
        # Before the mapping ends: a device must not find pages of something else behind addresses that it knows.
        with self._lock:
            self._pin = None
        self._undo_pinning()

    def _undo_pinning(self) -> None:
        with self._lock:
            if self._pin is not None or self._copies or self._unpin is None:
                return
            unpin, self._unpin = self._unpin, None
        unpin()
