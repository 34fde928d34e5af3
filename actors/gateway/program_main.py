"""Becomes a program that ends with its parent: ``python -I -S program_main.py PARENT PROGRAM [ARGUMENT ...]``.

It is a program of its own and not a function that runs between fork and exec: there the parent's threads may hold
locks that no thread of this process would release.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_NOT_TO_BE_STARTED = 127


def main() -> None:
    """Replaces this process by the program. A program that can't be started costs status 127, as in a shell."""
    _, parent, *command = sys.argv
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before that
        return
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(_NOT_TO_BE_STARTED)


if __name__ == "__main__":
    main()
