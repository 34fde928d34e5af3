"""The sandbox ``rex``: seconds of a short command at one server of SWE-ReX that other workers' long commands share.

A server computes one request at a time, so every request of a command waits for those of the other workers: their looks
for the end of commands that run in the background. One real server on this machine; each worker is a ``RexSandbox`` as
a rollout worker has it. The commands of others sleep, and take no CPU time. The keys:

    short_s      seconds of ``sleep 0.3`` by one worker alone, and ``beside_1_s``, ``beside_3_s``, ``beside_7_s``: while
                 so many others wait for commands that run for long
    bare_s       seconds of one empty request, a process of ``true`` at the server
    late_s       from the end of a command of 10 s until its worker has its result, alone
    rounds       every round's

Also: ``versions``, ``settings``. It needs ``pip install 'flexmarl[sandbox]' swe-rex``; times depend on the machine.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import httpx2
from rich.console import Console
from rich.table import Table

from flexmarl.actors.environments.sandboxes.rex_sandbox import RexSandbox
from flexmarl.core.base.task_groups import first_error
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.bench.results import result_of

_START_S: Final = 60.0
_LIMIT_S: Final = 611.0
_SLEEPERS: Final = (0, 1, 3, 7)


@dataclass(frozen=True, slots=True)
class Options:
    """``commands``: short ones of which the mean is taken. ``long_s``: of the command whose end is looked for."""

    rounds: int = 3
    commands: int = 4
    short_s: float = 0.3
    long_s: float = 10.0


@asynccontextmanager
async def running_server(folder: Path, key: str) -> AsyncIterator[str]:
    """The address of a server of SWE-ReX, as its users start it, that answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "swerex.server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--auth-token",
        key,
    ]
    process = _start(folder, command)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx2.AsyncClient(headers={"X-API-Key": key}) as client, asyncio.timeout(_START_S):
            while True:
                with contextlib.suppress(httpx2.TransportError):
                    if (await client.get(f"{url}/is_alive")).status_code == 200:
                        break
                if process.poll() is not None:
                    raise RuntimeError(
                        f"swerex.server has ended: {(folder / 'server.log').read_text()[-500:]}"
                    )
                await asyncio.sleep(0.05)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _start(folder: Path, command: list[str]) -> "subprocess.Popen[bytes]":
    with (folder / "server.log").open("wb") as log:
        environment = {**os.environ, "TMPDIR": str(folder)}
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


async def played(options: Options) -> dict[str, float]:
    """The seconds of a round."""
    key = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="sandbox") as folder:
        async with running_server(Path(folder), key) as url:
            figures = {"bare_s": await _bare_s(url, key, options)}
            for sleepers in _SLEEPERS:
                name = f"beside_{sleepers}_s" if sleepers else "short_s"
                figures[name] = await _short_s(url, key, sleepers, options)
            began = time.perf_counter()
            await _run(url, key, options.long_s)
            return figures | {"late_s": time.perf_counter() - began - options.long_s}


async def _bare_s(url: str, key: str, options: Options) -> float:
    async with httpx2.AsyncClient(headers={"X-API-Key": key}) as client:
        began = time.perf_counter()
        for _ in range(options.commands):
            answer = await client.post(
                f"{url}/execute", json={"command": ["true"], "timeout": 30, "cwd": "/"}
            )
            assert answer.status_code == 200, answer.text
        return (time.perf_counter() - began) / options.commands


async def _short_s(url: str, key: str, sleepers: int, options: Options) -> float:
    """Seconds of a short command beside so many that do not end meanwhile."""
    with first_error():
        async with asyncio.TaskGroup() as tasks:
            long = [tasks.create_task(_run(url, key, _LIMIT_S)) for _ in range(sleepers)]
            await _wait_begun(sleepers)
            began = time.perf_counter()
            for _ in range(options.commands):
                await _run(url, key, options.short_s)
            seconds = (time.perf_counter() - began) / options.commands
            for task in long:
                task.cancel()
    return seconds


async def _wait_begun(sleepers: int) -> None:
    """Waits until so many commands sleep: the server reports none before its end."""
    while _sleepers() < sleepers:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def _sleepers() -> int:
    """The processes of this machine that sleep for the limit's time."""
    count = 0
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            count += line.read_bytes().split(b"\0")[:2] == [b"sleep", f"{_LIMIT_S:g}".encode()]
    return count


async def _run(url: str, key: str, sleep_s: float) -> None:
    sandbox = RexSandbox([url], key, retries=0, queue_timeout_s=_LIMIT_S)
    try:
        result = await sandbox.run(["sleep", f"{sleep_s:g}"], {}, 2 * _LIMIT_S)
        assert result.status == 0, result
    finally:
        await sandbox.close()


def of_rounds(seed: int, rounds: int, *, quick: bool) -> Callable[[Report], dict[str, Any]]:
    """The measurement of ``rounds`` rounds, which have no seed. ``quick``: of fewer commands."""
    return partial(measure, Options(rounds, 1, 0.3, 1.0) if quick else Options(rounds))


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured. It
    starts an event loop, so none may run in this thread."""
    rounds = []
    for number in range(options.rounds):
        report(f"round {number}")
        rounds.append({key: rounded(value) for key, value in asyncio.run(played(options)).items()})
    means = {key: fmean(line[key] for line in rounds) for key in rounds[0]}
    return result_of(options, means, rounds=rounds)


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the result as a table."""
    keys = ("short_s", *(f"beside_{sleepers}_s" for sleepers in _SLEEPERS[1:]), "bare_s", "late_s")
    table = Table(*(key.removesuffix("_s") for key in keys), title="seconds of a command at one server")
    for line in result["rounds"]:
        table.add_row(*(f"{line[key]:g}" for key in keys))
    console.print(table)
