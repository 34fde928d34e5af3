"""Between processes of one host: a memory-mapped arena per key (``arena.py`` has the rules of reading).

The writer copies its tensors into one slot, the reader copies them into its own tensors; neither waits for the other.
Tensors may be on any device: the slot stages them.
"""

import asyncio
import functools
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import lent_files
from ..arena import Arena
from ..errors import ArenaSpace, CorruptState, ForeignHandle, StaleHandle, TransportClosed
from ..handle import LentMemory, StateHandle, TensorSpec
from ..select import Place
from ..workers import CopyWorkers
from . import buckets
from .tensor_kind import T, TensorKind, Tensors


class _Mapped:
    """An arena with tensors as views of its bytes. The views are made once per slot and layout."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._views: dict[int, tuple[TensorKind[Any], Sequence[TensorSpec], list[Any]]] = {}

    def views(self, kind: TensorKind[T], slot: int, specs: Sequence[TensorSpec]) -> list[T]:
        known = self._views.get(slot)
        if known is None or known[0] is not kind or (known[1] is not specs and known[1] != specs):
            flat = kind.flat(self.arena.memory)
            known = kind, specs, buckets.bucket_views(kind, flat, self.arena.offset(slot), specs)
            self._views[slot] = known
        return known[2]

    def bucket(self, slot: int, specs: Sequence[TensorSpec], size_bytes: int) -> buckets.Bucket:
        start = self.arena.offset(slot)
        return buckets.Bucket(memoryview(self.arena.memory)[start : start + size_bytes], specs)


class _Written:
    """The arenas of one key that this process sets."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = asyncio.Lock()
        self.layout: buckets.Layout | None = None
        self.arenas: list[_Mapped] = []  # the last is in use; the others are too small now
        self.arenas_made = 0
        self.slot = 0


class ShmPath:
    """Arenas in ``runtime_dir``, the run's directory on tmpfs.

    ``close`` removes the files of this process; those of a killed process stay until the directory is removed. The
    arena of a key is made at its first ``put``, and a larger one when a bucket does not fit any more.
    """

    def __init__(self, place: Place, directory: Path, workers: CopyWorkers) -> None:
        self._place = place
        self._directory = directory
        self._workers = workers
        self._written: dict[str, _Written] = {}
        self._mapped: dict[str, _Mapped] = {}
        self._lent: dict[str, Arena] = {}
        self._arenas_lent = 0
        self._closed = False

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arenas that this process has made and not removed."""
        written = (mapped.arena for written in self._written.values() for mapped in written.arenas)
        return sum(len(arena.memory) for arena in (*written, *self._lent.values()))

    # ----------------------------------------------------------------------- writing

    async def put(self, key: str, tensors: Tensors, *, version: int) -> StateHandle:
        written = self._written.get(key)
        if written is None:
            written = self._written[key] = _Written(len(self._written))
        async with written.lock:
            if self._closed:
                raise TransportClosed
            layout = written.layout
            if layout is None or not layout.fits(tensors):
                layout = written.layout = buckets.Layout.of(tensors)
            work = functools.partial(self._write, key, written, layout, list(tensors.values()), version)
            return await self._workers.run(layout.size_bytes, work)

    def _write(
        self,
        key: str,
        written: _Written,
        layout: buckets.Layout,
        sources: list[Any],
        version: int,
        stop: threading.Event,
    ) -> StateHandle:
        if not written.arenas or written.arenas[-1].arena.slot_bytes < layout.size_bytes:
            self._add_arena(key, written, layout.size_bytes)
        slot = written.slot
        handle = self._fill(
            written.arenas[-1], slot, self._place.process, key, layout, sources, version, stop
        )
        # Only now: after an unfinished write the next one takes the same slot, and readers keep the other slot.
        written.slot = 1 - slot
        for outgrown in written.arenas[:-1]:
            del self._mapped[outgrown.arena.name]
            outgrown.arena.unlink()
        del written.arenas[:-1]
        return handle

    def _fill(
        self,
        mapped: _Mapped,
        slot: int,
        process: str,
        key: str,
        layout: buckets.Layout,
        sources: list[Any],
        version: int,
        stop: threading.Event,
    ) -> StateHandle:
        """Writes ``slot`` of an arena that ``process`` owns."""
        arena = mapped.arena
        arena.begin(slot, version)
        bucket = mapped.bucket(slot, layout.specs, layout.size_bytes)
        buckets.copy(layout.kind, mapped.views(layout.kind, slot, layout.specs), sources, stop, bucket)
        digest = bucket.digest()
        generation = arena.commit(slot)
        return StateHandle(
            key=key,
            version=version,
            path="shm",
            host=self._place.host,
            process=process,
            location=arena.name,
            slot=slot,
            generation=generation,
            size_bytes=layout.size_bytes,
            digest=digest,
            tensors=layout.specs,
        )

    def _add_arena(self, key: str, written: _Written, size_bytes: int) -> None:
        # The key makes the name readable; process, number and count make it unique.
        name = f"{self._place.process}-{written.number}-{_readable(key)}-{written.arenas_made}.arena"
        mapped = _Mapped(Arena.create(self._directory, name, size_bytes))
        written.arenas_made += 1
        written.arenas.append(mapped)
        self._mapped[name] = mapped

    # ----------------------------------------------------------------------- lending

    async def lend(self, key: str, size_bytes: int) -> tuple[LentMemory, LentMemory]:
        """Makes an arena for other processes to fill. Its memory is reserved by a thread: that takes a while."""
        self._arenas_lent += 1
        name = f"{self._place.process}-lent-{_readable(key)}-{self._arenas_lent}.arena"
        arena = await self._workers.run(size_bytes, lambda _: Arena.create(self._directory, name, size_bytes))
        return self._now_lent(arena)

    def _now_lent(self, arena: Arena) -> tuple[LentMemory, LentMemory]:
        self._lent[arena.name] = arena
        first = LentMemory(self._place.process, arena.name, 0, arena.slot_bytes)
        return first, replace(first, slot=1)

    async def store_away(self, lent: LentMemory, slots: Sequence[int], file: Path) -> None:
        """See ``StateTransport.store_away``."""
        arena = self._lent[lent.location]
        await self._workers.run(len(arena.memory), lambda stop: lent_files.write(arena, slots, file, stop))
        self.take_back(lent.location)

    async def bring_back(
        self, lent: LentMemory, slots: Sequence[int], file: Path
    ) -> tuple[LentMemory, LentMemory]:
        """See ``StateTransport.bring_back``."""
        self._arenas_lent += 1
        name = f"{self._place.process}-lent-{_readable(file.stem)}-{self._arenas_lent}.arena"

        def work(stop: threading.Event) -> Arena:
            arena = Arena.create(self._directory, name, lent.size_bytes)
            try:
                lent_files.read(file, slots, arena, stop)
            except BaseException:
                arena.unlink()
                raise
            file.unlink()
            return arena

        return self._now_lent(await self._workers.run(2 * lent.size_bytes, work))

    def take_back(self, location: str) -> None:
        """Removes an arena that was lent. Processes that have mapped it keep its memory until they forget it."""
        self._lent.pop(location).unlink()

    async def put_lent(self, key: str, tensors: Tensors, lent: LentMemory, *, version: int) -> StateHandle:
        """As ``put``, into memory of another process. Raises ArenaSpace if it is too small."""
        layout = buckets.Layout.of(tensors)
        if layout.size_bytes > lent.size_bytes:
            raise ArenaSpace(layout.size_bytes, lent.size_bytes, f"{self._directory / lent.location}")

        def work(stop: threading.Event) -> StateHandle:
            mapped = self._mapped_at(lent.location)
            if mapped.arena.slot_bytes != lent.size_bytes:
                raise ForeignHandle(lent.location, str(self._directory), "it is not as large as it was lent")
            sources = list(tensors.values())
            return self._fill(mapped, lent.slot, lent.process, key, layout, sources, version, stop)

        return await self._workers.run(layout.size_bytes, work)

    # ----------------------------------------------------------------------- reading

    async def fetch(self, handle: StateHandle, into: Mapping[str, Any] | None) -> dict[str, Any]:
        return await self._workers.run(handle.size_bytes, functools.partial(self._read, handle, into))

    def _read(
        self, handle: StateHandle, into: Mapping[str, Any] | None, stop: threading.Event
    ) -> dict[str, Any]:
        mapped = self._map(handle)
        arena, slot = mapped.arena, handle.slot
        if handle.size_bytes > arena.slot_bytes:
            reason = f"a bucket of {handle.size_bytes} bytes can't be in a slot of {arena.slot_bytes}"
            raise ForeignHandle(handle.location, str(self._directory), reason)
        kind, targets = buckets.destinations(handle.key, handle.tensors, into)
        self._check_generation(arena, handle)
        bucket = mapped.bucket(slot, handle.tensors, handle.size_bytes)
        buckets.copy(kind, targets, mapped.views(kind, slot, handle.tensors), stop, bucket)
        digest = bucket.digest()
        self._check_generation(arena, handle)
        if digest != handle.digest:
            raise CorruptState(handle.key, handle.version, handle.digest, digest)
        return {spec.name: target for spec, target in zip(handle.tensors, targets, strict=True)}

    def _check_generation(self, arena: Arena, handle: StateHandle) -> None:
        if arena.generation(handle.slot) != handle.generation:
            raise StaleHandle(handle.key, handle.version, arena.version(handle.slot))

    def _map(self, handle: StateHandle) -> _Mapped:
        try:
            return self._mapped_at(handle.location)
        except FileNotFoundError as error:
            raise StaleHandle(handle.key, handle.version, None) from error

    def _mapped_at(self, location: str) -> _Mapped:
        """Raises FileNotFoundError, ForeignHandle."""
        mapped = self._mapped.get(location)
        if mapped is not None:
            return mapped
        mapped = _Mapped(Arena.open(self._directory, location))
        # A new arena often replaces one that its owner has removed, and whose memory is freed with its last mapping.
        for name in list(self._mapped):  # a list: other copy threads change the dict
            if not (self._directory / name).exists():
                self._mapped.pop(name, None)
        self._mapped[location] = mapped
        return mapped

    async def close(self) -> None:
        """To be called after the workers have ended."""
        self._closed = True
        for written in self._written.values():
            for mapped in written.arenas:
                mapped.arena.unlink()
            written.arenas.clear()
        for arena in self._lent.values():
            arena.unlink()
        self._lent.clear()
        self._mapped.clear()


def _readable(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", key)[:48]
