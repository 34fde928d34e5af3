"""The segments (``segments/segments.py``) of all tables: their writers, and which of their bytes rows refer to.

    grant --> the writer fills it, its rows are accepted (check, hold) --> seal --> release of the last row: removed

Rules:
- a segment belongs to one writer until it is sealed; only that writer may put references into it;
- every row counts each of its references: ``hold`` when it comes, ``release`` when it ends; two rows may share bytes;
- a sealed segment without references is removed at once. So ``release`` comes after the journal has the record that
  the rows have ended, never before;
- segments are made in memory up to its limit, then on the disk; if there is no room there either, they are refused.

Segments are files, and outlive the process: ``recover`` removes those that the journal does not know.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import add, itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ...core.telemetry import get_logger
from ..errors import ProtocolViolation, StoreError, StoreFull
from ..segments.reader import SegmentReader
from ..segments.segments import (
    ByteRef,
    Medium,
    SegmentDirectories,
    SegmentGrant,
    WriterMemory,
    create,
    is_remote,
    is_segment_name,
    new_name,
    place_of,
    remove,
)

__all__ = ["ArenaLimits", "ArenaStatistics", "ByteRef", "SegmentArena", "SegmentDirectories", "SegmentGrant"]

log = get_logger(__name__)

Ref = tuple[str, int, int, *tuple[Any, ...]]
"""Segment, offset, size in bytes, and perhaps more: a ByteRef, or a ValueRef."""

_PAGE_BYTES: Final = 4096
_NO_SIZES: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ArenaLimits:
    """``memory_bytes`` and ``disk_bytes``: of all segments in tmpfs and on disk. ``segment_bytes``: the room that a
    writer gets at once; more for a larger group. ``disk_free_bytes``: left free on the disk by segments, for the
    journal above all. A run's config has the first two alone: the author of a run has nothing to
    choose the others by."""

    segment_bytes: int = 64 * 2**20
    memory_bytes: int = 2**30
    disk_bytes: int = 2**40
    disk_free_bytes: int = 256 * 2**20

    def of(self, medium: Medium) -> int:
        """The limit of all segments in that medium, in bytes."""
        return self.memory_bytes if medium is Medium.MEMORY else self.disk_bytes


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """``memory_bytes`` and ``disk_bytes``: of whole segments. ``live_bytes``: of the references of rows, once
    per row."""

    segments: int
    granted: int
    memory_bytes: int
    disk_bytes: int
    live_refs: int
    live_bytes: int


class _Segment:
    """``writer``: None once it is sealed. ``live_refs`` includes references of zero bytes."""

    __slots__ = ("live_bytes", "live_refs", "size_bytes", "writer")

    def __init__(self, size_bytes: int, writer: str | None) -> None:
        self.size_bytes = size_bytes
        self.writer = writer
        self.live_refs = 0
        self.live_bytes = 0


class SegmentArena:
    """One store's segments. The store owns both directories: no two stores may share them."""

    def __init__(self, directories: SegmentDirectories, limits: ArenaLimits) -> None:
        """Makes the directories that are missing. Raises UnsafeDirectory if one is open to other users."""
        for directory in (directories.memory, directories.disk):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directories = directories
        self.limits = limits
        self._reader = SegmentReader(directories)
        self._segments: dict[str, _Segment] = {}
        self._used = dict.fromkeys(Medium, 0)
        self._full_logged = False

    def granted(self) -> dict[str, str]:
        """The segments that are not sealed: writer by segment."""
        return {
            name: segment.writer for name, segment in self._segments.items() if segment.writer is not None
        }

    def recover(
        self, granted: Mapping[str, str], live: Iterable[Ref], far_sizes: Mapping[str, int] = _NO_SIZES
    ) -> set[str]:
        """Restores the state of the journal, once, before anything else. ``granted``: the writers of segments that were
        not sealed; ``live``: the references of all rows. Every other segment is removed. ``far_sizes``: in bytes, of
        granted segments on other hosts, whose writers continue to fill them.

        Returns the segments that rows refer to and that are gone or too short (after the machine has restarted: memory
        is empty then). None of their references is held; their rows are lost.
        """
        ends: dict[str, int] = {}
        counted: dict[str, _Segment] = {}
        for segment, offsets, sizes in _by_segment(live):
            found = counted.get(segment)
            if found is None:
                found = counted[segment] = _Segment(0, None)
            found.live_refs += len(sizes)
            found.live_bytes += sum(sizes)
            ends[segment] = max(ends.get(segment, 0), *map(add, offsets, sizes))
        for name in counted.keys() | granted.keys():
            if is_remote(name):  # its memory goes with its writer: see ``retire``
                far = counted.get(name) or _Segment(0, None)
                far.size_bytes, far.writer = max(ends.get(name, 0), far_sizes.get(name, 0)), granted.get(name)
                self._segments[name] = far
        for medium in Medium:
            for path in self.directories.directory(medium).iterdir():
                self._recover_file(medium, path, granted.get(path.name), counted, ends.get(path.name, 0))
        return counted.keys() - self._segments.keys()

    def _recover_file(
        self, medium: Medium, path: Path, writer: str | None, counted: Mapping[str, _Segment], end: int
    ) -> None:
        name = path.name
        if not is_segment_name(name) or self.directories.path(name) != path:
            return
        size_bytes = path.lstat().st_size
        if (name in counted or writer is not None) and end <= size_bytes:
            segment = counted.get(name) or _Segment(0, None)
            segment.size_bytes, segment.writer = size_bytes, writer
            self._segments[name] = segment
            self._used[medium] += size_bytes
        else:
            remove(self.directories, name)

    def grant(self, writer: str, at_least_bytes: int = 0, memory: WriterMemory | None = None) -> SegmentGrant:
        """Makes a segment for ``writer``: of the usual size, or larger if a batch needs it. With ``memory``, of the
        writer's own node, the writer makes it there.

        Raises StoreFull if there is no room now, StoreError if there never is.
        """
        size_bytes = max(self.limits.segment_bytes, -(-at_least_bytes // _PAGE_BYTES) * _PAGE_BYTES)
        if memory is not None:
            return self._grant_far(writer, size_bytes, memory)
        largest = max(self.limits.memory_bytes, self.limits.disk_bytes)
        if size_bytes > largest:
            raise StoreError(
                f"{writer} asks for {size_bytes} bytes at once; the store may have {largest} in all"
            )
        problems = []
        over_limits = 0
        for medium in Medium:
            problem = self._over_limit(medium, size_bytes)
            over_limits += problem is not None
            if problem is None:
                problem = self._too_little_left(medium, size_bytes)
            if problem is None:
                try:
                    name = create(self.directories, medium, size_bytes)
                except OSError as error:
                    if error.errno not in StoreFull.ERRNOS:
                        raise
                    problem = f"{self.directories.directory(medium)}: {error.strerror}"
                else:
                    return self._grant(name, medium, size_bytes, writer)
            problems.append(problem)
        text = "; ".join(problems)
        if not self._full_logged:
            log.warning(
                "store full: writers wait until rows are consumed", needed_bytes=size_bytes, problem=text
            )
            self._full_logged = True
        own = over_limits == len(Medium)
        raise StoreFull(self.directories.disk, size_bytes, text, by_its_own_limits=own)

    def _grant_far(self, writer: str, size_bytes: int, memory: WriterMemory) -> SegmentGrant:
        """The limit of memory is that of each other host too."""
        if memory.place.rpartition("/")[2] != writer:
            raise StoreError(
                f"{writer} is on another host than the store, where its samples can't be fetched: "
                "set network.listen, so that the actors of the run reach one another"
            )
        limit, host = self.limits.memory_bytes, _host_of(memory.place)
        if size_bytes > limit:
            raise StoreError(
                f"{writer} asks for {size_bytes} bytes at once; its host may have {limit} in all"
            )
        used = sum(one.size_bytes for name, one in self._segments.items() if _host_of(name) == host)
        if used + size_bytes > limit:
            problem = f"{used} of {limit} bytes are used in the memory of {host}"
            raise StoreFull(self.directories.memory, size_bytes, problem, by_its_own_limits=True)
        name = new_name(Medium.MEMORY, memory.place)
        self._segments[name] = _Segment(size_bytes, writer)
        return SegmentGrant(name, size_bytes, [held for held in memory.held if held not in self._segments])

    def of_writer(self, writer: str) -> set[str]:
        """The segments in memory of that writer's own node."""
        return {name for name in self._segments if writer_of(name) == writer}

    def _grant(self, name: str, medium: Medium, size_bytes: int, writer: str) -> SegmentGrant:
        self._segments[name] = _Segment(size_bytes, writer)
        self._used[medium] += size_bytes
        self._full_logged = False
        return SegmentGrant(name, size_bytes)

    def _over_limit(self, medium: Medium, size_bytes: int) -> str | None:
        """The problem if a segment of this size exceeds the limit of the medium; None if it does not."""
        limit = self.limits.of(medium)
        if self._used[medium] + size_bytes > limit:
            return f"{self._used[medium]} of {limit} bytes are used in {self.directories.directory(medium)}"
        return None

    def _too_little_left(self, medium: Medium, size_bytes: int) -> str | None:
        """The problem if a segment of this size leaves too little of the disk free; None if it does not."""
        if medium is Medium.DISK:
            status = os.statvfs(self.directories.disk)
            free = status.f_bavail * status.f_frsize
            if free - size_bytes < self.limits.disk_free_bytes:
                return f"{free} bytes are free in {self.directories.disk}, {self.limits.disk_free_bytes} are to be left"
        return None

    def seal(self, writer: str, segments: Iterable[str]) -> None:
        """Ends the writes of ``writer`` to these segments. Segments that are sealed already, or another writer's, are
        left alone: a message may come twice."""
        for name in segments:
            segment = self._segments.get(name)
            if segment is not None and segment.writer == writer:
                segment.writer = None
                if not segment.live_refs:
                    self._remove(name, segment)

    def check(self, writer: str, refs: Iterable[Ref]) -> None:
        """Raises StoreError unless every reference is into a segment that ``writer`` was granted and has not sealed."""
        for segment, offsets, sizes in _by_segment(refs):
            known = self._segments.get(segment)
            if known is None or known.writer != writer:
                raise StoreError(f"{segment!r} is not a segment that {writer} may write to: ask for another")
            ends = list(map(add, offsets, sizes))
            if min(offsets) < 0 or min(sizes) < 0 or max(ends) > known.size_bytes:
                raise StoreError(
                    f"bytes {min(offsets)} to {max(ends)} are outside of segment {segment} "
                    f"of {known.size_bytes} bytes"
                )

    def hold(self, refs: Iterable[Ref]) -> None:
        """Counts the references of new rows, which ``check`` has passed."""
        for segment, _, sizes in _by_segment(refs):
            held = self._segments[segment]
            held.live_refs += len(sizes)
            held.live_bytes += sum(sizes)

    def release(self, refs: Iterable[Ref]) -> None:
        """Discounts the references of rows that have ended, for the journal too. Raises ProtocolViolation for a
        reference that is not held."""
        for name, _, sizes in _by_segment(refs):
            held = self._segments.get(name)
            if held is None or held.live_refs < len(sizes) or held.live_bytes < sum(sizes):
                raise ProtocolViolation(f"a reference into segment {name} was released that is not held")
            held.live_refs -= len(sizes)
            held.live_bytes -= sum(sizes)
            if not held.live_refs and held.writer is None:
                self._remove(name, held)

    def read_chunks(self, refs: Sequence[ByteRef], chunk_bytes: int) -> Iterator[bytes]:
        """The bytes of ``refs``, one behind the other, for a reader on another host. They stay readable while they are
        read, also if their segment is removed.

        Raises StoreError, at once, if a reference, which may come from a peer, is not into a segment of this store.
        """
        for segment, offset, size_bytes in refs:
            known = self._segments.get(segment)
            if is_remote(segment):
                raise StoreError(
                    f"the bytes of {segment!r} are on the host of their writer: fetch them from there"
                )
            if known is None or offset < 0 or size_bytes < 0 or offset + size_bytes > known.size_bytes:
                raise StoreError(f"there are no {size_bytes} bytes at {offset} of segment {segment!r}")
        return self._reader.read_chunks(refs, chunk_bytes)

    def statistics(self) -> ArenaStatistics:
        """The figures of all segments now."""
        segments = self._segments.values()
        return ArenaStatistics(
            segments=len(segments),
            granted=sum(segment.writer is not None for segment in segments),
            memory_bytes=self._used[Medium.MEMORY],
            disk_bytes=self._used[Medium.DISK],
            live_refs=sum(segment.live_refs for segment in segments),
            live_bytes=sum(segment.live_bytes for segment in segments),
        )

    def close(self) -> None:
        """Unmaps the segments of ``read_chunks``. The files stay, for ``recover``."""
        self._reader.close()

    def _remove(self, name: str, segment: _Segment) -> None:
        del self._segments[name]
        if is_remote(name):
            return
        self._used[Medium(name[0])] -= segment.size_bytes
        try:
            remove(self.directories, name)
        except OSError as error:
            log.error("segment not removed", segment=name, size_bytes=segment.size_bytes, error=str(error))
        self._reader.forget_removed()


def writer_of(segment: str) -> str:
    """The writer in the name of a far segment; empty for one of the store."""
    return place_of(segment)[0].rpartition("/")[2]


def _host_of(segment: str) -> str:
    """The host in the name or place of a far segment; empty for one of the store."""
    return segment.partition("/")[0].rpartition(":")[0]


def _by_segment(refs: Iterable[Ref]) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Segment, offsets and sizes in bytes of references that follow one another into the same segment, as most of a
    put's do."""
    for _, run in groupby(refs, itemgetter(0)):
        segments, offsets, sizes, *_ = zip(*run, strict=True)
        yield segments[0], offsets, sizes
