"""The store's journal: an append-only file of opaque records with group commit. Acknowledged writes outlive the store's
process.

    append, append, append ...   of one tick of the loop: one write(2), then their futures are done
    compact(snapshot)            a new file is written beside the old one, a part per tick, and replaces it

Rules:
- records are in the file in the order in which they were appended: one that is acknowledged implies all before it;
- a write that fails takes back every record that is not acknowledged: it is cut off the file, ``undo`` is called, the
  last first and before anything else runs, and the future gets StoreFull (no room) or JournalError (anything else);
- a record is acknowledged once write(2) has returned: it outlives kill -9, not a loss of power. A run that lost its
  machine begins at its last checkpoint, with an empty store.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from ...core.durable.record_file import RECORD_LIMIT_BYTES, Head, RecordFile, chunks, frame
from ...core.errors import FlexmarlError, JournalError
from ...core.telemetry import get_logger
from ..errors import StoreFull

log = get_logger(__name__)

HEAD: Final = Head(b"flexmarl samples", version=4)
_CHUNK_BYTES: Final = 2**17  # of a compaction, per tick of the loop
# A file is worth compacting once it is this large, then when it has grown to twice its size and this more.
_SLACK_BYTES: Final = 2**24


@dataclass(frozen=True, slots=True)
class JournalStatistics:
    """``groups``: writes, each of one or more of the ``records``. ``cut_bytes``: unreadable bytes that were cut off the
    file when it was opened."""

    file_bytes: int
    cut_bytes: int
    records: int
    groups: int
    compactions: int
    failures: int


@dataclass(slots=True)
class _Entry:
    record: bytes
    undo: Callable[[], None] | None
    future: "asyncio.Future[None]"


class StoreJournal:
    """Made by ``open``; for one event loop."""

    def __init__(self, file: RecordFile) -> None:
        """For ``open`` only."""
        self.path = file.path
        self._file = file
        self._waiting: list[_Entry] = []  # not written
        self._flush_is_due = False
        self._compacting = False
        self._due_bytes = _SLACK_BYTES
        self._records = self._groups = self._compactions = self._failures = 0

    @classmethod
    def open(cls, path: Path, read: Callable[[bytes], None]) -> Self:
        """Passes every record of the file to ``read``, in order, or makes the file with mode 0600. Bytes after the last
        whole record are cut off.

        Raises StoreFull without room for the head of a new file, in which case ``read`` has got nothing, JournalError
        if ``path`` is not a store's journal or another process has it open, OSError, and what ``read`` raises: the file
        is unchanged then.
        """

        def read_record(body: bytes) -> bool:
            read(body)
            return True

        try:
            file = RecordFile.open(path, HEAD, read_record)
        except OSError as error:
            if error.errno not in StoreFull.ERRNOS:
                raise
            raise StoreFull(path, len(HEAD.content), os.strerror(error.errno)) from error
        if file.cut.problem:
            log.warning(
                "store's journal cut after its last whole record",
                path=str(path),
                kept_bytes=file.cut.kept_bytes,
                cut_bytes=file.cut.cut_bytes,
                problem=file.cut.problem,
            )
        return cls(file)

    def append(self, record: bytes, undo: Callable[[], None] | None = None) -> "asyncio.Future[None]":
        """Returns a future that is done once ``record`` is durable. Cancelling the future does not keep the record from
        being written.

        ``undo``: undoes the record's change in memory if it can't be written; must not raise. The future raises
        StoreFull, JournalError. Raises JournalError itself after ``close``, and for a record longer than
        ``RECORD_LIMIT_BYTES``.
        """
        self._check_open()
        if len(record) > RECORD_LIMIT_BYTES:
            raise JournalError(self.path, f"a record of {len(record)} bytes is too long")
        loop = asyncio.get_running_loop()
        entry = _Entry(frame(record), undo, loop.create_future())
        self._waiting.append(entry)
        if not self._flush_is_due:
            self._flush_is_due = True
            loop.call_soon(self._flush)
        return entry.future

    async def wait_settled(self) -> None:
        """Returns when every record appended before is durable or taken back."""
        if self._waiting:
            await asyncio.wait([self._waiting[-1].future])

    @property
    def compaction_is_due(self) -> bool:
        """True if the file has grown to the size at which it is compacted, and no compaction is under way."""
        return not self._compacting and self._file.size_bytes > self._due_bytes

    def compact(self, snapshot: Iterable[bytes]) -> Coroutine[Any, Any, None]:
        """Replaces the records written before by ``snapshot``, and by those that are appended from now on.

        ``snapshot``: the records of the state of this moment, with appends that are not acknowledged. It is iterated a
        part per tick while appends continue: what it yields must not change with them.

        To be awaited. If it is cancelled or raises, the file is unchanged: StoreFull, JournalError (another compaction
        is running, or the journal was closed, or earlier appends had to be taken back), and what iterating raises.
        """
        state = self._state()
        self._check_compaction(state)
        self._flush()
        self._check_compaction(state)
        return self._compact(snapshot, self._file.size_bytes, state)

    async def close(self) -> None:
        """Writes what is waiting and closes the file. Can be repeated. Raises JournalError during a compaction."""
        if not self._file.is_open:
            return
        if self._compacting:
            raise JournalError(self.path, "it is being compacted: cancel that first")
        self._flush()
        self._file.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def statistics(self) -> JournalStatistics:
        """The figures of the journal since it was opened; sizes in bytes."""
        return JournalStatistics(
            file_bytes=self._file.size_bytes,
            cut_bytes=self._file.cut.cut_bytes,
            records=self._records,
            groups=self._groups,
            compactions=self._compactions,
            failures=self._failures,
        )

    # ----------------------------------------------------------------------- group commit

    def _flush(self) -> None:
        """Writes what is waiting, by one write(2)."""
        self._flush_is_due = False
        if not self._waiting:
            return
        try:
            self._file.append(b"".join([entry.record for entry in self._waiting]))
        except OSError as error:
            self._take_back(error)
            return
        group, self._waiting = self._waiting, []
        self._records += len(group)
        self._groups += 1
        for entry in group:
            if not entry.future.done():
                entry.future.set_result(None)

    def _take_back(self, error: OSError) -> None:
        """Cuts the file back to its last acknowledged record, and undoes all that is waiting."""
        lost, self._waiting = self._waiting, []
        self._failures += 1
        lost_bytes = sum(len(entry.record) for entry in lost)
        with suppress(OSError):  # it is done before the next append, or at opening
            self._file.trim()
        for entry in reversed(lost):
            if entry.undo is not None:
                entry.undo()
        for entry in lost:
            if not entry.future.done():
                entry.future.set_exception(self._error(error, lost_bytes))
        # Last: a log on the same disk must not keep anything from being taken back.
        log.error(
            "store's journal can't be written", path=str(self.path), records=len(lost), error=str(error)
        )

    def _error(self, error: OSError, lost_bytes: int) -> FlexmarlError:
        if error.errno in StoreFull.ERRNOS:
            return StoreFull(self.path, lost_bytes, os.strerror(error.errno))
        return JournalError(self.path, f"it can't be written: {error}")

    def _check_open(self) -> None:
        if not self._file.is_open:
            raise JournalError(self.path, "it is closed")

    # ----------------------------------------------------------------------- compaction

    async def _compact(self, snapshot: Iterable[bytes], start: int, state: tuple[int, int]) -> None:
        self._check_compaction(state)
        if self._compacting:
            raise JournalError(self.path, "it is being compacted already")
        self._compacting = True
        try:
            new = self._file.begin_replacement()
            try:
                await self._write_new(new, snapshot, start, state)
            finally:
                new.discard()
        except OSError as error:
            raise self._error(error, _CHUNK_BYTES) from error
        finally:
            self._compacting = False
            self._due_bytes = max(self._due_bytes, self._file.size_bytes + _SLACK_BYTES)

    async def _write_new(
        self, new: RecordFile, snapshot: Iterable[bytes], start: int, state: tuple[int, int]
    ) -> None:
        for chunk in chunks(map(frame, snapshot), _CHUNK_BYTES):
            new.append(chunk)
            await asyncio.sleep(0)
            self._check_compaction(state)
        snapshot_bytes = new.size_bytes
        while self._file.size_bytes - start > _CHUNK_BYTES:
            start = self._copy(new, start)
            await asyncio.sleep(0)
            self._check_compaction(state)
        while start < self._file.size_bytes:
            start = self._copy(new, start)
        self._file.replace_by(new)
        self._compactions += 1
        self._due_bytes = 2 * snapshot_bytes + _SLACK_BYTES

    def _copy(self, new: RecordFile, start: int) -> int:
        """Copies a part of the records appended since; returns the start of the next part."""
        part = self._file.read(start, _CHUNK_BYTES)
        if not part:
            raise JournalError(self.path, "another process has cut it")
        new.append(part)
        return start + len(part)

    def _state(self) -> tuple[int, int]:
        return self._failures, self._compactions

    def _check_compaction(self, state: tuple[int, int]) -> None:
        """Raises JournalError if the snapshot may hold changes that were taken back since, or if another compaction has
        moved the records that come after it."""
        self._check_open()
        if self._state() != state:
            raise JournalError(
                self.path, "it was not compacted: appends were taken back, or it was compacted, since"
            )
