"""Runs one test in a process of its own, which is killed with all its descendants at the limit.

The process writes each check as a line of JSON to a pipe as soon as it is made: those before a failure or the limit
stand. All other output of the test goes to a file; at the limit the test's process adds there where its threads stand.
"""

import asyncio
import faulthandler
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from .checks import Card, Check, LeftOut, TestFunction, failure
from .processes import adopt_orphans, kill_descendants
from .table import Row

_PROGRAM: Final = (
    "import sys; sys.path.append(sys.argv.pop(1)); from scripts.gpu.isolation import main; main(sys.argv[1:])"
)
_ROOT: Final = Path(__file__).parents[2]
LEFT_OUT: Final = "left out"
ENDED: Final = "ended"
_STACKS: Final = signal.SIGUSR1
_STACKS_S: Final = 10.0
_QUIET_S: Final = 1.0

Outcome = Literal["passed", "failed", "left out"]


@dataclass(frozen=True, slots=True)
class Result:
    """The checks of a test, and its seconds. ``log``: all else that it has written."""

    test: str
    checks: tuple[Check, ...]
    seconds: float
    log: Path | None = None

    @property
    def outcome(self) -> Outcome:
        if any(check.passed is False for check in self.checks):
            return "failed"
        if not self.checks or any(check.name == LEFT_OUT for check in self.checks):
            return "left out"
        return "passed"


def run_isolated(
    row: Row, card: Card, report: Callable[[Check], None], limit_s: float | None = None
) -> Result:
    """Runs a test; it fails with the check ``ended`` if it raises, dies or reaches its limit. ``report`` gets each
    check at once. ``limit_s``: another limit than the row's. The caller has called ``adopt_orphans``."""
    limit_s = limit_s or row.limit_s
    began = time.monotonic()
    if not (row.on_cpu or card.is_cuda):
        check = Check(LEFT_OUT, "needs a CUDA device")
        report(check)
        return Result(row.name, (check,), 0.0)
    log = card.folder / f"{row.name}.log"
    reading, writing = os.pipe()
    with log.open("wb") as output, os.fdopen(reading, "rb") as lines:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(_ROOT), row.import_name, card.device,
             str(card.in_folder(row.name).folder), str(card.limit_factor), str(writing)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[writing],
        )  # fmt: skip
        os.close(writing)
        try:
            checks = _read_checks(process, lines, began + limit_s, report)
            ended = _end_of(process, began + limit_s, limit_s)
            if process.poll() is None:
                _ask_for_stacks(process, log)
        finally:
            kill_descendants()
            process.wait()
    if ended is not None and not any(check.name == ENDED for check in checks):
        report(ended)
        checks.append(ended)
    return Result(row.name, tuple(checks), time.monotonic() - began, log)


def _read_checks(
    process: "subprocess.Popen[bytes]", lines: Any, deadline: float, report: Callable[[Check], None]
) -> list[Check]:
    """Reads until the process ends or the deadline. Not until the end of the pipe: a process that the test has left
    behind may have it open."""
    checks: list[Check] = []
    os.set_blocking(lines.fileno(), False)
    unread = b""
    with selectors.DefaultSelector() as selector:
        selector.register(lines, selectors.EVENT_READ)
        while True:
            is_over = process.poll() is not None or time.monotonic() >= deadline
            if selector.select(0 if is_over else 0.1):
                data = os.read(lines.fileno(), 1 << 16)
                *whole, unread = (unread + data).split(b"\n")
                for line in whole:
                    checks.append(Check(**json.loads(line)))
                    report(checks[-1])
                if data:
                    continue
                selector.unregister(lines)  # the end of the pipe: only the process is waited for
                _wait_for(process, deadline)
                return checks
            if is_over:
                return checks


def _wait_for(process: "subprocess.Popen[bytes]", deadline: float) -> None:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return


def _ask_for_stacks(process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Has a process at its limit write the stacks of its threads into its log, and waits until it is silent."""
    begins = log.stat().st_size
    process.send_signal(_STACKS)
    deadline = time.monotonic() + _STACKS_S
    size = begins
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(_QUIET_S)
        before, size = size, log.stat().st_size
        if begins < before == size:
            return


def _end_of(process: "subprocess.Popen[bytes]", deadline: float, limit_s: float) -> Check | None:
    """The check of a bad end; None for a regular one."""
    criterion = f"within {limit_s:g} s, status 0"
    if process.poll() is None:
        return Check(ENDED, f"killed at its limit of {limit_s:g} s", "", criterion, False)
    if process.returncode:
        return Check(ENDED, f"exit status {process.returncode}", "", criterion, False)
    return None


# ----------------------------------------------------------------------- in the process of the test


def main(arguments: list[str]) -> None:
    """Runs the test of a module; its checks go to a descriptor. Exits with 0, also if a check has failed."""
    module, device, folder, limit_factor, descriptor = arguments
    # A signal, not a timer of faulthandler: a timer's thread reads the stack of a thread that runs on meanwhile.
    faulthandler.register(_STACKS)
    adopt_orphans()  # the test sees which of its processes are left
    os.set_inheritable(int(descriptor), False)
    with os.fdopen(int(descriptor), "w") as lines:

        def write(check: Check) -> None:
            lines.write(f"{json.dumps(check.plain())}\n")
            lines.flush()

        run: TestFunction = importlib.import_module(module).run
        asyncio.run(_write_checks(run, Card(device, Path(folder), float(limit_factor)), write))


async def _write_checks(run: TestFunction, card: Card, write: Callable[[Check], None]) -> None:
    try:
        checks = run(card)
        if isinstance(checks, AsyncIterator):
            async for check in checks:
                write(check)
        else:
            for check in checks:
                write(check)
    except LeftOut as reason:
        write(Check(LEFT_OUT, str(reason)))
    except Exception as error:  # noqa: BLE001  # any error of a test is a failed check
        write(failure(ENDED, error))
