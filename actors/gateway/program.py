"""A program as a process group of its own, with limits of time and of kept output.

    start ─> output is read, its middle is dropped ─> its end, or the limit ─> the group is killed

All processes of its group end with it, also those that it has left behind, and those that have left its group: these
still have the session's mark in their environment.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import psutil

from ..errors import ProgramFailed

MARK: Final = "FLEXMARL_SESSION"
"""The variable of the environment that holds the session's name."""

_KEPT_BYTES: Final = 64 << 10
_GRACE_S: Final = 2.0
_END_S: Final = 10.0
_READ_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """``status``: of its exit; minus a signal's number if one has killed it. ``output``: of both streams, without its
    middle if it is long. ``overran``: it was killed, since its time had passed."""

    status: int
    output: str
    seconds: float
    overran: bool = False

    def check(self) -> Self:
        """Returns itself. Raises ProgramFailed for another status than 0."""
        if self.status or self.overran:
            raise ProgramFailed(self.status, self.output, self.seconds if self.overran else None)
        return self


async def run_program(
    command: Sequence[str], variables: Mapping[str, str], folder: str | Path | None, timeout_s: float
) -> ProgramEnd:
    """Runs a program to its end. ``variables`` are added to this process's environment. Cancellation kills it. Raises
    OSError if it can't be started in ``folder``."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(Path(__file__).with_name("program_main.py")), str(os.getpid()), *command,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        start_new_session=True, env=_environment(variables), cwd=folder,
    )  # fmt: skip
    output = _Output()
    overran = False
    reading = asyncio.create_task(output.read(process.stdout), name=f"output of {command[0]}")
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            await process.wait()
    except TimeoutError:
        if not deadline.expired():
            raise
        overran = True
    finally:
        await _end(process, variables.get(MARK, ""), reading)
    status = process.returncode
    return ProgramEnd(-1 if status is None else status, output.text(), loop.time() - began_s, overran)


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with ``variables``. No proxy stands between a program and its gateway."""
    local = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1,localhost")))
    return {**os.environ, "NO_PROXY": local, "no_proxy": local, **variables}


async def _end(process: asyncio.subprocess.Process, mark: str, reading: asyncio.Task[None]) -> None:
    """Ends all processes of the program."""
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE_S)
    _signal_group(process.pid, signal.SIGKILL)
    await asyncio.to_thread(_kill_marked, mark)
    with contextlib.suppress(TimeoutError):  # one that no signal ends: it waits for a disk
        await asyncio.wait_for(process.wait(), _END_S)
    await asyncio.wait({reading}, timeout=_GRACE_S)
    reading.cancel()


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _kill_marked(mark: str) -> None:
    """Kills the processes that have the mark, which have left the program's group."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if mark and process.environ().get(MARK) == mark:
                process.kill()


class _Output:
    """The beginning and the end of what a program prints. All of it is read: a full pipe would stop the program."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    async def read(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while chunk := await stream.read(_READ_BYTES):
            room = max(0, _KEPT_BYTES // 2 - len(self._head))
            self._head += chunk[:room]
            self._tail += chunk[room:]
            excess = max(0, len(self._tail) - _KEPT_BYTES // 2)
            del self._tail[:excess]
            self._dropped += excess

    def text(self) -> str:
        middle = f"\n[... {self._dropped} bytes ...]\n".encode() if self._dropped else b""
        return b"".join((self._head, middle, self._tail)).decode(errors="replace")
