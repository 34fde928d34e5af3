"""Runs a program and ends all that it leaves behind: ``python -I -S program_main.py PARENT GRACE_S PROGRAM [ARGUMENT
...]``, where PARENT is the process that starts this one.

    PARENT ── this process ── the program ── its children, and theirs, in whichever group or session

Orphans below this process become its children (PR_SET_CHILD_SUBREAPER), so it can kill them all when the program has
ended. SIGTERM ends the program: the group gets SIGTERM, and all get SIGKILL after
GRACE_S seconds, or at once if the parent has ended, or asks again. Its exit is the program's, by status or by signal.

It is a program of its own and not a function that runs between fork and exec: there the parent's threads may hold
locks that no thread of this process would release.
"""

import ctypes
import os
import resource
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_NOT_TO_BE_STARTED = 127
_AWAITED = (signal.SIGCHLD, signal.SIGTERM)


def main() -> None:
    """Ends this process in the way of the program."""
    _, parent, grace_s, *command = sys.argv
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it ended before that
        return
    program = os.fork()
    if not program:
        _become(command)
    ended = _wait(program, float(grace_s), int(parent))
    _kill_descendants(ended)
    _end_as(ended[program])


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)


def _become(command: list[str]) -> None:
    """Replaces this process by the program. A program that can't be started costs status 127, as in a shell."""
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(_NOT_TO_BE_STARTED)


def _wait(program: int, grace_s: float, parent: int) -> dict[int, int]:
    """The exits by process, as of ``os.waitpid``, once the program has ended, or was to end and has not in time."""
    ended: dict[int, int] = {}
    while program not in ended and signal.sigwait(_AWAITED) == signal.SIGCHLD:
        _reap(ended)
    if program in ended or os.getppid() != parent:
        return ended
    _signal_group(program)
    end_s = time.monotonic() + grace_s
    while program not in ended and (left_s := end_s - time.monotonic()) > 0:
        event = signal.sigtimedwait(_AWAITED, left_s)
        if event is not None and event.si_signo == signal.SIGTERM:
            break
        _reap(ended)
    return ended


def _signal_group(program: int) -> None:
    try:
        os.killpg(program, signal.SIGTERM)
    except ProcessLookupError:  # it has not made its group yet
        os.kill(program, signal.SIGTERM)


def _reap(ended: dict[int, int]) -> None:
    try:
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = child[1]
    except ChildProcessError:
        pass


def _kill_descendants(ended: dict[int, int]) -> None:
    """Kills all processes that the program has left. Those of a killed child are children of this process before the
    child's exit can be seen."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                for child in _children():
                    os.kill(child, signal.SIGKILL)
                pid, status = os.waitpid(-1, 0)
            ended[pid] = status
        except ChildProcessError:
            return


def _children() -> list[int]:
    """The processes whose parent is this one. No other can take their numbers: they are not reaped yet."""
    with os.scandir("/proc") as entries:
        return [
            int(entry.name) for entry in entries if entry.name.isdigit() and _parent(entry) == os.getpid()
        ]


def _parent(process: "os.DirEntry[str]") -> int:
    """The parent of a process; 0 if it has ended."""
    try:
        stat = os.open(f"{process.path}/stat", os.O_RDONLY)
        try:
            return int(os.read(stat, 4096).rpartition(b")")[2].split()[1])
        finally:
            os.close(stat)
    except OSError:
        return 0


def _end_as(status: int) -> None:
    """Ends this process in the way of ``status``, as of ``os.waitpid``."""
    if not os.WIFSIGNALED(status):
        os._exit(os.waitstatus_to_exitcode(status))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
