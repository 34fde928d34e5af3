"""Processes that a test starts, and their end: also that of those whose parent has died."""

import contextlib
import ctypes
import os
import time
from typing import Final

import psutil

_SET_CHILD_SUBREAPER: Final = 36
_SIGNALS_S: Final = 10.0


def adopt_orphans() -> None:
    """From now on a descendant whose parent dies is a child of this process: none is lost from sight, also if it has
    begun a session of its own, as actors do."""
    # prctl(2). A process group would not do: each actor leaves it.
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants() -> list[psutil.Process]:
    """The living descendants of this process, those that it has adopted among them."""
    living = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def wait_ended(timeout_s: float) -> list[str]:
    """Waits until no descendant is left; returns the command lines of those that are left after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while (processes := descendants()) and time.monotonic() < deadline:
        time.sleep(0.05)
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            lines.append(" ".join(process.cmdline())[:120])
    return lines


def kill_descendants() -> None:
    """Kills all descendants of this process, and waits for their ends."""
    deadline = time.monotonic() + _SIGNALS_S
    # Again and again: one that is killed may have started another just before.
    while (processes := descendants()) and time.monotonic() < deadline:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=1.0)
    _reap()


def _reap() -> None:
    """Takes the exit statuses of adopted processes that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
