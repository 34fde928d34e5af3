"""What makes a repeated call get its first reply, even from a receiver that was killed and started again.

``Replies`` (``replies.py``) remembers; ``Journal`` is the same memory with a file behind it.

The file is a head, ``_MAGIC`` and a version, and records, each written by one write(2) with O_APPEND:

    length (u32, little-endian) | xxh3_64 of the body (u64) | body: a MessagePack array
        [PUT,    sender, epoch, seq, reply]
        [SETTLE, sender, epoch, floor]
        [FORGET, sender, before_epoch]

What is settled is written with the next reply, before it, so that reading the file repeats what memory did in its
order. Nothing is synced: what write(2) has taken survives the process, not the machine.
"""

import dataclasses
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, Final, Self

import msgpack
import xxhash

from .errors import JournalError
from .replies import DEFAULT_LIMIT_BYTES, Key, Replies, RepliesStatistics
from .telemetry import get_logger

__all__ = ["DEFAULT_LIMIT_BYTES", "Journal", "JournalStatistics", "Key", "Replies", "RepliesStatistics"]

log = get_logger(__name__)

_MAGIC: Final = b"flexmarl replies"
_VERSION: Final = 1
_VERSION_FIELD: Final = struct.Struct("<I")
_HEAD: Final = _MAGIC + _VERSION_FIELD.pack(_VERSION)
_RECORD_HEAD: Final = struct.Struct("<IQ")
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

    def __init__(
        self, path: Path, descriptor: int, replies: Replies, file_bytes: int, cut_bytes: int
    ) -> None:
        """For ``open`` only."""
        self.path = path
        self._descriptor = descriptor
        self._replies = replies
        self._file_bytes = file_bytes  # up to the end of the last whole record
        self._cut_bytes = cut_bytes
        self._pending: dict[tuple[str, int | None], bytes] = {}  # what is settled and not written yet
        self._failure_told = False
        self._torn = False  # behind ``file_bytes`` the file may hold part of a record
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
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _claim(descriptor, path)
            _temporary(path).unlink(missing_ok=True)  # left by a process that was killed while compacting
            replies = Replies(limit_bytes)
            file_bytes, cut_bytes = _recover(descriptor, path, replies)
            journal = cls(path, descriptor, replies, file_bytes, cut_bytes)
        except BaseException:
            os.close(descriptor)
            raise
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
        return len(_HEAD) + self._replies.stored_bytes(_RECORD_BYTES)

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
        temporary = _temporary(self.path)
        try:
            descriptor, file_bytes = _write_anew(temporary, _records_of(self._replies))
            try:
                temporary.replace(self.path)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._compact_again_at_bytes = self._file_bytes + _SLACK_BYTES
            self._tell(log.warning, "journal not compacted", error=str(error))
            return False
        os.close(self._descriptor)
        self._descriptor, self._file_bytes, self._torn = descriptor, file_bytes, False
        self._pending.clear()
        self._compact_again_at_bytes = 0
        self._compactions += 1
        if self._missing:
            self._tell(log.warning, "journal whole again")
        self._missing, self._failure_told = 0, False
        return True

    def close(self) -> None:
        """Writes what is pending and closes the file. What is remembered can still be read. Can be repeated."""
        if self._descriptor < 0:
            return
        if self._missing:
            self.compact()
        self._write_pending()
        if self._torn:
            with suppress(OSError):  # if not now, it is cut off at opening
                os.ftruncate(self._descriptor, self._file_bytes)
        os.close(self._descriptor)
        self._descriptor = -1

    def statistics(self) -> JournalStatistics:
        return JournalStatistics(
            **dataclasses.asdict(self._replies.statistics()),
            file_bytes=self._file_bytes,
            live_bytes=self.live_bytes,
            cut_bytes=self._cut_bytes,
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
            if self._torn:
                os.ftruncate(self._descriptor, self._file_bytes)
                self._torn = False
            _write_all(self._descriptor, record)
        except OSError as error:
            self._torn = True  # the next record must not follow half of this one
            self._failed_writes += 1
            if not self._failure_told:
                event = "journal can't be written: a restart would forget the replies since"
                self._failure_told = self._tell(log.error, event, error=str(error))
            return False
        self._file_bytes += len(record)
        self._compact_if_due()
        return True

    def _compact_if_due(self) -> None:
        due = self._missing or self._file_bytes > 2 * self.live_bytes + _SLACK_BYTES
        if due and self._file_bytes >= self._compact_again_at_bytes:
            self.compact()

    def _check_open(self) -> None:
        if self._descriptor < 0:
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
            "file_bytes": self._file_bytes,
            "replies": len(self._replies),
            "size_bytes": self._replies.size_bytes,
            "limit_bytes": self._replies.limit_bytes,
            "evicted": self._replies.evicted,
            "missing": self._missing,
        }


# --------------------------------------------------------------------------- the file


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _claim(descriptor: int, path: Path) -> None:
    """Raises JournalError unless this is a file that no other process has open: two would spoil each other's records.

    A POSIX lock (fcntl(2), F_SETLK) ends with its process; flock(2) would be kept by a forked child that outlives it.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise JournalError(path, "it is not a regular file")
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise JournalError(path, "another process has it open") from error
    if not os.path.samestat(status, path.stat()):  # its owner compacted it while we opened it
        raise JournalError(path, "another process has it open")


def _recover(descriptor: int, path: Path, replies: Replies) -> tuple[int, int]:
    """Reads the file into ``replies`` and cuts it where reading ended. Returns the bytes kept and those cut off.

    Raises JournalError where the file is no journal of this version.
    """
    size = os.fstat(descriptor).st_size
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        head = file.read(len(_HEAD))
        if head == _HEAD:
            end, problem = _read_records(file, size, replies)
        elif _HEAD.startswith(head):  # new, or its maker was killed on the way
            end, problem = 0, "its head is cut short"
        elif len(head) == len(_HEAD) and head.startswith(_MAGIC):
            (version,) = _VERSION_FIELD.unpack(head[len(_MAGIC) :])
            raise JournalError(path, f"it is of version {version}, and this program reads version {_VERSION}")
        else:
            raise JournalError(path, f"it does not begin as a journal does but with {head!r}")
    if end < size:
        figures = {"path": str(path), "kept_bytes": end, "cut_bytes": size - end, "replies": len(replies)}
        log.warning("journal cut after its last whole record", **figures, problem=problem)
        os.ftruncate(descriptor, end)
    if end == 0:
        _write_all(descriptor, _HEAD)
    return max(end, len(_HEAD)), size - end


def _read_records(file: BinaryIO, size: int, replies: Replies) -> tuple[int, str]:
    """Applies records until the first that is not whole; returns where it begins (``size``: none), and why."""
    end = file.tell()
    while end < size:
        head = file.read(_RECORD_HEAD.size)
        if len(head) < _RECORD_HEAD.size:
            return end, f"a record's head is cut short to {len(head)} bytes"
        length, digest = _RECORD_HEAD.unpack(head)
        left = size - end - _RECORD_HEAD.size
        if length > left:  # checked before that much is allocated
            return end, f"a record claims {length} bytes where {left} are left"
        body = file.read(length)
        if xxhash.xxh3_64_intdigest(body) != digest:
            return end, f"the digest of a record of {length} bytes differs"
        if not _apply(body, replies):
            return end, f"a record of {length} bytes is none of this version"
        end += _RECORD_HEAD.size + length
    return end, ""


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
    body: bytes = msgpack.packb((kind, *fields), unicode_errors="surrogatepass")
    return _RECORD_HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def _records_of(replies: Replies) -> Iterator[bytes]:
    for sender, before_epoch, floors in replies.floors():
        yield _record(_Kind.FORGET, sender, before_epoch)
        for epoch, floor in floors:
            yield _record(_Kind.SETTLE, sender, epoch, floor)
    for key, reply in replies.items():
        yield _record(_Kind.PUT, *key, reply)


def _write_anew(path: Path, records: Iterable[bytes]) -> tuple[int, int]:
    """A new file with these records, claimed and open for appending, and its size. Raises OSError."""
    path.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        chunk, chunk_bytes, size = [_HEAD], len(_HEAD), 0
        for record in records:
            chunk.append(record)
            chunk_bytes += len(record)
            if chunk_bytes >= _CHUNK_BYTES:
                _write_all(descriptor, b"".join(chunk))
                size += chunk_bytes
                chunk, chunk_bytes = [], 0
        _write_all(descriptor, b"".join(chunk))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, size + chunk_bytes


def _write_all(descriptor: int, content: bytes) -> None:
    """One write(2), and more only where that took less than all. Raises OSError; a part may have been written."""
    written = os.write(descriptor, content)
    while written < len(content):
        written += os.write(descriptor, memoryview(content)[written:])
