"""A program as a process group of its own, with limits of its time and its output.

    start ─> output is read, its middle is dropped ─> its end, or a limit ─> all its processes are killed

A process between this one and the program (``program_main.py``) ends all that the program leaves behind, also if this
one is killed.
"""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from ..deadline import Deadline
from ..errors import ProgramFailed

REWARDS_VARIABLE: Final = "FLEXMARL_REWARDS_FILE"
"""The variable of the environment that names the file for the program's rewards."""

MOST_OUTPUT_BYTES: Final = 256 << 20
"""A program that prints more has lost its way, and reading it takes the worker's time."""

_KEPT_BYTES: Final = 64 << 10
_MOST_REPORT_BYTES: Final = 4 << 20
_GRACE_S: Final = 2.0
_END_S: Final = 10.0
_READ_BYTES: Final = 64 << 10
_SHOWN: Final = 80


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """``command``: as a shell has it, shortened. ``status``: of its exit; minus a signal's number if one has killed it.
    ``output``: of both streams, without its middle if it is long. ``problem``: the limit for which it was killed; empty
    if there is none. ``refusal``: the last of the session that one of its calls may have got. ``report``: the content
    of its file of rewards, see ``rewards``."""

    command: str
    status: int
    output: str
    seconds: float
    problem: str = ""
    refusal: str = ""
    report: str = field(default="", repr=False)

    def check(self) -> Self:
        """Returns itself. Raises ProgramFailed for another status than 0, and if it was killed."""
        if self.status or self.problem:
            raise self.failed(self._how())
        return self

    def reported(self) -> Any:
        """The content of its file of rewards as data. Raises ProgramFailed if the program has failed, has written
        nothing, or no JSON."""
        self.check()
        if not self.report:
            raise self.failed(f"has written nothing to {REWARDS_VARIABLE}")
        try:
            return json.loads(self.report)
        except ValueError as error:
            raise self.failed(
                f"has written no JSON to {REWARDS_VARIABLE}: {error}: {self.report[:_SHOWN]!r}"
            ) from None

    def _how(self) -> str:
        if self.problem:
            return f"was killed: {self.problem}"
        if self.status < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-self.status).name} after {self.seconds:.1f} s"
        return f"ended with status {self.status} after {self.seconds:.1f} s"

    def failed(self, how: str) -> ProgramFailed:
        """The error of a program that ``how`` describes."""
        return ProgramFailed(self.command, how, self.status, self.output, self.refusal)


async def run_program(
    command: Sequence[str], variables: Mapping[str, str], folder: str | Path | None, deadline: Deadline
) -> ProgramEnd:
    """Runs a program to its end. ``variables`` are added to this process's environment. Cancellation kills it. Raises
    OSError if there is no ``folder``."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    report = os.memfd_create("rewards")  # a file that no death of this process leaves behind
    try:
        place = {REWARDS_VARIABLE: f"/proc/{os.getpid()}/fd/{report}"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(Path(__file__).with_name("program_main.py")),
            str(os.getpid()), str(_GRACE_S), *command,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True, env=_environment({**place, **variables}), cwd=folder,
        )  # fmt: skip
        problem, output = await _run_to_end(process, deadline)
        status = -signal.SIGKILL if process.returncode is None else process.returncode
        seconds = loop.time() - began_s
        text = _report(report)
    finally:
        os.close(report)
    return ProgramEnd(shown_command(command), status, output.text(), seconds, problem, report=text)


def shown_command(command: Sequence[str]) -> str:
    """For people: without its middle if it is long."""
    text = shlex.join(command)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 2 :]}"


async def _run_to_end(process: asyncio.subprocess.Process, deadline: Deadline) -> tuple[str, "_Output"]:
    """Returns the limit for which it was killed, and its output."""
    output = _Output()
    problem = ""
    reading = asyncio.create_task(output.read(process.stdout), name="output of a program")
    ended = asyncio.create_task(process.wait(), name="end of a program")
    try:
        ends: set[asyncio.Future[Any]] = {ended, output.flooded, deadline.overran}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            problem = f"it took longer than {deadline.limit_s:g} s, without the time of its models' answers"
            if output.flooded.done():
                problem = f"it printed more than {MOST_OUTPUT_BYTES >> 20} MiB"
    finally:
        await _end(process, ended, reading)
    return problem, output


async def _end(
    process: asyncio.subprocess.Process, ended: "asyncio.Task[int]", reading: "asyncio.Task[None]"
) -> None:
    """Ends all processes of the program."""
    if process.returncode is None:
        process.terminate()  # the process between takes the program's time of grace
        await asyncio.wait({ended}, timeout=_GRACE_S + _END_S)
    if process.returncode is None:  # one that no signal ends: it waits for a disk
        process.kill()
        await asyncio.wait({ended}, timeout=_END_S)
    await asyncio.wait({reading}, timeout=_GRACE_S)
    for task in (reading, ended):
        task.cancel()


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with ``variables``. No proxy stands between a program and its gateway."""
    local = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1,localhost")))
    return {**os.environ, "NO_PROXY": local, "no_proxy": local, **variables}


def _report(file: int) -> str:
    """The content of the file of rewards. One that is too long is left out: it is not of rewards."""
    size = os.fstat(file).st_size
    return os.pread(file, size, 0).decode(errors="replace") if size <= _MOST_REPORT_BYTES else ""


class _Output:
    """The beginning and the end of what a program prints. All of it is read: a full pipe would stop the program.
    ``flooded`` is done when it has printed too much."""

    def __init__(self) -> None:
        self.flooded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
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
            if self._dropped > MOST_OUTPUT_BYTES and not self.flooded.done():
                self.flooded.set_result(None)

    def text(self) -> str:
        middle = f"\n[... {self._dropped} bytes ...]\n".encode() if self._dropped else b""
        return b"".join((self._head, middle, self._tail)).decode(errors="replace")
