"""One version's memory: a file that its writer and its readers map.

    page 0    magic | capacity | generation, version, size in bytes
    payload   the tensors, ``capacity`` bytes
    table     xxh3_64 of every ``CHUNK_BYTES`` of the payload

The generation is a sequence lock: odd while the block is written, even when it is published, never repeated. A reader
that finds the generation of its handle before and after copying has copied exactly that version. Generations are
aligned machine words stored by one instruction. x86-64 keeps stores and loads in order; on other machines the digests
detect a mix of versions.

Bytes of page 0 are locked: ``OWNER`` by the process that made the file, as long as it lives; ``USE``
shared by each reader that uses the memory in place, exclusively by a writer. A block without tensors orders the use of
memory elsewhere: there ``OPEN`` is locked by each process that has that memory open, and one byte more by each user,
whose process id the payload has.

A lock is held by an open file description (Linux's open file description locks, fcntl(2)). The kernel removes it with
the last reference to the description, and a memory mapping is one. So a lock ends with the mapping that it protects, or
with the process, also after ``kill -9``. Two descriptions of one process exclude each other as those of two processes
do. The byte need not exist.

The module works on bytes, without torch.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ..errors import ArenaSpace, ForeignHandle

CHUNK_BYTES: Final = 1 << 20
# Bytes to lock. Not flock(2), which locks the whole file; not POSIX locks (F_SETLK), which belong to the process: two
# transports of one would not exclude each other, and any close of the file would end the locks of all.
OWNER: Final = 0
USE: Final = 1
OPEN: Final = 2
_FIRST_USER: Final = 16
_USERS: Final = 64

_PAGE: Final = 4096
_MAGIC: Final = int.from_bytes(b"flexblk1", "little")
_CAPACITY, _GENERATION, _VERSION, _SIZE = 1, 8, 9, 10  # words of page 0
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.arena")
_OPEN_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_LIBC: Final = ctypes.CDLL(None, use_errno=True)  # its calls release the GIL
_POPULATED_AT_ONCE: Final = 16 << 20
# struct flock of 64-bit Linux: type, whence, start, length, process (0: the description holds the lock).
_FLOCK = struct.Struct("hhqqi4x")

Share = Callable[[int, Callable[[Iterator[int]], None]], None]
"""Calls a function in several threads, each time with an iterator of its own: these divide 0 .. count - 1."""


def free_bytes(directory: Path) -> int:
    """Free bytes for this user in the file system of ``directory``."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def is_block_name(name: str) -> bool:
    """True for the plain name of a block's file: it leads to no other directory."""
    return _NAME.fullmatch(name) is not None


def file_bytes(capacity: int) -> int:
    """The size of the file of a block whose payload has ``capacity`` bytes, a multiple of a page."""
    return _PAGE + capacity + _whole_pages(8 * -(-capacity // CHUNK_BYTES))


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE


class Block:
    """A mapped block. ``memory``: the whole file; unmapped with the last reference to it or to a view of it.

    ``payload``: the bytes of the tensors. ``table``: a 64-bit word for the digest of each chunk.
    """

    def __init__(self, directory: Path, name: str, memory: mmap.mmap, descriptor: int | None) -> None:
        self.directory = directory
        self.name = name
        self.memory = memory
        self._descriptor = descriptor
        whole = memoryview(memory)
        self._words = whole[:_PAGE].cast("Q")
        self.capacity = self._words[_CAPACITY]
        self.payload = whole[_PAGE : _PAGE + self.capacity]
        self.table = whole[_PAGE + self.capacity :].cast("Q")
        self._processes = whole[_PAGE : _PAGE + self.USERS_BYTES].cast("Q")
        self._user: int | None = None

    USERS_BYTES: Final = 512
    """Capacity of a block without tensors, whose ``users`` are of interest."""
    START: Final = _PAGE
    """The first byte of the payload in ``memory``."""

    @classmethod
    def create(cls, directory: Path, name: str, capacity: int) -> "Block":
        """Creates and maps a new file of zeros (mode 0600) for at least ``capacity`` bytes; this process is its owner.

        All its memory is reserved, so that writing can't fail for lack of memory. Raises ArenaSpace if it does not fit,
        and leaves no file behind if it raises.
        """
        capacity = _whole_pages(max(capacity, 1))
        size = file_bytes(capacity)
        free = free_bytes(directory)
        if size > free:
            raise ArenaSpace(size, free, str(directory))
        path = directory / name
        descriptor = os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Locked before anything else: a file without a living owner is removed by others, perhaps just before.
            if not try_lock(descriptor, OWNER, exclusive=True) or not os.fstat(descriptor).st_nlink:
                raise FileExistsError(errno.EEXIST, "taken for an abandoned file", str(path))
            # Without this, a full file system would kill the writer with SIGBUS in the middle of a copy.
            os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            if error.errno == errno.ENOSPC:
                raise ArenaSpace(size, free_bytes(directory), str(directory)) from error
            raise
        words = memoryview(memory)[:_PAGE].cast("Q")
        words[_CAPACITY] = capacity
        words[0] = _MAGIC
        return cls(directory, name, memory, descriptor)

    @classmethod
    def open(cls, directory: Path, name: str, *, writable: bool = False) -> "Block":
        """Maps another process's block. ``name`` comes from the network and must be that of a file in ``directory``.

        Only with ``writable`` may ``begin`` be called. Raises ForeignHandle if it names anything else,
        FileNotFoundError if the file was removed.
        """
        descriptor, size = _open_file(directory, name)
        try:
            # Mapped writable, because torch has no read-only tensors; readers don't write, and keep the map to
            # themselves.
            memory = _check_header(mmap.mmap(descriptor, size), directory, name)
            return cls(directory, name, memory, os.dup(descriptor) if writable else None)
        finally:
            os.close(descriptor)

    @classmethod
    def open_in_use(cls, directory: Path, name: str) -> "Block | None":
        """Maps another process's block so that nothing overwrites it as long as a view of ``memory`` exists.

        Returns None if it is being written. This process alone sees its own writes to ``memory``.
        Raises as ``open`` does.
        """
        descriptor, size = _open_file(directory, name)
        try:
            if not try_lock(descriptor, USE, exclusive=False):
                return None
            # The mapping has a reference to this file description, and so keeps the lock.
            memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
            return cls(directory, name, _check_header(memory, directory, name), None)
        finally:
            os.close(descriptor)

    def hold(self) -> int | None:
        """A descriptor that keeps the block as it is until it is closed; None if it is being written, or gone.

        Unlike ``use`` it excludes this process too, and many may be held at a time.
        """
        try:
            descriptor, _ = _open_file(self.directory, self.name)
        except FileNotFoundError:
            return None
        if try_lock(descriptor, USE, exclusive=False):
            return descriptor
        os.close(descriptor)
        return None

    @property
    def address(self) -> int:
        """The address of ``memory`` in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    @property
    def is_writable(self) -> bool:
        """True for the process that made the block, and after ``open`` with ``writable``, until ``close``."""
        return self._descriptor is not None

    @property
    def generation(self) -> int:
        """Odd while the block is written, and after an unfinished write; even when it is published."""
        return self._words[_GENERATION]

    @property
    def version(self) -> int:
        """The version that was published last, or that is being written."""
        return self._words[_VERSION]

    @property
    def size_bytes(self) -> int:
        """Bytes of the payload that the published version uses."""
        return self._words[_SIZE]

    def begin(self, version: int, size_bytes: int) -> bool:
        """Marks the block as being written; False, and nothing is changed, if a reader uses it or another writes it.

        The version is stored first, so that it is seen with the generation.
        """
        if self._descriptor is None or not try_lock(self._descriptor, USE, exclusive=True):
            return False
        # The order matters, as readers take no lock. Version: a reader that finds another generation than its handle's
        # reports the version beside it as the newest, so it must be there before. Generation: odd, so that the bytes
        # count no more. Size: last, as readers compare it with the bytes of an even generation.
        self._words[_VERSION] = version
        self._words[_GENERATION] = self.generation | 1
        self._words[_SIZE] = size_bytes
        return True

    def commit(self) -> int:
        """Publishes the bytes written since ``begin`` and returns their generation."""
        # The version would not do as the sign: a run that continues from a checkpoint sets one again, with other bytes.
        generation = self.generation + 1
        self._words[_GENERATION] = generation
        self.end()
        return generation

    def end(self) -> None:
        """Ends a use or a writing; without ``commit`` before it the block stays unreadable until the next writing."""
        if self._descriptor is not None:
            unlock(self._descriptor, USE)
            if self._user is not None:
                unlock(self._descriptor, _FIRST_USER + self._user)
                self._user = None

    def revoke(self) -> None:
        """Makes every handle of this block stale."""
        # To the next even number, not to an odd one: no process writes it, it is free.
        self._words[_GENERATION] = (self.generation | 1) + 1

    def use(self) -> bool:
        """Locks the block against writers until ``end``; False if it is being written. ``users`` has this process."""
        if self._descriptor is None or not try_lock(self._descriptor, USE, exclusive=False):
            return False
        # The lock of a file description names no process (F_OFD_GETLK gives -1), and several share a byte: for messages
        # each user takes a byte of its own too, and leaves its id.
        for number in range(_USERS):
            if try_lock(self._descriptor, _FIRST_USER + number, exclusive=True):
                self._user = number
                self._processes[number] = os.getpid()
                break
        return True

    def users(self) -> list[int]:
        """Ids of the processes that ``use`` it, for messages; those of the first 64."""
        descriptor = self._descriptor
        if descriptor is None:
            return []
        used = (number for number in range(_USERS) if is_locked(descriptor, _FIRST_USER + number))
        return sorted({self._processes[number] for number in used})

    def hold_open(self) -> None:
        """Makes ``is_open`` true for the others until ``close``."""
        if self._descriptor is not None:
            try_lock(self._descriptor, OPEN, exclusive=False)

    @property
    def is_open(self) -> bool:
        """True while another process uses it, writes it or holds it open."""
        return self._descriptor is not None and any(is_locked(self._descriptor, byte) for byte in (USE, OPEN))

    @property
    def has_owner(self) -> bool:
        """False if the process that made it, another one, has ended."""
        return self._descriptor is not None and is_locked(self._descriptor, OWNER)

    @property
    def is_linked(self) -> bool:
        """False if its owner has removed the file."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_nlink > 0

    @property
    def in_use(self) -> bool:
        """True while a reader uses the memory in place, or another process writes it."""
        return self._descriptor is not None and is_locked(self._descriptor, USE)

    def populate(self, start: int, end: int) -> None:
        """Gives the pages of these bytes of ``memory`` to this process now, so that no later write waits for them.

        Raises OSError if the kernel refuses it.
        """
        begin = start // _PAGE * _PAGE
        if _LIBC.madvise(
            ctypes.c_void_p(self.address + begin), ctypes.c_size_t(end - begin), _MADV_POPULATE_WRITE
        ):
            number = ctypes.get_errno()
            if number != errno.EINVAL:  # a kernel older than 5.14: the first writes touch the pages
                raise OSError(number, os.strerror(number), self.name)

    def unlink(self) -> None:
        """Removes the file; processes that have mapped it keep the memory."""
        (self.directory / self.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Ends the ownership and all uses of this object. Views of the memory stay valid."""
        if self._descriptor is not None:
            unlock_all(self._descriptor)  # else the mapping would keep them
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        # Nobody closes a mapping of memory that another process lends: it is only forgotten. Without ``close``, which
        # ends locks: a fork that drops its copy must not end those of its parent.
        if self._descriptor is not None:
            os.close(self._descriptor)


def populate(block: Block, share: Share) -> None:
    """Gives all pages of a block to this process, by several threads."""
    # Not by MAP_POPULATE, when the file is mapped: one thread would clear all pages, and clearing takes most of the
    # time.
    size = len(block.memory)
    count = -(-size // _POPULATED_AT_ONCE)

    def populate_parts(numbers: Iterator[int]) -> None:
        for number in numbers:
            start = number * _POPULATED_AT_ONCE
            block.populate(start, min(start + _POPULATED_AT_ONCE, size))

    share(count, populate_parts)


def _open_file(directory: Path, name: str) -> tuple[int, int]:
    """The descriptor and size of another process's file."""
    if not is_block_name(name):
        raise ForeignHandle(name, str(directory), "invalid name: needs the plain name of an arena file")
    try:
        descriptor = os.open(directory / name, _OPEN_FLAGS)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ForeignHandle(name, str(directory), f"it can't be opened: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size < 2 * _PAGE:
        os.close(descriptor)
        raise ForeignHandle(name, str(directory), "invalid arena file")
    return descriptor, status.st_size


def _check_header(memory: mmap.mmap, directory: Path, name: str) -> mmap.mmap:
    words = memoryview(memory)[:_PAGE].cast("Q")
    capacity = words[_CAPACITY]
    if words[0] != _MAGIC or capacity % _PAGE or len(memory) != file_bytes(capacity):
        raise ForeignHandle(name, str(directory), "invalid arena file")
    return memory


def remove_abandoned(directory: Path) -> list[str]:
    """Removes the files of ``directory`` whose owner has ended without removing them; returns their names.

    Files of a living owner are never touched, nor is memory that another process has mapped.
    """
    # By their locks, not by process ids in their names: an id may be another process's by now, or that of another
    # container which shares the directory.
    removed = []
    for path in directory.glob("*.arena"):
        try:
            descriptor = os.open(path, _OPEN_FLAGS | os.O_NONBLOCK)
        except OSError:  # removed meanwhile, or not a file of ours
            continue
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode) and try_lock(descriptor, OWNER, exclusive=True):
                path.unlink(missing_ok=True)
                removed.append(path.name)
        finally:
            os.close(descriptor)
    return removed


# --------------------------------------------------------------------------- locks


def try_lock(descriptor: int, byte: int, *, exclusive: bool) -> bool:
    """Locks ``byte`` and returns True, or returns False at once if another description's lock excludes it."""
    try:
        _set_lock(descriptor, byte, fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(descriptor: int, byte: int) -> None:
    """Removes this description's lock, if it has one."""
    _set_lock(descriptor, byte, fcntl.F_UNLCK)


def unlock_all(descriptor: int) -> None:
    """Removes all locks of this description."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))


def is_locked(descriptor: int, byte: int) -> bool:
    """True if another description holds a lock of ``byte``, of either kind."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    lock_type: int = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, request))[0]
    return lock_type != fcntl.F_UNLCK


def _set_lock(descriptor: int, byte: int, kind: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
