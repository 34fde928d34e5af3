"""The limit of open files (RLIMIT_NOFILE). libzmq aborts the process if it meets it (``epoll.cpp``, ``signaler.cpp``):
so there must be room before a socket is made."""

import errno
import resource
from contextlib import suppress
from pathlib import Path

from ..telemetry import BoundedLog, get_logger

log = BoundedLog(get_logger(__name__))

# Descriptors of a context with its threads, a listening socket and a gate; of a connection with its monitor. Measured
# with libzmq 4.3.5: 11 and 4.
FOR_A_WIRE = 16
FOR_A_CONNECTION = 6
# For everything else that happens at the same time, such as connections that peers make.
_RESERVE = 8
# A warning comes when so much of the limit is used.
_SCARCE = 0.9


def raise_limit() -> None:
    """Raises this process's soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # not permitted: the old limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_room(needed: int, purpose: str) -> None:
    """Raises OSError (EMFILE), and logs it, if this process can't open ``needed`` descriptors more for ``purpose``."""
    used, limit = _count_used(), _limit()
    if used + needed + _RESERVE <= limit:
        return
    problem = f"{used} of {limit} file descriptors are in use: too few are left {purpose}"
    remedy = f"raise the limit before the start (ulimit -n {2 * limit}), or use fewer systems and connections"
    log.error("too few file descriptors are left", purpose=purpose, used=used, limit=limit, next=remedy)
    raise OSError(errno.EMFILE, f"{problem}; {remedy}")


def warn_if_scarce() -> None:
    """Logs a warning if most descriptors are used, among others by connections that peers have made."""
    used, limit = _count_used(), _limit()
    if used > _SCARCE * limit:
        log.warning(
            "few file descriptors are left: further connections will be refused",
            used=used, limit=limit, next=f"raise the limit before the start (ulimit -n {2 * limit})",
        )  # fmt: skip


def _limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if soft == resource.RLIM_INFINITY else soft


def _count_used() -> int:
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1  # without the one for reading that folder
    except OSError as error:
        return _limit() if error.errno == errno.EMFILE else 0  # 0: a system without that folder
