"""An append-only file of records, each whole or missing: the base of every journal.

    head      16 bytes that name the kind of file | version (u32, little-endian)
    record    length (u32, little-endian) | xxh3_64 of the body (u64) | body: opaque bytes
    record    ...

``append`` takes framed records (``frame``), any number of them joined, and hands them to the kernel by one write(2)
with O_APPEND: they survive this process, not a loss of power. Opening reads all records and cuts off the bytes after
the last whole one. A replacement is written beside the file and takes its place by a rename.
"""

import fcntl
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Self

import xxhash

from ..errors import JournalError

# Why not sqlite3: it is fast enough (some 300,000 rows a second with synchronous=NORMAL), but a commit that moves its
# write-ahead log into the database takes the longer the larger the log is. So it needs a thread, and the order of the
# acknowledgements has to be kept over that thread. Here an append is one write(2) from the event loop, consumed rows
# leave by a rename, and the state that the records describe is in memory anyway: the file is never queried.

_VERSION_FIELD: Final = struct.Struct("<I")
_RECORD_HEAD: Final = struct.Struct("<IQ")
RECORD_LIMIT_BYTES: Final = 2**32 - 1


def frame(body: bytes) -> bytes:
    """The record of ``body``: at most ``RECORD_LIMIT_BYTES``, else struct.error."""
    return _RECORD_HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def chunks(records: Iterable[bytes], chunk_bytes: int) -> Iterator[bytes]:
    """``records`` joined to chunks of about ``chunk_bytes``."""
    piece: list[bytes] = []
    size_bytes = 0
    for record in records:
        piece.append(record)
        size_bytes += len(record)
        if size_bytes >= chunk_bytes:
            yield b"".join(piece)
            piece, size_bytes = [], 0
    if piece:
        yield b"".join(piece)


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of all files of a kind. ``magic``: 16 bytes."""

    magic: bytes
    version: int

    @property
    def content(self) -> bytes:
        """The bytes with which a file begins."""
        return self.magic + _VERSION_FIELD.pack(self.version)


@dataclass(frozen=True, slots=True)
class Cut:
    """The result of reading. ``problem``: the reason of ending at ``kept_bytes``; "" if that is the file's end."""

    kept_bytes: int
    cut_bytes: int
    problem: str


class RecordFile:
    """Made by ``open`` and ``begin_replacement``; for one process, and one thread at a time.

    ``size_bytes`` is the end of the last whole record: the file itself is longer after an ``append`` that failed,
    until ``trim`` or the next ``append``.
    """

    def __init__(self, path: Path, head: Head, descriptor: int, size_bytes: int, cut: Cut) -> None:
        """For ``open`` and ``begin_replacement`` only."""
        self.path = path
        self.size_bytes = size_bytes
        self.cut = cut
        self._head = head
        self._descriptor = descriptor
        self._torn = False  # behind ``size_bytes`` the file may hold part of a record

    @classmethod
    def open(cls, path: Path, head: Head, read: Callable[[bytes], bool]) -> Self:
        """Passes every record's body to ``read``, or makes the file with mode 0600. Bytes after the last whole record
        are cut off, and so are the first record that ``read`` refuses by returning False and all after it.

        Raises JournalError if ``path`` is not a file of this head, or is open in another process, OSError if it can't
        be opened, and the errors of ``read``: the file is unchanged then.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _claim(descriptor, path)
            # A process that was killed while writing a replacement has left its draft.
            _beside(path).unlink(missing_ok=True)
            cut = _recover(descriptor, path, head, read)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, head, descriptor, max(cut.kept_bytes, len(head.content)), cut)

    @property
    def is_open(self) -> bool:
        """True until ``close``, ``discard`` or the use as a replacement."""
        return self._descriptor >= 0

    def append(self, records: bytes) -> None:
        """Raises OSError if the kernel did not take all: none of them counts then, and further ones may be appended."""
        self.trim()
        self._torn = True
        _write_all(self._descriptor, records)
        self._torn = False
        self.size_bytes += len(records)

    def trim(self) -> None:
        """Cuts off the bytes that a failed ``append`` has left. Raises OSError if that fails too."""
        if self._torn:
            os.ftruncate(self._descriptor, self.size_bytes)
            self._torn = False

    def read(self, start: int, at_most_bytes: int) -> bytes:
        """The bytes from ``start`` on, within ``size_bytes``."""
        return os.pread(self._descriptor, min(at_most_bytes, self.size_bytes - start), start)

    def begin_replacement(self) -> "RecordFile":
        """An empty file beside this one, for ``replace_by`` or ``discard``.

        Raises OSError.
        """
        path = _beside(self.path)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        replacement = RecordFile(path, self._head, descriptor, 0, Cut(0, 0, ""))
        try:
            # Before it takes its place: a process that opens the path right after the rename has to find it in use.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            replacement.append(self._head.content)
        except BaseException:
            replacement.discard()
            raise
        return replacement

    def replace_by(self, other: "RecordFile") -> None:
        """``other`` becomes this file, at its path; the old content is gone. Raises OSError: nothing has changed."""
        other.path.replace(self.path)
        os.close(self._descriptor)
        self._descriptor, other._descriptor = other._descriptor, -1
        self.size_bytes, self._torn = other.size_bytes, other._torn

    def discard(self) -> None:
        """Closes and removes a file of ``begin_replacement``. Does nothing after ``replace_by``."""
        if self.is_open:
            self.close()
            with suppress(OSError):  # if not now, it is removed at opening
                self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Can be repeated."""
        if not self.is_open:
            return
        with suppress(OSError):  # if not now, it is cut off at opening
            self.trim()
        os.close(self._descriptor)
        self._descriptor = -1


def read_records(path: Path, head: Head, read: Callable[[bytes], bool]) -> Cut:
    """Passes every record's body to ``read`` as ``RecordFile.open`` does, and changes nothing: for a file that no
    process has open, since closing it here would end a lock of this process. Raises JournalError if ``path`` is not a
    file of this head, OSError, and the errors of ``read``."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        end, problem = _read_from(file, size, path, head, read)
    return Cut(end, size - end, problem if end < size else "")


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _claim(descriptor: int, path: Path) -> None:
    """Raises JournalError unless this is a file that no other process has open: two would damage each other's records.

    A POSIX lock (fcntl(2), F_SETLK) ends with its process; flock(2) would be kept by a forked child that outlives it.
    It ends with any close of the file too: no other descriptor of it is ever opened here.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise JournalError(path, "it is not a regular file")
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise JournalError(path, "another process has it open") from error
    if not os.path.samestat(status, path.stat()):  # its owner replaced it while it was being opened
        raise JournalError(path, "another process has it open")


def _recover(descriptor: int, path: Path, head: Head, read: Callable[[bytes], bool]) -> Cut:
    """Reads the file and cuts it where reading ended. Raises JournalError if it has another head."""
    size = os.fstat(descriptor).st_size
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        end, problem = _read_from(file, size, path, head, read)
    if end < size:
        os.ftruncate(descriptor, end)
    if end == 0:
        _write_all(descriptor, head.content)
    return Cut(end, size - end, problem if end < size else "")


def _read_from(
    file: BinaryIO, size: int, path: Path, head: Head, read: Callable[[bytes], bool]
) -> tuple[int, str]:
    """As ``_read_records``, with the head before them; 0 if that is not whole. Raises JournalError if it is another
    one."""
    expected = head.content
    content = file.read(len(expected))
    if content == expected:
        return _read_records(file, size, read)
    if expected.startswith(content):  # new, or its process was killed while writing the head
        return 0, "its head is cut short"
    if len(content) == len(expected) and content.startswith(head.magic):
        (version,) = _VERSION_FIELD.unpack(content[len(head.magic) :])
        raise JournalError(path, f"it is of version {version}, and this program reads version {head.version}")
    raise JournalError(path, f"it does not begin as a journal does but with {content!r}")


def _read_records(file: BinaryIO, size: int, read: Callable[[bytes], bool]) -> tuple[int, str]:
    """Reads records until the first that is not whole; returns its position (``size`` if all are whole), and the
    problem."""
    end = file.tell()
    while end < size:
        head = file.read(_RECORD_HEAD.size)
        if len(head) < _RECORD_HEAD.size:
            return end, f"a record's head is cut short to {len(head)} bytes"
        length, digest = _RECORD_HEAD.unpack(head)
        rest_bytes = size - end - _RECORD_HEAD.size
        if length > rest_bytes:  # checked before that much is allocated
            return end, f"a record claims {length} bytes, {rest_bytes} are left"
        body = file.read(length)
        if xxhash.xxh3_64_intdigest(body) != digest:
            return end, f"the digest of a record of {length} bytes differs"
        if not read(body):
            return end, f"a record of {length} bytes is invalid in this version"
        end += _RECORD_HEAD.size + length
    return end, ""


def _write_all(descriptor: int, content: bytes) -> None:
    """One write(2), and more only if that took less than all. Raises OSError; a part may have been written."""
    written = os.write(descriptor, content)
    while written < len(content):
        written += os.write(descriptor, memoryview(content)[written:])
