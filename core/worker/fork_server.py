"""The process from which a node's actor processes are forked, started by ``supervision/forking.py``:
``python -P -m flexmarl.core.worker.fork_server SOCKET PARENT DIRECTORY MODULES``.
``SOCKET``: the descriptor of a socket to the node. ``PARENT``: the node's process id. ``DIRECTORY``: removed with all
its files if the node dies, empty for none. ``MODULES``: those that are imported before the first fork, with commas.

The import of torch and transformers takes seconds. Here it happens once, and the processes of actors share its memory.
An actor that needs other variables when modules are imported gets a new interpreter (posix_spawn(3)).

A fork has one thread, and the locks that other threads hold; a device that was opened before, a GPU, is of no use to
it. If the modules have started threads or opened devices, each actor gets a new interpreter. The node kills this
process if it needs no more actors. If the node has died this process cleans up, because the node's actors may end in
any order and at any time, also regularly.
"""

import contextlib
import errno
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgpack
import setproctitle

from ..base.collector import importing
from ..supervision.forking import MOST_BYTES, NO_DESCRIPTOR
from . import worker_main

# Why not multiprocessing's forkserver: its children have the environment of the server, share its descriptors, are
# called by a pickled function, and their exit is known to their parent alone. Here each process has its own
# environment and title, inherits one descriptor, is called by name, and the node, which is not its parent, gets its
# exit status.

_HARMLESS = {Path("/dev/null"), Path("/dev/zero"), Path("/dev/random"), Path("/dev/urandom")}


@dataclass(frozen=True, slots=True)
class Request:
    """``arguments``: of ``worker_main``, behind its descriptors. ``environment``: the whole of it. ``renewed``: with a
    new interpreter. ``descriptors``: the standard input, the log, and the socket that listens, if there is one."""

    arguments: list[str]
    environment: dict[str, str]
    renewed: bool
    descriptors: list[int]


class ForkServer:
    """``node``: the socket. ``parent``: a pidfd of the node's process, or NO_DESCRIPTOR."""

    def __init__(self, node: socket.socket, parent: int) -> None:
        self._node = node
        self._parent = parent
        self._actors: set[int] = set()
        self._woken, waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._descriptors = (node.fileno(), self._woken, waking)
        signal.set_wakeup_fd(waking)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written there

    def serve(self) -> None:
        """Forks what the node asks for, and reports how the processes end, until the node has gone."""
        problem = _obstacle()
        if problem:
            sys.stderr.write(f"imported modules have {problem}: each actor gets a new interpreter\n")
        poll = select.poll()
        for descriptor in {self._node.fileno(), self._woken, self._parent} - {NO_DESCRIPTOR}:
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._report_ended()
            if self._parent in ready:
                return
            if self._node.fileno() in ready:
                try:
                    message, descriptors, _, _ = socket.recv_fds(self._node, MOST_BYTES, 4)
                except ConnectionResetError:  # the node has died before it read all reports
                    return
                if not message:
                    return
                with os.fdopen(descriptors.pop(0), "rb") as file:
                    file.seek(0)
                    arguments, environment, renewed = msgpack.unpackb(
                        file.read(), unicode_errors="surrogateescape"
                    )
                self._fork(Request(arguments, environment, renewed or bool(problem), descriptors))

    def end_actors(self) -> None:
        """Kills the actors and waits for their ends. Those that are not stopped end without it, some time later."""
        for process in self._actors:
            os.kill(process, signal.SIGKILL)
        while self._actors:
            self._actors.discard(os.wait()[0])

    def _fork(self, request: Request) -> None:
        try:
            process = self._spawn(request) if request.renewed else os.fork()
        except OSError as error:
            self._answer([], True, 0, error.errno or errno.EAGAIN)
        else:
            if not process:
                self._become_worker(request)
            try:
                pidfd = [os.pidfd_open(process)]
            except OSError:  # Linux before 5.3, or a sandbox that forbids the call
                pidfd = []
            self._actors.add(process)
            self._answer(pidfd, True, process, 0)
            request.descriptors.extend(pidfd)
        for descriptor in request.descriptors:
            os.close(descriptor)

    def _spawn(self, request: Request) -> int:
        """Starts a new interpreter; returns its process id."""
        # Not by fork(2), as other threads of this process may hold locks: none of its code runs in the new one.
        standard_input, log, *listening = request.descriptors
        streams = [
            (os.POSIX_SPAWN_DUP2, source, target) for target, source in enumerate((standard_input, log, log))
        ]
        closed = [
            (os.POSIX_SPAWN_CLOSE, descriptor) for descriptor in (*self._descriptors, standard_input, log)
        ]
        inherited = {self._parent, *listening} - {NO_DESCRIPTOR}
        for descriptor in inherited:
            os.set_inheritable(descriptor, True)
        try:
            return os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", worker_main.__name__, *self._arguments(request)],
                request.environment, file_actions=[*streams, *closed], setsid=True,
            )  # fmt: skip
        finally:
            for descriptor in inherited:
                os.set_inheritable(descriptor, False)

    def _arguments(self, request: Request) -> list[str]:
        """The arguments of ``worker_main``."""
        _, _, *listening = request.descriptors
        return [str(self._parent), str(*listening or [NO_DESCRIPTOR]), *request.arguments]

    def _become_worker(self, request: Request) -> NoReturn:
        """In the new process."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in self._descriptors:
                os.close(descriptor)
            os.setsid()
            standard_input, log, *_ = request.descriptors
            for target, source in enumerate((standard_input, log, log)):
                os.dup2(source, target)
            os.close(standard_input)
            os.close(log)
            setproctitle.setproctitle(" ".join(["flexmarl-actor", *request.arguments]))
            os.environ.clear()
            os.environ.update(request.environment)
            tempfile.tempdir = None  # a module may have asked for it already
            # random gets a new state in a fork, numpy.random does not
            if numpy_random := sys.modules.get("numpy.random"):
                numpy_random.seed()
            worker_main.main(self._arguments(request))
        except BaseException:  # noqa: BLE001  # nothing of the server may run in this process
            traceback.print_exc()
        finally:
            os._exit(1)

    def _report_ended(self) -> None:
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not process:
                return
            self._actors.discard(process)
            self._answer([], False, process, os.waitstatus_to_exitcode(status))

    def _answer(self, descriptors: list[int], answers: bool, process: int, number: int) -> None:
        """``answers``: it is the answer to a request, and ``number`` the error's, if any; else an exit status."""
        try:
            socket.send_fds(self._node, [msgpack.packb((answers, process, number))], descriptors)
        except OSError:  # the node has gone: the next look at the socket shows it
            return


def _obstacle() -> str:
    """The reason why this process should not be forked into actors; empty if it may be."""
    threads = _other_threads()
    if threads:
        return f"started threads ({', '.join(threads)})"
    devices = [str(path) for path in _open_files() if path.is_char_device() and path not in _HARMLESS]
    return f"opened {', '.join(devices)}" if devices else ""


def _other_threads() -> list[str]:
    """The different names of all threads but the main one: Python's where it knows them, else the kernel's."""
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    threads = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if task.name != str(os.getpid()):
                threads.add(names.get(task.name) or (task / "comm").read_text().strip())
    return sorted(threads)


def _open_files() -> Iterator[Path]:
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            yield descriptor.readlink()


def main() -> None:
    """Serves forks until the node has gone or kills this process. Arguments: see the module."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    node = socket.socket(fileno=int(sys.argv[1]))
    parent, modules = worker_main.pidfd_of_parent(int(sys.argv[2])), sys.argv[4].strip().split(",")
    server = ForkServer(node, parent)
    directory = Path(sys.argv[3]) if sys.argv[3] else None
    with importing():
        for module in filter(None, modules):
            try:
                importlib.import_module(module)
            except Exception:  # noqa: BLE001  # an actor that needs it reports the error as its own
                traceback.print_exc()
    server.serve()
    if directory is not None and worker_main.has_parent_ended(parent):
        server.end_actors()
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)  # a regular exit of the interpreter, with torch in it, takes seconds


if __name__ == "__main__":
    main()
