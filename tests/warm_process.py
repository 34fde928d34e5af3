"""Commands of flexmarl in processes that are forked from one which has imported the package, torch and transformers.

A small run takes six seconds of CPU time, more than four of them for these imports: of the command's process, and of
the one that forks its actors. Here both are forks of one *template*, a new interpreter that has imported all of it and
compiled the signatures of the endpoints, has one thread, and serves one process of tests until that ends. Apart from
that all is as in a command that a person starts: a session, a working directory, an environment and an output of its
own; a parent that has to wait for it; and children: one that forks its actors, and one that makes the checks before the
start. These, the *spares*, are forked before the command's code begins, when the process has one thread and no
descriptors of its own, and wait until ``ForkServer`` or the preflight would start an interpreter.

Modules read variables when they are imported: a command with an environment that differs from the template's gets a new
interpreter, and so does each further process that forks actors. Tests of interpreters that start (search paths, the
environment, prints at an import, a process that dies as it imports) take new ones.
"""

import atexit
import contextlib
import ctypes
import importlib
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any, Final, NoReturn

import setproctitle

_BASE: Final = "FLEXMARL_RUNTIME_BASE"
_PATHS: Final = "PYTHONPATH"
_OF_A_SHELL: Final = {"_", "OLDPWD", "PWD", "SHLVL"}
_VARIABLES: Final = {_BASE, "COLUMNS", "PATH", "PYTEST_CURRENT_TEST", "SPT_NOENV", *_OF_A_SHELL}
"""Those that are read when they are needed: a fork may have other values of them."""
# Those that are read late by the checks before a start, which have other values of them.
_LATE: Final = {"TMPDIR", "PYTHONDONTWRITEBYTECODE"}
# The title of a process takes the place of its arguments, and the variable that is looked for of its first value.
_TITLE_CHARACTERS = 2000
_BASE_CHARACTERS = 250
_MOST_BYTES = 2**17
_ENTER = ("ip", "netns", "exec")
_LONGEST_SLEEP_S = 0.05
_MODULES = (
    "flexmarl.launch.cli.registry", "flexmarl.launch.cli.train", "flexmarl.launch.cli.eval",
    "flexmarl.launch.cli.node", "flexmarl.launch.cli.serve", "flexmarl.launch.run.run",
    "flexmarl.launch.run.preflight.preflight", "flexmarl.launch.run.preflight.process",
    "flexmarl.launch.run.preflight.model_checks", "flexmarl.launch.run.preflight.sft_checks",
    "flexmarl.launch.run.preflight.trial",
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
        errors: int | None = None,
        *,
        on: Sequence[str] = (),
        directory: str | None = None,
    ) -> WarmProcess | None:
        """A process that runs ``code``, as ``python -c`` does, and writes to ``output``, without input, in a session of
        its own. ``errors``: for its standard error, instead of ``output``. ``on``: words before a command that run it
        in a network namespace. None if they run it elsewhere, or if ``environment`` is not the template's, of which the
        first call decides."""
        with self._alone:  # programs of a page ask in threads
            if self._process is None:
                self._open(environment)
        if _usual(environment) != self._environment or (on and tuple(on[:-1]) != _ENTER):
            return None
        words = (code, list(arguments), dict(environment), directory or str(Path.cwd()), on[-1] if on else "")
        descriptors = (output, output if errors is None else errors)
        return WarmProcess(self, self.ask("start", *words, descriptors=descriptors))

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


def _serve(requests: socket.socket, usual: Mapping[str, str]) -> None:
    """Forks commands, and waits for those that have ended, until the process of the tests has gone."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 2)
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
    errors: int,
) -> NoReturn:
    """In a fork: the rest of its life is a command's."""
    try:
        from flexmarl.launch.bench.namespaces import Host, enter

        os.setsid()
        os.chdir(directory)
        enter(Host(namespace, "", _ENTER if namespace else ()))
        for descriptor, target in ((output, 1), (errors, 2)):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(environment)
        _show_variable(environment.get(_BASE, ""))
        fork_server = _Spare(usual, _serve_forks)
        checks = _Spare(usual, _check, fork_server)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # actors, whose variables the template has, have no buffer
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed()
        status = _run_code(code, arguments, fork_server, checks)
    except BaseException:  # noqa: BLE001  # nothing of the template may run in this process
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run_code(code: str, arguments: list[str], fork_server: "_Spare", checks: "_Spare") -> int:
    """As ``python -c`` does; returns the exit status. Modules are not taken apart, which is seconds with torch."""
    from flexmarl.core.supervision import forking
    from flexmarl.launch.run.preflight import preflight

    forking.subprocess = SimpleNamespace(Popen=fork_server.popen, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment, attr-defined]
    preflight.subprocess = SimpleNamespace(Popen=checks.popen, PIPE=subprocess.PIPE)  # type: ignore[assignment, attr-defined]
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
    """A fork of a command's process, which does ``work`` in place of a new interpreter: with that one's arguments, and
    the descriptor that it would inherit. ``before``: a spare that this one must not keep open."""

    def __init__(
        self, usual: Mapping[str, str], work: Callable[[list[str], int], None], before: "_Spare | None" = None
    ) -> None:
        self._usual = _without(usual, _LATE)
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if not self._pid:
            self._socket.close()
            if before is not None:
                before._socket.close()
            _wait_for_work(other, work)
        other.close()

    def popen(self, command: list[str], **options: Any) -> "subprocess.Popen[Any] | _Child":
        """In place of ``subprocess.Popen``, as ``ForkServer`` and the preflight call it."""
        added = _added_paths(self._usual, _without(_usual(options["env"]), _LATE))
        if added is None or not self._pid:
            return subprocess.Popen(command, **options)
        child, self._pid = _Child(self._pid), 0
        limits = (_umask(), *resource.getrlimit(resource.RLIMIT_NOFILE))
        session = options.get("start_new_session", False)
        request = pickle.dumps((command, dict(options["env"]), added, str(Path.cwd()), session, limits))
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._socket)
            streams = [
                child.stream(stack, name, options.get(name, subprocess.DEVNULL))
                for name in ("stdin", "stdout", "stderr")
            ]
            try:
                socket.send_fds(self._socket, [request], [*streams, *options.get("pass_fds", ())])
            except OSError:  # it was killed, together with the command's session
                child.wait()
                return subprocess.Popen(command, **options)
        return child


class _Child:
    """A process as ``ForkServer`` and the preflight need it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None

    def stream(self, stack: contextlib.ExitStack, name: str, where: Any) -> int:
        """The descriptor of a standard stream for the process, which ``stack`` closes if it was opened here."""
        if where == subprocess.DEVNULL:
            return stack.enter_context(Path(os.devnull).open("r+b", buffering=0)).fileno()
        if where != subprocess.PIPE:
            number: int = where.fileno()
            return number
        reader, writer = os.pipe()
        mine, other = (writer, reader) if name == "stdin" else (reader, writer)
        setattr(self, name, os.fdopen(mine, "w" if name == "stdin" else "r", errors="replace"))
        stack.callback(os.close, other)
        return other

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            else:
                time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


def _without(variables: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _wait_for_work(requests: socket.socket, work: Callable[[list[str], int], None]) -> NoReturn:
    try:
        message, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 4)
        if not message:
            os._exit(0)
    except BaseException:  # noqa: BLE001  # a signal to the command's session
        os._exit(1)
    try:
        requests.close()
        command, environment, added, directory, session, (mask, *files) = pickle.loads(message)  # noqa: S301  # of the command
        if session:
            os.setsid()
        os.chdir(directory)
        os.umask(mask)
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(files))
        for target, source in enumerate(descriptors[:3]):
            os.dup2(source, target)
            os.close(source)
        behind = len(os.environ[_PATHS].split(os.pathsep))
        sys.path[behind:behind] = added
        os.environ.clear()
        os.environ.update(environment)
        sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environment
        tempfile.tempdir = None
        setproctitle.setproctitle(" ".join(command))
        work(command[4:], descriptors[3] if len(descriptors) > 3 else -1)
    except BaseException:  # noqa: BLE001  # nothing of the command may run in this process
        traceback.print_exc()
    finally:
        os._exit(1)


def _serve_forks(arguments: list[str], node: int) -> None:
    from flexmarl.core.worker import fork_server

    sys.argv = ["-m", str(node), *arguments[1:]]
    fork_server.main()


def _check(arguments: list[str], _: int) -> None:
    from flexmarl.launch.run.preflight import process

    sys.argv = ["-m", *arguments]
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    process.main()


def main() -> None:
    """Serves the process of the tests, whose socket is the first argument."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    usual = _usual(os.environ)  # before the imports: torch adds TORCHINDUCTOR_CACHE_DIR
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
    _serve(requests, usual)
    os._exit(0)


if __name__ == "__main__":
    main()
