"""Within one process, without a copy: the reader gets the tensors that were set.

They are aliases: the setter must not write to them while a reader needs their version. A trainer, whose optimizer
updates weights in place, sets by ``shm`` even for a reader in its own process.
"""

import functools
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import StaleHandle, TransportClosed
from ..handle import LocalSource, TensorSpec
from ..select import Place
from ..workers import CopyWorkers
from . import buckets
from .kinds import kind_of
from .tensor_kind import TensorKind, Tensors
from .transfer_path import Offered, Wanted


@dataclass(frozen=True, slots=True)
class _Entry:
    generation: int
    version: int
    tensors: dict[str, Any]


class LocalPath:
    """Keeps the two newest versions of every key, as shared memory does: a handle is stale on every path at the same
    time."""

    def __init__(self, place: Place, workers: CopyWorkers) -> None:
        self._place = place
        self._workers = workers
        self._entries: dict[str, list[_Entry]] = {}
        self._layouts: dict[str, buckets.Layout] = {}
        self._generation = 0
        self._closed = False

    async def offer(self, key: str, tensors: Tensors, *, version: int) -> Offered:
        if self._closed:
            raise TransportClosed
        layout = self._layouts.get(key)
        if layout is None or not layout.fits(tensors):
            layout = self._layouts[key] = buckets.Layout.of(tensors)
        self._generation += 1
        entry = _Entry(self._generation, version, dict(tensors))
        self._entries[key] = [*self._entries.get(key, [])[-1:], entry]
        source = LocalSource("local", self._place.node, self._place.process, entry.generation)
        return Offered(source, layout.specs, layout.size_bytes, None)

    async def fetch(self, wanted: Wanted[LocalSource], into: Mapping[str, Any] | None) -> dict[str, Any]:
        if self._closed:
            raise TransportClosed
        handle = wanted.handle
        entries = self._entries.get(handle.key, [])
        entry = next((one for one in entries if one.generation == wanted.source.generation), None)
        if entry is None:
            raise StaleHandle(handle.key, handle.version, entries[-1].version if entries else None)
        there = entry.tensors
        given = kind_of(there.values())
        whole = {spec.name: spec.shape for spec in handle.tensors}
        tensors = {
            spec.name: there[spec.name]
            if spec.shape == whole[spec.name]
            else _rows(given, there[spec.name], spec, handle.tensors)
            for spec in wanted.tensors
        }
        if into is None:
            return tensors
        kind, targets = buckets.destinations(handle.key, wanted.tensors, into)
        sources = [kind.own(tensor) for tensor in tensors.values()]
        copying = buckets.Copying(kind, targets, sources, wanted.tensors, handle.size_bytes)
        await self._workers.run(wanted.size_bytes, functools.partial(self._copy, copying))
        return dict(into)

    @asynccontextmanager
    async def view(self, wanted: Wanted[LocalSource], *, checked: bool) -> AsyncIterator[dict[str, Any]]:
        """The tensors that were set: there are no digests."""
        yield await self.fetch(wanted, None)

    def _copy(self, copying: buckets.Copying, stop: threading.Event) -> None:
        def one(index: int) -> None:
            if stop.is_set():
                raise TransportClosed
            copying.copy(copying.parts[index])

        self._workers.share(len(copying.parts), one)

    async def drop(self, key: str) -> None:
        self._entries.pop(key, None)
        self._layouts.pop(key, None)

    async def close(self) -> None:
        self._closed = True
        self._entries.clear()
        self._layouts.clear()


def _rows(kind: TensorKind[Any], tensor: Any, part: TensorSpec, specs: tuple[TensorSpec, ...]) -> Any:
    """The rows of ``tensor`` that ``part`` has, a view."""
    whole = next(spec for spec in specs if spec.name == part.name)
    row_bytes = whole.size_bytes // whole.shape[0]
    start = (part.offset - whole.offset) // row_bytes if row_bytes else 0
    return kind.rows(tensor, start, start + part.shape[0])
