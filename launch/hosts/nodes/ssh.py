"""Nodes that are started on other hosts by the system's ssh.

It asks for no password (BatchMode). The run's keys go through its standard input: other users see command lines.
"""

import asyncio
import contextlib
import os
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from ....core.base.texts import listing
from ....core.durable.files import open_private
from ...errors import NodesNotStarted
from ...run.run_address import RunAddress
from .hosts_file import SshHost

_CONNECT_S: Final = 10
_END_S: Final = 5.0
_MORE_S: Final = 2.0
_LAST_LINES: Final = 5


class SshNodes:
    """``logs``: the folder for the nodes' output, ``node-NAME.log``."""

    def __init__(self, hosts: Sequence[SshHost], run: RunAddress, logs: Path) -> None:
        self._hosts = hosts
        self._run = run
        self._logs = logs
        self._processes: dict[SshHost, asyncio.subprocess.Process] = {}

    async def start(self) -> None:
        """Raises NodesNotStarted if there is no ssh."""
        for host in self._hosts:
            with (
                os.fdopen(_file_in_memory(self._run.text())) as keys,
                open_private(self._log(host), "ab") as output,
            ):
                try:
                    self._processes[host] = await asyncio.create_subprocess_exec(
                        *ssh_command(host, _node(host)),
                        stdin=keys,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                except FileNotFoundError:
                    raise NodesNotStarted(["there is no program ssh here"]) from None

    async def wait_failed(self) -> None:
        """Waits for the end of a node, and raises NodesNotStarted with all that have ended."""
        ends = [asyncio.ensure_future(process.wait()) for process in self._processes.values()]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(ends, timeout=_MORE_S)  # one mistake may concern several hosts
        finally:
            for end in ends:
                end.cancel()
        raise NodesNotStarted(
            [
                f"{host.where}: {host.name} ({host.destination}): {self._reason(host, process.returncode)}"
                for host, process in self._processes.items()
                if process.returncode is not None
            ]
        )

    def coming(self, joined: Collection[str]) -> list[str]:
        """The hosts whose ssh runs, and whose node is not in ``joined``."""
        return [
            host.name
            for host, process in self._processes.items()
            if process.returncode is None and host.name not in joined
        ]

    def _reason(self, host: SshHost, status: int) -> str:
        with contextlib.suppress(OSError):
            lines = self._log(host).read_text(errors="replace").splitlines()
            return f"ssh ended with status {status}{listing(lines[-_LAST_LINES:])}"
        return f"ssh ended with status {status}"

    def _log(self, host: SshHost) -> Path:
        return self._logs / f"node-{host.name}.log"

    async def close(self) -> None:
        """Ends what has not ended by itself: the nodes were dismissed."""
        running = [process for process in self._processes.values() if process.returncode is None]
        ends = [asyncio.ensure_future(process.wait()) for process in running]
        if ends:
            await asyncio.wait(ends, timeout=_END_S)
        for process in running:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _file_in_memory(content: str) -> int:
    """A descriptor to read it from. A pipe would break if ssh ended before it has read all."""
    descriptor = os.memfd_create("keys")
    os.write(descriptor, content.encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _node(host: SshHost) -> list[str]:
    return ["-m", "flexmarl.launch.cli.main", "node", "--join", "-", "--name", host.name]


def ssh_command(host: SshHost, arguments: Sequence[str]) -> list[str]:
    """The command that runs Python with ``arguments`` on a host. Nothing is imported from the folder that it is in."""
    port = [] if host.port is None else ["-p", str(host.port)]
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", *port]
    return ["ssh", *options, "--", host.destination, shlex.join([host.python, "-P", *arguments])]
