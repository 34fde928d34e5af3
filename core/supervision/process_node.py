"""Actors in processes of this host, forked from one that has imported what they need.

Over ipc an actor's address is a path. Over TCP the node itself listens on a free port and hands the listening
descriptor to each of the actor's processes (systemd's socket activation): the address is known before there is a
process, a restarted actor keeps it, and callers that connect meanwhile wait in the kernel's queue.
"""

import asyncio
import dataclasses
import errno
import json
import os
import signal
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..durable.files import open_private
from ..errors import LocalProtocolError
from ..wire.zeromq import ipc_address, listening_socket, remove_socket, tcp_address
from .forking import ForkedProcess, ForkServer
from .node import NODE_DIRECTORY, Launch, Node, Running
from .worker_init import WorkerInit, search_path, write_init

if TYPE_CHECKING:
    from ..system import ActorSystem

# PF_EXITING of include/linux/sched.h
_PF_EXITING = 0x4
# A launch that loses its fork server gets another one; modules that end the process when they are imported end each.
_SERVERS = 3
_LOG_TAIL_LINES = 15
_LOG_TAIL_BYTES = 2**16


class ProcessNode(Node):
    """Each actor in a process of its own, which holds nothing else."""

    def __init__(
        self,
        system: "ActorSystem",
        directory: Path,
        log_directory: Path,
        env: Mapping[str, str] | None,
        *,
        directory_is_private: bool = True,
        modules: Sequence[str] = (),
        late_variables: Collection[str] = (),
    ) -> None:
        """``system``: the processes listen as it does, with its keys and settings. ``directory``: of the processes'
        systems; if it is private to this run, it is removed with all its files if this process dies. ``env``:
        the whole environment of the processes; None: they inherit this process's, and its ``sys.path``. ``modules``:
        imported once for all processes. ``late_variables``: those that the modules do not read when they are imported;
        an actor with another variable of its own imports for itself what it needs."""
        self.name = system.name
        self._system = system
        self._directory = directory
        self._private = directory_is_private
        self._log_directory = log_directory
        self._env = None if env is None else dict(env)
        self._modules = modules
        self._late_variables = late_variables
        self._listening: dict[str, socket.socket] = {}
        self._names: set[str] = set()
        """The actors that have an address."""
        self._server: ForkServer | None = None

    def check(self, launch: Launch) -> None:
        if launch.env and self._env is None:
            raise ValueError(
                f"{launch.name}: its supervisor inherits its environment, and has none to add variables to"
            )
        name, address = launch.supervisor
        if not address.startswith(("ipc://", "tcp://")):
            raise LocalProtocolError(f"{name} is reached by no socket: no process could answer it")

    @property
    def starter(self) -> str:
        if self._server is None:
            return "the process that forks actors"
        stopped = ", stopped by a signal" if is_stopped(self._server.pid) else ""
        return f"the process that forks actors (process {self._server.pid}{stopped})"

    async def reserve(self, actor: str) -> str:
        self._names.add(actor)
        tcp = self._system.tcp
        if tcp is None:
            return ipc_address(self._directory, actor)
        listening = self._listening.get(actor)
        if listening is None:
            listening = self._listening[actor] = listening_socket(tcp)
        return tcp_address(tcp, listening.getsockname()[1])

    async def launch(self, launch: Launch) -> "ChildProcess":
        listening = self._listening.get(launch.name)
        for _ in range(_SERVERS):
            try:
                return await ChildProcess.start(
                    launch.name,
                    launch.epoch,
                    self._living_server(),
                    [str(self._directory), launch.name],
                    write_init(self._init(launch)),
                    self._log_directory / f"{launch.name}.log",
                    self._environment(launch.env),
                    () if listening is None else (listening.fileno(),),
                )
            except ChildProcessError:  # killed meanwhile: the next server starts the actor
                if launch.name not in self._names:  # it was released, and the server closed
                    raise
        raise ChildProcessError(
            errno.ECHILD,
            f"{launch.name}: the process that forks actors has ended {_SERVERS} times in a row, before it could"
            f" fork this one{_last_lines(self._server_log)}",
        )

    def _living_server(self) -> ForkServer:
        if self._server is None or self._server.ended:
            directory = self._directory if self._private else None
            self._server = ForkServer(
                self._modules, self._late_variables, self._environment({}), self._server_log, directory
            )
        return self._server

    @property
    def _server_log(self) -> Path:
        return self._log_directory / "fork-server.log"

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        if self._env is None:
            return os.environ.copy()
        directory = str(self._directory)
        return self._env | {
            name: directory if value == NODE_DIRECTORY else value for name, value in variables.items()
        }

    def _init(self, launch: Launch) -> WorkerInit:
        # Keys go by a file of mode 0600: every user of the host can read a command line, and an environment is passed
        # on to each process that the actor starts.
        system = self._system
        keys_file = None
        if system.keys is not None:
            keys_file = system.keys_file
            if not keys_file.exists():
                system.keys.save(keys_file)
        return WorkerInit.of(
            launch,
            system.settings,
            tcp=None if system.tcp is None else dataclasses.replace(system.tcp, keys=None),
            keys_file=None if keys_file is None else str(keys_file),
            search_path=search_path() if self._env is None else (),
        )

    def release(self, actor: str) -> None:
        listening = self._listening.pop(actor, None)
        if listening is not None:
            listening.close()
        # A killed process leaves it behind.
        remove_socket(ipc_address(self._directory, actor))
        self._names.discard(actor)
        # Its imported modules take memory of a host that has no actor left.
        if not self._names and self._server is not None:
            self._server.close()

    def close(self) -> None:
        for actor in list(self._names):
            self.release(actor)


class ChildProcess(Running):
    """One process, and the file with its output."""

    def __init__(
        self, name: str, epoch: int, process: ForkedProcess, init: asyncio.WriteTransport, log_path: Path
    ) -> None:
        super().__init__(name, epoch, f"process {process.pid}")
        self._process = process
        self._init = init
        self._log_path = log_path

    @classmethod
    async def start(
        cls,
        name: str,
        epoch: int,
        server: ForkServer,
        arguments: list[str],
        init: bytes,
        log_path: Path,
        env: Mapping[str, str],
        descriptors: tuple[int, ...] = (),
    ) -> "ChildProcess":
        """``arguments``: of ``worker_main``, behind its descriptors. ``init``: the first bytes on its standard input
        (``worker_init.py``). ``env``: its environment. ``descriptors``: the socket at which it listens, if there is
        one. Raises OSError."""
        # Sockets: uvloop closes the descriptor of any other file twice, and the second time the number may be that of a
        # socket that a thread of libzmq has just made, which aborts this process.
        read_end, write_end = socket.socketpair()
        try:
            with read_end, open_private(log_path, "ab") as log_file:
                process = await server.fork(
                    arguments,
                    env,
                    (read_end.fileno(), log_file.fileno(), *descriptors),
                )
        except BaseException:
            write_end.close()
            raise
        # It stays open: the child ends at the end of this file, when this process is gone.
        pipe, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, write_end)
        pipe.write(init)
        return cls(name, epoch, process, pipe, log_path)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def has_exited(self) -> bool:
        return self._process.has_exited() or is_exiting(self.pid)

    def description(self) -> str:
        if is_stopped(self.pid):
            return f"{self.label}, stopped by a signal: `kill -CONT {self.pid}` continues it"
        return self.label

    async def wait_exit(self) -> str:
        return await self._process.wait_exit()

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    async def wait_gone(self) -> None:
        await super().wait_gone()
        self._init.close()

    def log_tail(self) -> str:
        return _last_lines(self._log_path)


def is_exiting(pid: int) -> bool:
    """True from the time on at which the kernel begins to end the process. Its sockets are closed some time before it
    can be waited for."""
    fields = _stat(pid)
    return bool(fields) and bool(int(fields[6]) & _PF_EXITING)


def is_stopped(pid: int) -> bool:
    """True while the process is stopped by a signal or a debugger."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in "Tt"


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` behind the name; empty if there is no such process, or no Linux."""
    try:
        # Behind the last bracket: the name, which the process chooses, may hold blanks and brackets too.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _last_lines(log_path: Path) -> str:
    """The end of an actor's log, as a paragraph that begins a new line: warnings, errors, and what was not logged as a
    record, such as a traceback. Empty if the log has no such line."""
    try:
        with log_path.open("rb") as log_file:
            log_file.seek(max(0, log_path.stat().st_size - _LOG_TAIL_BYTES))
            is_cut = log_file.tell() > 0
            lines = log_file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"\nIts log can't be read: {error}"
    if is_cut and lines[0].endswith("}"):  # a part of a record
        del lines[0]
    last = [line for line in lines if not _is_routine(line)][-_LOG_TAIL_LINES:]
    return f"\nThe last lines of {log_path}:\n" + "\n".join(last) if last else ""


def _is_routine(line: str) -> bool:
    """True for a record of level info or debug: it says nothing about a death."""
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and record.get("level") in ("info", "debug")
