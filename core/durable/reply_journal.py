"""What makes a repeated call get its first reply, even from a receiver that was killed and started again.

``Replies`` (``reply_cache.py``) remembers; ``Journal`` is the same memory with a file behind it.

The file (``record_file.py``) holds MessagePack arrays:

    [PUT,    sender, epoch, seq, reply]
    [SETTLE, sender, epoch, floor]
    [FORGET, sender, before_epoch]

What is settled is written with the next reply, before it, so that reading the file repeats what memory did in its
order. Nothing is synced: what write(2) has taken survives the process, not the machine.
"""

import dataclasses
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Final, Self

import msgpack

from ..errors import JournalError
from ..protocol.reply_cache import DEFAULT_LIMIT_BYTES, Key, Replies, RepliesStatistics
from ..telemetry import get_logger
from .record_file import Head, RecordFile, chunks, frame

__all__ = ["DEFAULT_LIMIT_BYTES", "Journal", "JournalStatistics", "Key", "Replies", "RepliesStatistics"]

log = get_logger(__name__)

_HEAD: Final = Head(b"flexmarl replies", version=2)
# The most a record holds besides the reply and the sender's name: its head and MessagePack's prefixes and integers.
_RECORD_BYTES: Final = 48
# A file is compacted once it is larger than twice what is alive in it, and this.
_SLACK_BYTES: Final = 2**20
_CHUNK_BYTES: Final = 2**20
_PENDING_LIMIT: Final = 256


class _Kind(IntEnum):
    PUT = 1
    SETTLE = 2
    FORGET = 3


@dataclasses.dataclass(frozen=True, slots=True)
class JournalStatistics(RepliesStatistics):
    """``live_bytes``: what the file would be at most if it were compacted now. ``cut_bytes``: what was unreadable
    when it was opened. ``missing``: replies that are remembered in memory and did not get into the file."""

    file_bytes: int
    live_bytes: int
    cut_bytes: int
    compactions: int
    failed_writes: int
    missing: int


class Journal:
    """``Replies`` that outlive their process. Made by ``open``; for one process and one thread at a time.

    A write that fails (no space, say) is no error for the caller, whose handler has run: its reply is remembered in
    memory and may leave; only a restart would forget it. It is logged when it begins and when it is over: with the
    first write that succeeds again, or at closing, the file is written anew as a whole.
    """

    def __init__(self, file: RecordFile, replies: Replies) -> None:
        """For ``open`` only."""
        self.path = file.path
        self._file = file
        self._replies = replies
        self._pending: dict[tuple[str, int | None], bytes] = {}  # what is settled and not written yet
        self._failure_told = False
        self._missing = 0
        self._failed_writes = 0
        self._compactions = 0
        self._compact_again_at_bytes = 0
        self._eviction_told = False
        self._check_evictions()

    @classmethod
    def open(cls, path: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Self:
        """Reads what is there, or makes the file with mode 0600. What follows the last whole record is cut off.

        Raises JournalError where ``path`` is something else than a journal of this version, or is open in another
        process, and OSError where it can't be opened.
        """
        replies = Replies(limit_bytes)
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
        """What the file would be at most if it were compacted now."""
        return len(_HEAD.content) + self._replies.stored_bytes(_RECORD_BYTES)

    def get(self, key: Key) -> bytes | None:
        return self._replies.get(key)

    def is_settled(self, key: Key) -> bool:
        """Whether the sender has said that it will not ask for this key (again). Such a call must not run."""
        return self._replies.is_settled(key)

    def put(self, key: Key, reply: bytes) -> bool:
        """Remembers a reply, in the file too before this returns. Returns whether it is new and was kept.

        Raises JournalError after ``close``, OverflowError where a number of the key does not fit 64 bits.
        """
        self._check_open()
        record = _record(_Kind.PUT, *key, reply)
        kept = self._replies.put(key, reply)
        self._check_evictions()
        if kept and not self._write(record):
            self._missing += 1
        return kept

    def settle(self, sender: str, epoch: int, floor: int) -> bool:
        """Forgets every seq below ``floor`` of one incarnation. Returns whether that was news.

        It is written with the next reply, or at closing: to lose it wastes memory, no more. Raises as ``put`` does.
        """
        self._check_open()
        news = self._replies.settle(sender, epoch, floor)
        if news:
            self._write_later((sender, epoch), _record(_Kind.SETTLE, sender, epoch, floor))
        return news

    def forget_sender(self, sender: str, before_epoch: int) -> bool:
        """Forgets all incarnations of a sender before ``before_epoch``; as ``settle`` otherwise."""
        self._check_open()
        news = self._replies.forget_sender(sender, before_epoch)
        if news:
            self._write_later((sender, None), _record(_Kind.FORGET, sender, before_epoch))
        return news

    def compact(self) -> bool:
        """Writes the file anew with what is remembered now, and returns whether that succeeded. It takes time in
        proportion to what is remembered. Done by itself when it is due; raises JournalError after ``close``."""
        self._check_open()
        try:
            anew = self._file.begin_anew()
            try:
                for chunk in chunks(_records_of(self._replies), _CHUNK_BYTES):
                    anew.append(chunk)
                self._file.replace_by(anew)
            finally:
                anew.discard()
        except OSError as error:
            self._compact_again_at_bytes = self._file.size_bytes + _SLACK_BYTES
            self._tell(log.warning, "journal not compacted", error=str(error))
            return False
        self._pending.clear()
        self._compact_again_at_bytes = 0
        self._compactions += 1
        if self._missing:
            self._tell(log.warning, "journal whole again")
        self._missing, self._failure_told = 0, False
        return True

    def close(self) -> None:
        """Writes what is pending and closes the file. What is remembered can still be read. Can be repeated."""
        if not self._file.is_open:
            return
        if self._missing:
            self.compact()
        self._write_pending()
        self._file.close()

    def statistics(self) -> JournalStatistics:
        return JournalStatistics(
            **dataclasses.asdict(self._replies.statistics()),
            file_bytes=self._file.size_bytes,
            live_bytes=self.live_bytes,
            cut_bytes=self._file.cut.cut_bytes,
            compactions=self._compactions,
            failed_writes=self._failed_writes,
            missing=self._missing,
        )

    def _write_later(self, what: tuple[str, int | None], record: bytes) -> None:
        self._pending[what] = record
        if len(self._pending) >= _PENDING_LIMIT:
            self._write_pending()

    def _write_pending(self) -> None:
        if self._pending:
            self._write(b"")

    def _write(self, record: bytes) -> bool:
        """Appends what is pending and ``record`` by one write; a failure is logged and returned."""
        if self._pending:
            record = b"".join((*self._pending.values(), record))
            self._pending.clear()
        try:
            self._file.append(record)
        except OSError as error:
            self._failed_writes += 1
            if not self._failure_told:
                event = "journal can't be written: a restart would forget the replies since"
                self._failure_told = self._tell(log.error, event, error=str(error))
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
        if self._replies.evicted and not self._eviction_told:
            event = "replies forgotten for want of room: repeated calls may run twice"
            self._eviction_told = self._tell(log.warning, event)

    def _tell(self, write_line: Callable[..., object], event: str, **more: str) -> bool:
        """Logs with figures. False where that failed: the log is often on the disk that is full, and the caller's
        reply must leave all the same."""
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


def _apply(body: bytes, replies: Replies) -> bool:
    """Repeats what a record tells; False where it is none. It is bounded as its body is: MessagePack can't expand."""
    try:
        fields = msgpack.unpackb(body, unicode_errors="surrogatepass")
    except (ValueError, TypeError, msgpack.UnpackException):
        return False
    match fields:
        case [_Kind.PUT, str(sender), int(epoch), int(seq), bytes(reply)]:
            replies.put((sender, epoch, seq), reply)
        case [_Kind.SETTLE, str(sender), int(epoch), int(floor)]:
            replies.settle(sender, epoch, floor)
        case [_Kind.FORGET, str(sender), int(before_epoch)]:
            replies.forget_sender(sender, before_epoch)
        case _:
            return False
    return True


def _record(kind: _Kind, *fields: str | int | bytes) -> bytes:
    return frame(msgpack.packb((kind, *fields), unicode_errors="surrogatepass"))


def _records_of(replies: Replies) -> Iterator[bytes]:
    for sender, before_epoch, floors in replies.floors():
        yield _record(_Kind.FORGET, sender, before_epoch)
        for epoch, floor in floors:
            yield _record(_Kind.SETTLE, sender, epoch, floor)
    for key, reply in replies.items():
        yield _record(_Kind.PUT, *key, reply)
