"""Memory that one process has written for a key."""

import asyncio
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from .payload import Layout

M = TypeVar("M")


class VersionedMemory(Generic[M]):
    """The pieces of memory that this process sets one key in, each for a whole version. ``lock``: held by a Set.

    ``published``: those of the two newest versions, the older one first. ``free``: neither written nor to be read.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.published: list[M] = []
        self.free: list[M] = []
        self._layout: Layout | None = None

    def layout_of(self, tensors: Mapping[str, Any]) -> Layout:
        """The layout of the last Set, if the tensors have it. Raises TypeError for a tensor that can't travel."""
        if self._layout is None or not self._layout.fits(tensors):
            self._layout = Layout.of(tensors)
        return self._layout

    def candidates(self) -> list[M]:
        """Memory for the next version: readers keep the newest one meanwhile."""
        return [*self.free, *self.published[:-1]]

    def take(self, memory: M) -> None:
        """The next version is written there: it is in no list until then."""
        (self.free if memory in self.free else self.published).remove(memory)

    def failed(self, memory: M) -> None:
        """Nothing was published there."""
        self.free.insert(0, memory)

    def publish(self, memory: M) -> list[M]:
        """The newest version lies there; returns the memory that is of no more use."""
        self.published.append(memory)
        outdated = [*self.published[:-2], *self.free]
        del self.published[:-2]
        self.free.clear()
        return outdated

    def all(self) -> list[M]:
        return [*self.published, *self.free]
