"""Locks of single bytes of a file, held by an open file description: Linux's open file description locks (fcntl(2)).

The kernel removes a lock with the last reference to the description, and a memory mapping is one. So a lock ends with
the mapping that it protects, or with the process, also after ``kill -9``. Two descriptions of one process exclude each
other as those of two processes do. The byte need not exist.
"""

import errno
import fcntl
import os
import struct

# struct flock of 64-bit Linux: type, whence, start, length, process (0: the description holds the lock).
_FLOCK = struct.Struct("hhqqi4x")


def try_lock(descriptor: int, byte: int, *, exclusive: bool) -> bool:
    """Locks ``byte`` and returns True, or returns False at once if another description's lock excludes it."""
    try:
        _set(descriptor, byte, fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(descriptor: int, byte: int) -> None:
    """Removes this description's lock, if it has one."""
    _set(descriptor, byte, fcntl.F_UNLCK)


def unlock_all(descriptor: int) -> None:
    """Removes all locks of this description."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))


def is_locked(descriptor: int, byte: int) -> bool:
    """True if another description holds a lock of ``byte``, of either kind."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    lock_type: int = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, request))[0]
    return lock_type != fcntl.F_UNLCK


def _set(descriptor: int, byte: int, kind: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
