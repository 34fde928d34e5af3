"""Commands of flexmarl in processes that are forked from one which has imported the package, torch and transformers.

A small run takes six seconds of CPU time, more than four of them for these imports: of the command's process, and of
the one that forks its actors. Here both are forks of one *template*, a new interpreter that has imported all of it and
compiled the signatures of the endpoints, has one thread, and serves one process of tests until that ends. Apart from
that all is as in a command that a person starts: a session, a working directory, an environment and an output of its
own; a parent that has to wait for it; and a child that forks its actors. That child, the *spare*, is forked before the
command's code begins, when the process has one thread and no descriptors of its own, and waits until ``ForkServer``
would start an interpreter.

Modules read variables when they are imported: a command with an environment that differs from the template's gets a new
interpreter, and so does each further process that forks actors. Tests of interpreters that start (search paths, the
environment, prints at an import, a process that dies as it imports) take new ones.
"""

import atexit
import ctypes
import importlib
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NoReturn

import setproctitle

_BASE: Final = "FLEXMARL_RUNTIME_BASE"
_PATHS: Final = "PYTHONPATH"
_VARIABLES: Final = {_BASE, "COLUMNS", "PATH", "PYTEST_CURRENT_TEST", "SPT_NOENV"}
"""Those that are read when they are needed: a fork may have other values of them."""
# The title of a process takes the place of its arguments, and the variable that is looked for of its first value.
_TITLE_CHARACTERS = 2000
_BASE_CHARACTERS = 250
_MOST_BYTES = 2**17
_ENTER = ("ip", "netns", "exec")
_LONGEST_SLEEP_S = 0.05
_MODULES = (
    "flexmarl.launch.cli.registry", "flexmarl.launch.cli.train", "flexmarl.launch.cli.eval",
    "flexmarl.launch.cli.node", "flexmarl.launch.cli.serve", "flexmarl.launch.run.run",
    "flexmarl.launch.run.preflight.preflight",
)  # fmt: skip


def _usual(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _VARIABLES}


def _added_paths(usual: Mapping[str, str], environment: Mapping[str, str]) -> list[str] | None:
    """The entries that ``PYTHONPATH`` has behind those of ``usual``; None if any other variable differs."""
    if {**usual, _PATHS: ""} != {**environment, _PATHS: ""}:
        return None
    first, paths = (one[_PATHS].split(os.pathsep) for one in (usual, environment))
    return paths[len(first) :] if paths[: len(first)] == first else None


# ------------------------------------------------------------------ the process of the tests


class WarmProcess:
    """A fork of the template, as ``subprocess.Popen`` shows a process: it has ended once it has been waited for."""

    def __init__(self, template: "Template", pid: int) -> None:
        self._template = template
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status; None while the process runs."""
        if self.returncode is None:
            self.returncode = self._template.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        sleep_s = 0.0005
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal; does nothing if the process has ended."""
        if self.poll() is None:  # the number stays the process's own until it has been waited for
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """The template of this process, from ``open`` to ``close`` or to the end of this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._alone = threading.Lock()

    def start(
        self,
        code: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        on: Sequence[str] = (),
    ) -> WarmProcess | None:
        """A process that runs ``code``, as ``python -c`` does, and writes to ``output``, without input, in a session of
        its own. ``on``: words before a command that run it in a network namespace. None if they run it elsewhere, or
        if ``environment`` is not the template's, of which the first call decides."""
        if self._process is None:
            self._open(environment)
        if _usual(environment) != self._environment or (on and tuple(on[:-1]) != _ENTER):
            return None
        words = (code, list(arguments), dict(environment), str(Path.cwd()), on[-1] if on else "")
        return WarmProcess(self, self.ask("start", *words, descriptors=(output,)))

    def _open(self, environment: Mapping[str, str]) -> None:
        from flexmarl.launch.hosts import env

        variables = {**env.actor_environment(), **environment}
        variables.pop(_BASE, None)
        self._environment = _usual(environment)
        self._requests, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with requests:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(requests.fileno()), " " * _TITLE_CHARACTERS],
                env={**variables, "SPT_NOENV": "1", _BASE: "-" * _BASE_CHARACTERS},  # the last one
                stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=(requests.fileno(),),
            )  # fmt: skip

    def ask(self, *request: Any, descriptors: Sequence[int] = ()) -> Any:
        """Sends a request and returns the template's answer."""
        with self._alone:
            socket.send_fds(self._requests, [pickle.dumps(request)], descriptors)
            answer = self._requests.recv(_MOST_BYTES)
        assert answer, "the process whose forks are commands has ended: its error is above"
        return pickle.loads(answer)  # noqa: S301  # of a process of this session

    def cpu_seconds(self) -> float:
        """Those of the template and of all its processes that have ended, so far."""
        if self._process is None:
            return 0.0
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Ends the template; does nothing if there is none."""
        if self._process is not None:
            self._requests.close()
            self._process.wait()
            self._process = None


TEMPLATE: Final = Template()
"""It is opened by the first command that needs it, and closed at the end of the session (``conftest.py``)."""


# ------------------------------------------------------------------ the template


def _serve(requests: socket.socket) -> None:
    """Forks commands, and waits for those that have ended, until the process of the tests has gone."""
    usual = _usual(os.environ)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 1)
        if not message:
            return
        what, *words = pickle.loads(message)  # noqa: S301  # of the process that has started this one
        if what == "poll":
            pid, status = os.waitpid(words[0], os.WNOHANG)
            requests.send(pickle.dumps(os.waitstatus_to_exitcode(status) if pid else None))
            continue
        if not (pid := os.fork()):
            requests.close()
            _run_command(usual, *words, *descriptors)
        requests.send(pickle.dumps(pid))
        for descriptor in descriptors:
            os.close(descriptor)


def _run_command(
    usual: Mapping[str, str],
    code: str,
    arguments: list[str],
    environment: dict[str, str],
    directory: str,
    namespace: str,
    output: int,
) -> NoReturn:
    """In a fork: the rest of its life is a command's."""
    try:
        from flexmarl.launch.bench.namespaces import Host, enter

        os.setsid()
        os.chdir(directory)
        enter(Host(namespace, "", _ENTER if namespace else ()))
        for target in (1, 2):
            os.dup2(output, target)
        os.close(output)
        os.environ.clear()
        os.environ.update(environment)
        _show_variable(environment.get(_BASE, ""))
        spare = _Spare(usual)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # actors, whose variables the template has, have no buffer
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed()
        status = _run_code(code, arguments, spare)
    except BaseException:  # noqa: BLE001  # nothing of the template may run in this process
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_code(code: str, arguments: list[str], spare: "_Spare") -> int:
    """As ``python -c`` does; returns the exit status. Modules are not taken apart, which is seconds with torch."""
    from flexmarl.core.supervision import forking

    forking.subprocess = SimpleNamespace(Popen=spare.popen, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment, attr-defined]
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = ["-c", *arguments]
    sys.path.insert(0, "")
    setproctitle.setproctitle(" ".join([sys.executable, "-c", *arguments]))
    status = 0
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001  # as the interpreter does
        traceback.print_exc()
        status = 1
    finish: Callable[[], None] = threading._shutdown  # type: ignore[attr-defined]  # waits for threads
    finish()
    atexit._run_exitfuncs()
    return status


def _show_variable(value: str) -> None:
    """Writes the variable to ``/proc/PID/environ``, where tests look for the processes of their run: it shows the bytes
    that an interpreter has begun with. The processes that this one forks have it too."""
    start, end = (
        int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49]
    )
    block = Path("/proc/self/environ").read_bytes()
    at = block.index(f"{_BASE}=".encode()) + len(_BASE) + 1
    room = len(block) - 1 - at
    data = value.encode()
    assert end - start == len(block) and len(data) <= room
    ctypes.memmove(start + at, data.ljust(room, b"\0"), room)


class _Spare:
    """A fork of a command's process, which becomes the one that forks the command's actors."""

    def __init__(self, usual: Mapping[str, str]) -> None:
        self._usual = usual
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if not self._pid:
            self._socket.close()
            _become_fork_server(other)
        other.close()

    def popen(self, command: list[str], **options: Any) -> "subprocess.Popen[bytes] | _Child":
        """In place of ``subprocess.Popen``, as ``ForkServer`` calls it."""
        added = _added_paths(self._usual, _usual(options["env"]))
        if added is not None and self._pid:
            (node,) = options["pass_fds"]
            limits = (_umask(), *resource.getrlimit(resource.RLIMIT_NOFILE))
            request = pickle.dumps((command, dict(options["env"]), added, str(Path.cwd()), limits))
            pid, self._pid = self._pid, 0
            try:
                socket.send_fds(self._socket, [request], [node, options["stdout"].fileno()])
            except OSError:  # it was killed, together with the command's session
                os.waitpid(pid, 0)
            else:
                return _Child(pid)
            finally:
                self._socket.close()
        return subprocess.Popen(command, **options)


class _Child:
    """A process as ``ForkServer`` needs it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = False

    def kill(self) -> None:
        if not self._ended:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self.pid, 0)
        self._ended = True


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _become_fork_server(requests: socket.socket) -> NoReturn:
    try:
        message, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 2)
        if not message:
            os._exit(0)
    except BaseException:  # noqa: BLE001  # a signal to the command's session
        os._exit(1)
    try:
        requests.close()
        command, environment, added, directory, (mask, *files) = pickle.loads(message)  # noqa: S301  # of the command
        os.setsid()
        os.chdir(directory)
        os.umask(mask)
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(files))
        node, log = descriptors
        with Path(os.devnull).open() as nothing:
            for source, target in ((nothing.fileno(), 0), (log, 1), (log, 2)):
                os.dup2(source, target)
        os.close(log)
        behind = len(os.environ[_PATHS].split(os.pathsep))
        sys.path[behind:behind] = added
        os.environ.clear()
        os.environ.update(environment)
        setproctitle.setproctitle(" ".join(command))
        sys.argv = ["-m", str(node), *command[5:]]
        from flexmarl.core.worker import fork_server

        fork_server.main()
    except BaseException:  # noqa: BLE001  # nothing of the command may run in this process
        traceback.print_exc()
    finally:
        os._exit(1)


def main() -> None:
    """Serves the process of the tests, whose socket is the first argument."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    setproctitle.getproctitle()  # it looks for its memory behind the variables, which forks change
    from flexmarl.core.base.collector import importing
    from flexmarl.core.worker.fork_server import _obstacle
    from flexmarl.launch.run import actor_specs

    names = [
        name for name in vars(actor_specs).values() if isinstance(name, str) and name.startswith("flexmarl.")
    ]
    with importing():
        for name in (*_MODULES, *names):
            importlib.import_module(name.partition(":")[0])
    problem = _obstacle()
    assert not problem, f"imported modules have {problem}: no process can be forked"
    _serve(requests)
    os._exit(0)


if __name__ == "__main__":
    main()
