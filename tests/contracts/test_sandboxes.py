"""The contract of sandboxes: a command has its files and a deadline, and leaves nothing; here, and behind a server."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from flexmarl.actors import run_in_sandbox
from flexmarl.actors.environments.process_pool import Processes
from flexmarl.actors.environments.sandboxes.sandbox import Sandbox, current_sandbox
from flexmarl.actors.environments.sandboxes.sandbox_config import LocalSandboxConfig, RexSandboxConfig
from flexmarl.actors.errors import SandboxFailed
from flexmarl.core.durable.files import replace_private

from ..patience import PATIENCE_S

KEY = "a-key-of-the-test"
PROGRAM = "import sys; print(open('in/text').read()); print('problem', file=sys.stderr); sys.exit(3)"


@dataclass
class Server:
    """A server of SWE-ReX, as its users start it."""

    process: "subprocess.Popen[bytes]"
    url: str

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start_server(folder: Path) -> Server:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "swerex.server", "--host", "127.0.0.1", "--port", str(port), "--auth-token", KEY,
    ]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True)
    return Server(process, f"http://127.0.0.1:{port}")


async def answers(url: str) -> None:
    """Waits for the server."""
    async with httpx2.AsyncClient(headers={"X-API-Key": KEY}) as client, asyncio.timeout(PATIENCE_S):
        while True:
            try:
                if (await client.get(f"{url}/is_alive")).status_code == 200:
                    return
            except httpx2.TransportError:
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    server = start_server(folder)
    yield server
    server.end()
    assert not [*folder.iterdir()], "commands leave no folder"


def rex(folder: Path, *urls: str, **settings: Any) -> Sandbox:
    replace_private(folder / "key", KEY.encode())
    config = RexSandboxConfig(urls=urls, key_file=str(folder / "key"), **settings)
    return config.sandbox(unused, folder, run_blocking)


async def unused(*_: object) -> None:
    raise AssertionError("a server computes")


async def run_blocking(work: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.to_thread(work, *args)


@pytest.fixture(params=["local", "rex"])
async def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Sandbox]:
    processes = Processes(2)
    if request.param == "local":
        sandbox = LocalSandboxConfig().sandbox(processes.run, tmp_path / "sandbox", run_blocking)
    else:
        server: Server = request.getfixturevalue("server")
        await answers(server.url)
        sandbox = rex(tmp_path, server.url)
    current_sandbox.set(sandbox)
    yield sandbox
    await sandbox.close()
    await processes.close()


async def test_a_command_has_its_files_and_gives_its_streams_and_status(sandbox: Sandbox) -> None:
    files = {"in/text": "äöü\n", "program.py": PROGRAM}
    result = await run_in_sandbox([sys.executable, "program.py"], files=files, timeout_s=PATIENCE_S)
    assert (result.status, result.stdout, result.stderr) == (3, "äöü\n\n", "problem\n")


async def test_two_commands_share_no_file_and_leave_none(sandbox: Sandbox) -> None:
    script = "import os; print(os.getcwd(), os.listdir())"
    command = [sys.executable, "-c", script]
    both = await asyncio.gather(
        *(run_in_sandbox(command, files={name: ""}, timeout_s=PATIENCE_S) for name in ("one", "two"))
    )
    folders = [Path(result.stdout.split(" ", 1)[0]) for result in both]
    assert folders[0] != folders[1] and not any(folder.exists() for folder in folders)
    assert [result.stdout.split(" ", 1)[1] for result in both] == ["['one']\n", "['two']\n"]


async def test_a_long_output_keeps_its_end(sandbox: Sandbox) -> None:
    result = await run_in_sandbox(
        [sys.executable, "-c", "print('a' * 100_000 + 'end')"], timeout_s=PATIENCE_S
    )
    assert result.stdout.endswith("aend\n") and len(result.stdout) == 64 << 10


async def test_a_command_that_hangs_is_killed_and_named(sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutError, match=r"^sleep took longer than timeout_s=0\.5 in its sandbox$"):
        await run_in_sandbox(["sleep", "1000"], timeout_s=0.5)
    assert (await run_in_sandbox(["true"], timeout_s=PATIENCE_S)).status == 0, "its place is free"


async def test_a_cancelled_command_ends_at_once(sandbox: Sandbox, tmp_path: Path) -> None:
    running, process = await begin_sleeping(sandbox, tmp_path)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await gone(process)
    assert (await run_in_sandbox(["true"], timeout_s=PATIENCE_S)).status == 0, "its place is free"


async def begin_sleeping(sandbox: Sandbox, folder: Path) -> "tuple[asyncio.Future[Any], psutil.Process]":
    """A command that sleeps the first time that it runs, and its process."""
    note = folder / "process"
    script = (
        f"import os, pathlib, time; note = pathlib.Path({str(note)!r}); again = note.exists(); "
        "new = note.with_suffix('.new'); new.write_text(str(os.getpid())); new.replace(note); "
        "time.sleep(0 if again else 1000)"
    )
    run: Awaitable[Any] = sandbox.run([sys.executable, "-c", script], {}, PATIENCE_S)
    running = asyncio.ensure_future(run)
    async with asyncio.timeout(PATIENCE_S):
        while not note.exists():
            await asyncio.sleep(0.01)
    return running, psutil.Process(int(note.read_text()))


async def gone(process: psutil.Process) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)


async def test_a_program_that_is_missing_is_named(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFailed, match="no-such-program"):
        await run_in_sandbox(["no-such-program"], timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("command", "files", "problem"),
    [
        ([], {}, "must be a list of texts"),
        (["true"], {"../other": ""}, "'../other' is not the name of a file"),
        (["true"], {"/etc/x": ""}, "is not the name of a file"),
    ],
)
async def test_other_commands_and_files_are_refused(
    sandbox: Sandbox, command: list[str], files: dict[str, str], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        await run_in_sandbox(command, files=files)


async def test_a_server_that_is_lost_costs_a_command_again_at_the_next(
    server: Server, tmp_path: Path
) -> None:
    await answers(server.url)
    lost = start_server(tmp_path)
    await answers(lost.url)
    sandbox = rex(tmp_path, lost.url, server.url)
    running, process = await begin_sleeping(sandbox, tmp_path)
    lost.end()
    assert (await running).status == 0
    await gone(process)
    await sandbox.close()


async def test_a_server_that_is_not_there_or_has_another_key_is_named(server: Server, tmp_path: Path) -> None:
    await answers(server.url)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = rex(tmp_path, f"http://127.0.0.1:{free.getsockname()[1]}", retries=1)
        with pytest.raises(SandboxFailed, match=r"can't be reached: ConnectError.*; tried 2 times"):
            await nowhere.run(["true"], {}, PATIENCE_S)
    await nowhere.close()
    replace_private(tmp_path / "wrong", b"another-key")
    config = RexSandboxConfig(urls=(server.url,), key_file=str(tmp_path / "wrong"))
    stranger = config.sandbox(unused, tmp_path, run_blocking)
    with pytest.raises(SandboxFailed, match=rf"{server.url}/execute answers with status"):
        await stranger.run(["true"], {}, PATIENCE_S)
    await stranger.close()
