"""What makes acknowledged writes outlive the store's process: a log of opaque records with group commit.

    append, append, append ...   of one tick of the loop: one write(2), then their futures are done
    compact(snapshot)            the file written anew beside it, a piece per tick, then renamed

Rules:
- records are in the file in the order in which they were appended: one that is acknowledged implies all before it;
- a write that fails takes back every record that is not acknowledged: it is cut off the file, ``undo`` is called, the
  last first and before anything else runs, and the future gets StoreFull (no room) or JournalError (anything else);
- ``durable="machine"``: a record is acknowledged once fdatasync(2) has returned, for all of the records that were
  written before it began. ``"process"``: once write(2) has; it outlives kill -9 and not a loss of power.
"""

import asyncio
import errno
import os
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from ...core.durable.files import sync
from ...core.durable.record_file import RECORD_LIMIT_BYTES, Head, RecordFile, chunks, frame
from ...core.errors import FlexmarlError, JournalError
from ...core.telemetry import get_logger
from ..errors import StoreFull

log = get_logger(__name__)

Durable = Literal["process", "machine"]

_HEAD: Final = Head(b"flexmarl samples", version=2)
_CHUNK_BYTES: Final = 2**17  # of a compaction, per tick of the loop
# A file is worth compacting once it is this large, then when it has grown to twice its size and this more.
_SLACK_BYTES: Final = 2**24
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class JournalStatistics:
    """``groups``: writes that ``records`` were joined to. ``cut_bytes``: what was unreadable when it was opened."""

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

    def __init__(self, file: RecordFile, durable: Durable) -> None:
        """For ``open`` only."""
        self.path = file.path
        self.durable = durable
        self._file = file
        self._waiting: list[_Entry] = []  # not written
        self._unsynced: list[_Entry] = []  # written, for "machine"
        self._synced_bytes = file.size_bytes
        self._syncing: asyncio.Task[None] | None = None
        self._flush_is_due = False
        self._compacting = False
        self._held = False  # the file is about to be replaced
        self._due_bytes = _SLACK_BYTES
        self._records = self._groups = self._compactions = self._failures = 0

    @classmethod
    def open(cls, path: Path, read: Callable[[bytes], None], durable: Durable = "process") -> Self:
        """Gives every record there is to ``read``, in order, or makes the file with mode 0600. What follows the last
        whole record is cut off.

        Raises JournalError where ``path`` is no journal of a store or is open in another process, OSError, and what
        ``read`` raises: the file is as it was then.
        """

        def read_record(body: bytes) -> bool:
            read(body)
            return True

        file = RecordFile.open(path, _HEAD, read_record)
        if file.cut.problem:
            log.warning(
                "store's journal cut after its last whole record",
                path=str(path),
                kept_bytes=file.cut.kept_bytes,
                cut_bytes=file.cut.cut_bytes,
                problem=file.cut.problem,
            )
        try:
            if durable == "machine":
                file.sync()
                sync(path.parent)
        except BaseException:
            file.close()
            raise
        return cls(file, durable)

    def append(self, record: bytes, undo: Callable[[], None] | None = None) -> "asyncio.Future[None]":
        """A future that is done once ``record`` is durable. It is written whether or not anybody waits for that.

        ``undo``: takes back, in memory, what the record tells, where it could not be written; must not raise.
        The future raises StoreFull, JournalError. Raises JournalError itself after ``close``, and for a record longer
        than ``RECORD_LIMIT_BYTES``.
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
        """Until all that was appended before is durable or taken back."""
        if unsettled := self._waiting or self._unsynced:
            await asyncio.wait([unsettled[-1].future])

    @property
    def compaction_is_due(self) -> bool:
        return not self._compacting and self._file.size_bytes > self._due_bytes

    def compact(self, snapshot: Iterable[bytes]) -> Coroutine[Any, Any, None]:
        """Puts ``snapshot``, and what is appended from now on, in the place of all that was written before.

        ``snapshot``: the records that tell the state of this moment, appends that are not acknowledged included. It is
        iterated a piece per tick while appends go on: what it yields must not change with them.

        To be awaited; cancelling it leaves the file as it was, as do the errors: StoreFull, JournalError (another
        compaction is under way, or the journal was closed, or appends of before had to be taken back), and whatever
        iterating raises.
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
        await self._until_synced()
        self._file.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def statistics(self) -> JournalStatistics:
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
        if not self._waiting or self._held:
            return
        try:
            self._file.append(b"".join([entry.record for entry in self._waiting]))
        except OSError as error:
            self._take_back(self._file.size_bytes, [], error)
            return
        group, self._waiting = self._waiting, []
        self._records += len(group)
        self._groups += 1
        if self.durable == "process":
            _acknowledge(group)
        else:
            self._unsynced += group
            self._sync_if_due()

    def _sync_if_due(self) -> None:
        if self._unsynced and self._syncing is None:
            self._syncing = asyncio.create_task(self._sync(), name="journal sync")

    async def _sync(self) -> None:
        count, size_bytes = len(self._unsynced), self._file.size_bytes
        try:
            await asyncio.to_thread(self._file.sync)
        except OSError as error:
            # What the kernel failed to write it may have forgotten: nothing since the last success can be trusted.
            lost, self._unsynced = self._unsynced, []
            self._take_back(self._synced_bytes, lost, error)
        else:
            group, self._unsynced = self._unsynced[:count], self._unsynced[count:]
            self._synced_bytes = size_bytes
            _acknowledge(group)
        finally:
            self._syncing = None
        self._sync_if_due()

    def _take_back(self, size_bytes: int, written: list[_Entry], error: OSError) -> None:
        """Cuts the file back to ``size_bytes``, and undoes ``written`` and all that is waiting."""
        lost, self._waiting = written + self._waiting, []
        self._failures += 1
        lost_bytes = sum(len(entry.record) for entry in lost)
        with suppress(OSError):  # it is done before the next append, or at opening
            self._file.take_back(size_bytes)
        for entry in reversed(lost):
            if entry.undo is not None:
                entry.undo()
        for entry in lost:
            if not entry.future.done():
                entry.future.set_exception(self._error(error, lost_bytes))
        # Last: a log that is on the same disk must not keep anything from being taken back.
        log.error(
            "store's journal can't be written", path=str(self.path), records=len(lost), error=str(error)
        )

    def _error(self, error: OSError, lost_bytes: int) -> FlexmarlError:
        if error.errno in _NO_ROOM:
            return StoreFull(self.path, lost_bytes, os.strerror(error.errno))
        return JournalError(self.path, f"it can't be written: {error}")

    async def _until_synced(self) -> None:
        while self._syncing is not None:
            await asyncio.wait([self._syncing])

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
            anew = self._file.begin_replacement()
            try:
                await self._write_anew(anew, snapshot, start, state)
            finally:
                anew.discard()
        except OSError as error:
            raise self._error(error, _CHUNK_BYTES) from error
        finally:
            self._compacting = False
            self._due_bytes = max(self._due_bytes, self._file.size_bytes + _SLACK_BYTES)

    async def _write_anew(
        self, anew: RecordFile, snapshot: Iterable[bytes], start: int, state: tuple[int, int]
    ) -> None:
        for chunk in chunks(map(frame, snapshot), _CHUNK_BYTES):
            anew.append(chunk)
            await asyncio.sleep(0)
            self._check_compaction(state)
        snapshot_bytes = anew.size_bytes
        while self._file.size_bytes - start > _CHUNK_BYTES:
            start = self._copy(anew, start)
            await asyncio.sleep(0)
            self._check_compaction(state)
        if self.durable == "machine":
            await asyncio.to_thread(anew.sync)  # most of it, while appends go on
            await self._replace_synced(anew, start, state)
        else:
            self._replace(anew, start)
        self._compactions += 1
        self._due_bytes = 2 * snapshot_bytes + _SLACK_BYTES

    async def _replace_synced(self, anew: RecordFile, start: int, state: tuple[int, int]) -> None:
        """What is appended meanwhile waits."""
        self._held = True
        try:
            await self._until_synced()
            self._check_compaction(state)
            start = self._copy_rest(anew, start)
            await asyncio.to_thread(anew.sync)
            self._replace(anew, start)
            self._synced_bytes = self._file.size_bytes
            await asyncio.to_thread(sync, self.path.parent)
        finally:
            self._held = False
            self._flush()

    def _replace(self, anew: RecordFile, start: int) -> None:
        self._copy_rest(anew, start)
        self._file.replace_by(anew)

    def _copy_rest(self, anew: RecordFile, start: int) -> int:
        while start < self._file.size_bytes:
            start = self._copy(anew, start)
        return start

    def _copy(self, anew: RecordFile, start: int) -> int:
        """Copies a piece of what was appended since; returns where the next begins."""
        piece = self._file.read(start, _CHUNK_BYTES)
        if not piece:
            raise JournalError(self.path, "somebody else has cut it")
        anew.append(piece)
        return start + len(piece)

    def _state(self) -> tuple[int, int]:
        return self._failures, self._compactions

    def _check_compaction(self, state: tuple[int, int]) -> None:
        """Of what had to be taken back the snapshot may tell; where it was compacted, the rest is at another place."""
        self._check_open()
        if self._state() != state:
            raise JournalError(
                self.path, "it was not compacted: appends were taken back, or it was compacted, since"
            )


def _acknowledge(group: list[_Entry]) -> None:
    for entry in group:
        if not entry.future.done():
            entry.future.set_result(None)
