"""A command that is forked from the template sees what one in a new interpreter sees. So does the process that forks
its actors."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from .patience import PATIENCE_S
from .processes import SOURCES
from .warm_process import TEMPLATE, Template, WarmProcess

ROOT = Path(__file__).parents[1]

STATE = """
import json, os, resource, signal, socket, sys, tempfile, threading
def links():
    for name in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{name}").partition(":")[0]
        except FileNotFoundError:
            pass
def state():
    mask = os.umask(0)
    os.umask(mask)
    session = [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()]
    signals = {one.name: str(signal.getsignal(one)) for one in signal.Signals if one != signal.SIGCHLD}
    blocked = [one.name for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    shown = open("/proc/self/environ").read().split("\\0")
    base = "FLEXMARL_RUNTIME_BASE=" + os.environ["FLEXMARL_RUNTIME_BASE"]
    sockets = sorted(link for link in links() if link != "anon_inode")
    return {
        "environment": dict(sorted(os.environ.items())), "shown": base in shown, "directory": os.getcwd(),
        "umask": mask, "session": session, "signals": signals, "blocked": blocked, "path": sys.path,
        "descriptors": sockets, "threads": [one.name for one in threading.enumerate()],
        "files": resource.getrlimit(resource.RLIMIT_NOFILE), "random": "", "temporary": tempfile.gettempdir(),
    }
"""
COMMAND = f"{STATE}\nprint(json.dumps(state() | {{'arguments': sys.argv, 'name': __name__}}))"
# The module that the process of the forks imports writes to the log of that process.
FORKS = """
import asyncio, os, resource, sys, time
from pathlib import Path
from flexmarl.core.supervision.forking import ForkServer
from flexmarl.launch.hosts import env
folder = Path(sys.argv[1])
os.environ["PYTHONPATH"] += f":{folder}"
os.umask(0o027)
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 400))
async def main():
    for number in range(2):
        log = folder / f"{number}.log"
        server = ForkServer(["probe"], (), env.actor_environment(), log)
        while not log.exists() or not log.read_text().endswith("\\n"):
            await asyncio.sleep(0.01)
        server.close()
asyncio.run(main())
"""
PROBE = f"{STATE}\nimport psutil\nprint(json.dumps(state() | {{'parent': psutil.Process().parent().pid}}))"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    variables = {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", "FLEXMARL_RUNTIME_BASE": str(tmp_path)}
    return {**os.environ, **variables}


@pytest.fixture
def template() -> Iterator[Template]:
    template = Template()
    yield template
    template.close()


def in_a_fork(code: str, arguments: list[str], environment: dict[str, str], output: Path) -> WarmProcess:
    with output.open("w") as file:
        process = TEMPLATE.start(code, arguments, environment, file.fileno())
    assert process is not None
    return process


def in_an_interpreter(
    code: str, arguments: list[str], environment: dict[str, str], output: Path
) -> "subprocess.Popen[bytes]":
    with output.open("w") as file:
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip


Start = Callable[[str, list[str], dict[str, str], Path], "WarmProcess | subprocess.Popen[bytes]"]
START: dict[str, Start] = {"fork": in_a_fork, "interpreter": in_an_interpreter}


def test_a_command_sees_what_it_sees_in_a_new_interpreter(
    environment: dict[str, str], tmp_path: Path
) -> None:
    states: dict[str, dict[str, Any]] = {}
    for name, start in START.items():
        output = tmp_path / name
        process = start(COMMAND, ["--words", "of it"], environment, output)
        assert process.wait(PATIENCE_S) == 0, output.read_text()
        states[name] = json.loads(output.read_text().replace(str(output), "OUTPUT"))
    assert states["fork"].pop("descriptors") == sorted(
        [*states["interpreter"].pop("descriptors"), "socket", "socket"]
    ), "those to the spares, which no other program inherits"
    assert states["fork"] == states["interpreter"]
    assert states["fork"]["shown"] and states["fork"]["session"] == [True, True]


def test_the_process_of_the_forks_sees_it_too(environment: dict[str, str], tmp_path: Path) -> None:
    states: dict[str, list[dict[str, Any]]] = {}
    for name, start in START.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "probe.py").write_text(PROBE)
        output = tmp_path / f"{name}.out"
        process = start(FORKS, [str(folder)], environment, output)
        assert process.wait(PATIENCE_S) == 0, output.read_text()
        logs = [(folder / f"{number}.log").read_text() for number in range(2)]
        states[name] = [json.loads(log.replace(str(folder), "FOLDER")) for log in logs]
        assert [state.pop("parent") for state in states[name]] == [process.pid] * 2
    spare, second = states["fork"]
    assert spare == states["interpreter"][0]
    second.pop("environment"), states["interpreter"][1].pop("environment")
    assert second == states["interpreter"][1], "a new interpreter"


@pytest.mark.parametrize("name", START)
@pytest.mark.parametrize(
    "code, status, printed",
    [
        ("", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('a sentence')", 1, "a sentence\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os._exit(5)", 5, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import atexit; atexit.register(print, 'the end')", 0, "the end\n"),
        ("import threading; threading.Timer(0.01, print, ['a thread']).start()", 0, "a thread\n"),
    ],
)
def test_a_command_ends_alike(
    code: str, status: int, printed: str, name: str, environment: dict[str, str], tmp_path: Path
) -> None:
    process = START[name](code, [], environment, tmp_path / "out")
    assert process.wait(PATIENCE_S) == status == process.poll() == process.returncode
    assert (tmp_path / "out").read_text().endswith(printed)


def test_a_process_that_runs_has_no_status_and_can_be_killed(
    environment: dict[str, str], tmp_path: Path
) -> None:
    process = in_a_fork("import time; time.sleep(1000)", [], environment, tmp_path / "out")
    while len(spares := psutil.Process(process.pid).children()) < 2:
        time.sleep(0.01)
    assert process.poll() is None and process.returncode is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    process.kill()
    psutil.wait_procs(spares)  # they end with their command


def test_another_environment_needs_a_new_interpreter(environment: dict[str, str], tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as output:
        assert TEMPLATE.start("", [], environment, output.fileno()) is not None
        typed = {**environment, "SHLVL": "9", "PWD": "/", "OLDPWD": "/", "_": "flexmarl"}
        assert TEMPLATE.start("", [], typed, output.fileno()) is not None, "as a shell has it"
        for variables in ({"MKL_NUM_THREADS": "7"}, {"PYTHONPATH": "elsewhere"}):
            assert TEMPLATE.start("", [], environment | variables, output.fileno()) is None
        assert TEMPLATE.start("", [], environment, output.fileno(), on=["ssh", "host"]) is None


def test_a_template_that_has_ended_is_an_error(
    environment: dict[str, str], template: Template, tmp_path: Path
) -> None:
    before = psutil.Process().children()
    template._open(environment)
    (process,) = set(psutil.Process().children()) - set(before)
    process.kill()
    with (tmp_path / "out").open("w") as output, pytest.raises((AssertionError, ConnectionError)):
        template.start("", [], environment, output.fileno())


def test_threads_that_ask_at_once_share_a_template(
    environment: dict[str, str], template: Template, tmp_path: Path
) -> None:
    before = len(psutil.Process().children())
    with (tmp_path / "out").open("w") as output, ThreadPoolExecutor(8) as threads:
        processes = list(
            threads.map(lambda _: template.start("", [], environment, output.fileno()), range(8))
        )
    assert all(process is not None and process.wait(PATIENCE_S) == 0 for process in processes)
    assert len(psutil.Process().children()) == before + 1
