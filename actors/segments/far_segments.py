"""Segments of samples on the node of their writer, if that is another one than the store's.

    writer   makes the segments that the store grants, and serves them        (``WriterNode``)
    store    counts them, and names those that have ended with the next grant
    reader   maps them on the writer's node, or fetches ranges of them         (``RemoteSegmentReader``)

The name of such a segment begins with its place: ``ADDRESS/WRITER/NAME``. It goes with its writer.
"""

import re
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from ...core.errors import UnsafeDirectory
from ...transport.errors import ForeignHandle, RangesLost
from ...transport.remote.bulk import Bulk
from ...transport.remote.frames import MOST_RANGE_BYTES, NamedRange
from ...transport.remote.named_ranges import fetch_ranges
from ...transport.remote.server import BulkServer
from ...transport.statistics import NetworkStatistics
from .errors import PieceLost
from .reader import SegmentReader
from .segments import ByteRef, Medium, SegmentDirectories, SegmentGrant, WriterMemory, create, remove

_WRITER: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# References of one batch that lie as near as this are fetched as one range.
_GAP_BYTES: Final = 4096

Contents = dict[ByteRef, memoryview]


def _directories(root: Path, place: str) -> SegmentDirectories:
    """Raises ForeignHandle for an invalid place, which may come from a peer."""
    writer = place.rpartition("/")[2]
    if not _WRITER.fullmatch(writer):
        raise ForeignHandle(place, str(root), "invalid place")
    return SegmentDirectories(root / writer, root / writer, place)


class WriterNode:
    """The node of one writer, and its segments there. They are served from the first ``memory`` on."""

    def __init__(self, node: str, root: Path, writer: str, bulk: Bulk | None, replaces: str) -> None:
        """``root``: of all writers of the node. ``bulk``: None if other nodes are not reached. The segments of writers
        whose names begin with ``replaces`` are removed: they were earlier lives of this one."""
        self._node, self._root, self._writer = node, root, writer
        self._bulk, self._replaces = bulk, replaces
        self._server: BulkServer | None = None
        self._place = ""
        self.statistics = NetworkStatistics()

    def memory(self) -> WriterMemory:
        """Raises OSError if this process can't listen."""
        if self._bulk is not None and self._server is None:
            self._server = BulkServer(self._bulk, self.statistics, named_bytes=self._bytes_of)
            self._place = f"{self._server.address}/{self._writer}"
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        held = [f"{self._place}/{name}" for name in names]
        return WriterMemory(self._node, self._place, held)

    @property
    def folder(self) -> Path:
        """The folder of the writer's segments."""
        return self._root / self._writer

    @property
    def directories(self) -> SegmentDirectories:
        """The directories of the writer's segments, by its place. Raises ForeignHandle for an invalid name of the
        writer."""
        return _directories(self._root, self._place)

    def make(self, grant: SegmentGrant) -> None:
        """Makes a segment, and removes those that have ended: readers keep their memory. Raises OSError (ENOSPC: there
        is no room), ForeignHandle."""
        directories = self.directories
        if not directories.memory.is_dir():
            self._root.mkdir(mode=0o700, exist_ok=True)
            for earlier in self._root.glob(f"{self._replaces}*"):
                shutil.rmtree(earlier, ignore_errors=True)
            directories.memory.mkdir(mode=0o700)
        for ended in grant.ended:
            remove(directories, ended)
        create(directories, Medium.MEMORY, grant.size_bytes, grant.segment)

    def close(self) -> None:
        """Ends the serving and removes the writer's segments: their bytes are lost to readers of other nodes."""
        if self._server is not None:
            self._server.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _bytes_of(self, request: NamedRange) -> memoryview:
        """The bytes of a range of a segment. Raises ForeignHandle."""
        # A reader of its own: connections have threads, and a mapping lasts as long as its view.
        reference = ByteRef(request.name, request.start, request.end - request.start)
        try:
            return SegmentReader(self.directories).views([reference])[0]
        except UnsafeDirectory as error:  # there is no segment yet, or not any more
            raise ForeignHandle(request.name, str(self.folder), error.problem) from error


class RemoteSegmentReader:
    """Reads segments of writers on any node."""

    def __init__(self, root: Path, bulk: Bulk, run_blocking: Callable[..., Awaitable[Contents]]) -> None:
        """``root``: of all writers of this node. ``run_blocking``: as of ``ActorSystem``."""
        self._root = root
        self._bulk = bulk
        self._run_blocking = run_blocking

    def local_directories(self, place: str) -> SegmentDirectories | None:
        """The directories of that place, if it is on this node. Raises ForeignHandle."""
        directories = _directories(self._root, place)
        return directories if directories.memory.is_dir() else None

    async def fetch(self, place: str, refs: Sequence[ByteRef], timeout_s: float) -> Contents:
        """The bytes of references into segments of one place. Connects again until the deadline.

        Raises PieceLost: the writer has left, the deadline is over, or bytes have come wrong twice.
        """
        stop = threading.Event()
        return await self._run_blocking(self._fetch, place, refs, timeout_s, stop, stop=stop)

    def _fetch(
        self, place: str, refs: Sequence[ByteRef], timeout_s: float, stop: threading.Event
    ) -> Contents:
        address = place.rpartition("/")[0]
        refs_of = dict(_group(refs))
        try:
            memory_of = fetch_ranges(self._bulk, address, [*refs_of], timeout_s, stop)
        except RangesLost as lost:
            raise PieceLost(place, len(refs), lost.reason) from lost
        return {
            ref: memory_of[span][ref.offset - span.start : _end(ref) - span.start]
            for span, together in refs_of.items()
            for ref in together
        }


def _group(refs: Sequence[ByteRef]) -> Iterator[tuple[NamedRange, list[ByteRef]]]:
    """The ranges of segments to fetch, with the references that lie in each: near ones are fetched together."""
    together: list[ByteRef] = []
    for ref in sorted({ref for ref in refs if ref.size_bytes}):
        if together and (
            ref.segment != together[0].segment
            or ref.offset > _end(together[-1]) + _GAP_BYTES
            or _end(ref) - together[0].offset > MOST_RANGE_BYTES
        ):
            yield _range_of(together), together
            together = []
        together.append(ref)
    if together:
        yield _range_of(together), together


def _range_of(refs: Sequence[ByteRef]) -> NamedRange:
    return NamedRange(refs[0].segment, refs[0].offset, max(map(_end, refs)))


def _end(ref: ByteRef) -> int:
    return ref.offset + ref.size_bytes
