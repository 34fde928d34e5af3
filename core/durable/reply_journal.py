"""The replies of idempotent calls in a file: a repeated call gets its first reply even from a restarted receiver.

``ReplyCache`` (``reply_cache.py``) is the memory; ``ReplyJournal`` is the same with a file behind it.

The file (``record_file.py``) holds MessagePack arrays:

    [PUT,    sender, epoch, seq, reply]
    [SETTLE, sender, epoch, acknowledged_below]
    [FORGET, sender, before_epoch]

Settled calls are written with the next reply, before it, so that reading the file repeats the changes of memory in
their order. Nothing is synced: records that write(2) has taken survive the process, not the machine.
"""

import dataclasses
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Final, Self

import msgpack

from ..errors import JournalError
from ..protocol.reply_cache import DEFAULT_LIMIT_BYTES, Key, ReplyCache, ReplyCacheStatistics
from ..telemetry import get_logger
from .record_file import Head, RecordFile, chunks, frame

log = get_logger(__name__)

_HEAD: Final = Head(b"flexmarl replies", version=3)
# The most a record holds besides the reply and the sender's name: its head and MessagePack's prefixes and integers.
_RECORD_BYTES: Final = 48
# A file is compacted once it is larger than twice its live records, and this.
_SLACK_BYTES: Final = 2**20
_CHUNK_BYTES: Final = 2**20
_PENDING_LIMIT: Final = 256


class _Kind(IntEnum):
    PUT = 1
    SETTLE = 2
    FORGET = 3


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyJournalStatistics(ReplyCacheStatistics):
    """``live_bytes``: the most that a compacted file would take now. ``cut_bytes``: unreadable bytes at opening.
    ``missing``: replies that are in memory and did not get into the file."""

    file_bytes: int
    live_bytes: int
    cut_bytes: int
    compactions: int
    failed_writes: int
    missing: int


class ReplyJournal:
    """A ``ReplyCache`` that outlives its process. Made by ``open``; for one process and one thread at a time.

    A write that fails (no space, say) raises nothing, as the call's handler has run: the reply stays in memory and may
    leave; only a restart would forget it. The first failure is logged, and so is its end: with the first write that
    succeeds again, or at closing, the whole file is written again.
    """

    def __init__(self, file: RecordFile, replies: ReplyCache) -> None:
        """For ``open`` only."""
        self.path = file.path
        self._file = file
        self._replies = replies
        self._pending: dict[tuple[str, int | None], bytes] = {}  # settled calls that are not written yet
        self._failure_logged = False
        self._missing = 0
        self._failed_writes = 0
        self._compactions = 0
        self._compact_again_at_bytes = 0
        self._eviction_logged = False
        self._check_evictions()

    @classmethod
    def open(cls, path: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Self:
        """Reads the file, or makes it with mode 0600. Bytes after the last whole record are cut off.

        Raises JournalError if ``path`` is not a journal of this version, or is open in another process, and OSError if
        it can't be opened.
        """
        replies = ReplyCache(limit_bytes)
        file = RecordFile.open(path, _HEAD, lambda body: _apply(body, replies))
        if file.cut.problem:
            figures = {"path": str(path), "replies": len(replies), **dataclasses.asdict(file.cut)}
            log.warning("journal cut after its last whole record", **figures)
        journal = cls(file, replies)
        journal._compact_if_due()
        return journal

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._replies)

    @property
    def size_bytes(self) -> int:
        return self._replies.size_bytes

    @property
    def live_bytes(self) -> int:
        """The most that a compacted file would take now."""
        return len(_HEAD.content) + self._replies.stored_bytes(_RECORD_BYTES)

    def get(self, key: Key) -> bytes | None:
        return self._replies.get(key)

    def is_settled(self, key: Key) -> bool:
        """See ``ReplyCache.is_settled``."""
        return self._replies.is_settled(key)

    def put(self, key: Key, reply: bytes) -> bool:
        """Remembers a reply, in the file too before this returns. True if it is new and was kept.

        Raises JournalError after ``close``, OverflowError if a number of the key does not fit 64 bits.
        """
        self._check_open()
        record = _record(_Kind.PUT, *key, reply)
        kept = self._replies.put(key, reply)
        self._check_evictions()
        if kept and not self._write(record):
            self._missing += 1
        return kept

    def settle(self, sender: str, epoch: int, acknowledged_below: int) -> bool:
        """See ``ReplyCache.settle``. Written with the next reply, or at closing: its loss only wastes memory.

        Raises as ``put`` does.
        """
        self._check_open()
        is_new = self._replies.settle(sender, epoch, acknowledged_below)
        if is_new:
            self._write_later((sender, epoch), _record(_Kind.SETTLE, sender, epoch, acknowledged_below))
        return is_new

    def forget_sender(self, sender: str, before_epoch: int) -> bool:
        """See ``ReplyCache.forget_sender``; as ``settle`` otherwise."""
        self._check_open()
        is_new = self._replies.forget_sender(sender, before_epoch)
        if is_new:
            self._write_later((sender, None), _record(_Kind.FORGET, sender, before_epoch))
        return is_new

    def compact(self) -> bool:
        """Writes the whole file again from memory; False if that failed. Takes time in proportion to the replies.
        Called automatically when it is due. Raises JournalError after ``close``."""
        self._check_open()
        try:
            replacement = self._file.begin_replacement()
            try:
                for chunk in chunks(_records_of(self._replies), _CHUNK_BYTES):
                    replacement.append(chunk)
                self._file.replace_by(replacement)
            finally:
                replacement.discard()
        except OSError as error:
            self._compact_again_at_bytes = self._file.size_bytes + _SLACK_BYTES
            self._log(log.warning, "journal not compacted", error=str(error))
            return False
        self._pending.clear()
        self._compact_again_at_bytes = 0
        self._compactions += 1
        if self._missing:
            self._log(log.warning, "journal whole again")
        self._missing, self._failure_logged = 0, False
        return True

    def close(self) -> None:
        """Writes pending records and closes the file. Memory can still be read. Can be repeated."""
        if not self._file.is_open:
            return
        if self._missing:
            self.compact()
        self._write_pending()
        self._file.close()

    def statistics(self) -> ReplyJournalStatistics:
        return ReplyJournalStatistics(
            **dataclasses.asdict(self._replies.statistics()),
            file_bytes=self._file.size_bytes,
            live_bytes=self.live_bytes,
            cut_bytes=self._file.cut.cut_bytes,
            compactions=self._compactions,
            failed_writes=self._failed_writes,
            missing=self._missing,
        )

    def _write_later(self, key: tuple[str, int | None], record: bytes) -> None:
        self._pending[key] = record
        if len(self._pending) >= _PENDING_LIMIT:
            self._write_pending()

    def _write_pending(self) -> None:
        if self._pending:
            self._write(b"")

    def _write(self, record: bytes) -> bool:
        """Appends pending records and ``record`` by one write. A failure is logged, and False returned."""
        if self._pending:
            record = b"".join((*self._pending.values(), record))
            self._pending.clear()
        try:
            self._file.append(record)
        except OSError as error:
            self._failed_writes += 1
            if not self._failure_logged:
                event = "journal can't be written: a restart would forget the replies since"
                self._failure_logged = self._log(log.error, event, error=str(error))
            return False
        self._compact_if_due()
        return True

    def _compact_if_due(self) -> None:
        due = self._missing or self._file.size_bytes > 2 * self.live_bytes + _SLACK_BYTES
        if due and self._file.size_bytes >= self._compact_again_at_bytes:
            self.compact()

    def _check_open(self) -> None:
        if not self._file.is_open:
            raise JournalError(self.path, "it is closed")

    def _check_evictions(self) -> None:
        if self._replies.evicted and not self._eviction_logged:
            event = "replies forgotten for lack of room: repeated calls may run twice"
            self._eviction_logged = self._log(log.warning, event)

    def _log(self, write_line: Callable[..., object], event: str, **more: str) -> bool:
        """Logs with figures. False if that failed: the log is often on the disk that is full, and the caller's reply
        must leave all the same."""
        try:
            write_line(event, **self._figures(), **more)
        except OSError:
            return False
        return True

    def _figures(self) -> dict[str, str | int]:
        return {
            "path": str(self.path),
            "file_bytes": self._file.size_bytes,
            "replies": len(self._replies),
            "size_bytes": self._replies.size_bytes,
            "limit_bytes": self._replies.limit_bytes,
            "evicted": self._replies.evicted,
            "missing": self._missing,
        }


# --------------------------------------------------------------------------- the records


def _apply(body: bytes, replies: ReplyCache) -> bool:
    """Repeats the change that a record describes; False if it is invalid. Its memory is bounded by the body's size."""
    try:
        fields = msgpack.unpackb(body, unicode_errors="surrogatepass")
    except (ValueError, TypeError, msgpack.UnpackException):
        return False
    match fields:
        case [_Kind.PUT, str(sender), int(epoch), int(seq), bytes(reply)]:
            replies.put((sender, epoch, seq), reply)
        case [_Kind.SETTLE, str(sender), int(epoch), int(acknowledged_below)]:
            replies.settle(sender, epoch, acknowledged_below)
        case [_Kind.FORGET, str(sender), int(before_epoch)]:
            replies.forget_sender(sender, before_epoch)
        case _:
            return False
    return True


def _record(kind: _Kind, *fields: str | int | bytes) -> bytes:
    return frame(msgpack.packb((kind, *fields), unicode_errors="surrogatepass"))


def _records_of(replies: ReplyCache) -> Iterator[bytes]:
    for sender, before_epoch, incarnations in replies.settled():
        yield _record(_Kind.FORGET, sender, before_epoch)
        for epoch, acknowledged_below in incarnations:
            yield _record(_Kind.SETTLE, sender, epoch, acknowledged_below)
    for key, reply in replies.items():
        yield _record(_Kind.PUT, *key, reply)
