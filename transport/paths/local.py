"""Within one process, without a copy: the reader gets the tensors that were set.

They are aliases: the setter must not write to them while a reader needs their version. A trainer, whose optimizer
updates weights in place, sets by ``shm`` even for a reader in its own process.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import StaleHandle, TransportClosed
from ..handle import StateHandle
from ..select import Place
from ..workers import CopyWorkers
from . import buckets
from .tensor_kind import Tensors


@dataclass(frozen=True, slots=True)
class _Entry:
    generation: int
    version: int
    tensors: dict[str, Any]


class LocalPath:
    """Keeps the two newest versions of every key, as arenas do: a handle is stale on every path at the same time."""

    def __init__(self, place: Place, workers: CopyWorkers) -> None:
        self._place = place
        self._workers = workers
        self._entries: dict[str, list[_Entry]] = {}
        self._layouts: dict[str, buckets.Layout] = {}
        self._generation = 0
        self._closed = False

    async def put(self, key: str, tensors: Tensors, *, version: int) -> StateHandle:
        if self._closed:
            raise TransportClosed
        layout = self._layouts.get(key)
        if layout is None or not layout.fits(tensors):
            layout = self._layouts[key] = buckets.Layout.of(tensors)
        self._generation += 1
        entry = _Entry(self._generation, version, dict(tensors))
        self._entries[key] = [*self._entries.get(key, [])[-1:], entry]
        return StateHandle(
            key=key,
            version=version,
            path="local",
            host=self._place.host,
            process=self._place.process,
            location="",
            slot=0,
            generation=entry.generation,
            size_bytes=layout.size_bytes,
            digest=None,
            tensors=layout.specs,
        )

    async def fetch(self, handle: StateHandle, into: Mapping[str, Any] | None) -> dict[str, Any]:
        if self._closed:
            raise TransportClosed
        entries = self._entries.get(handle.key, [])
        entry = next((entry for entry in entries if entry.generation == handle.generation), None)
        if entry is None:
            raise StaleHandle(handle.key, handle.version, entries[-1].version if entries else None)
        if into is None:
            return dict(entry.tensors)
        kind, targets = buckets.destinations(handle.key, handle.tensors, into)
        sources = [kind.own(entry.tensors[spec.name]) for spec in handle.tensors]
        await self._workers.run(handle.size_bytes, functools.partial(buckets.copy, kind, targets, sources))
        return dict(into)

    async def close(self) -> None:
        self._closed = True
        self._entries.clear()
        self._layouts.clear()
