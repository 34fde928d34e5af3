"""Programs that end in every way: none costs more than itself, and none leaves a process."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from flexmarl.actors.deadline import Deadline
from flexmarl.actors.errors import ProgramFailed
from flexmarl.actors.gateway import program as program_module
from flexmarl.actors.gateway.program import ProgramEnd, run_program

from ...patience import PATIENCE_S

MARK = "FLEXMARL_TEST_PROGRAM"
SECONDS = str(1_000_000 + os.getpid())
"""The argument by which the sleeping processes of this one's tests are known."""
# A child, a daemon in a session of its own, and one without the variables of the environment.
LEAVES_PROCESSES = f"""
import os, subprocess, sys, time
subprocess.Popen(["sleep", "1000"])
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execvpe("sleep", ["sleep", "{SECONDS}"], {{"PATH": os.environ["PATH"]}})
    os._exit(0)
print("left", flush=True)
"""


def run(source: str, *, timeout_s: float = math.inf, env: dict[str, str] | None = None) -> ProgramEnd:
    async def main() -> ProgramEnd:
        deadline = Deadline(timeout_s)
        try:
            return await run_program([sys.executable, "-c", source], env or {}, None, deadline)
        finally:
            deadline.stop()

    return asyncio.run(main())


def descendants() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    """False for one that has ended, also if its exit status was not taken: a test of the same session may have made
    this process the one that adopts orphans."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(descendants())
    yield
    assert set(descendants()) <= before


def sleepers() -> list[int]:
    """The processes ``sleep`` of this test, also those that have left its tree."""
    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline() == ["sleep", SECONDS]:
                pids.append(process.pid)
    return pids


def wait_until(condition: Callable[[], Any], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            pytest.fail(what)
        time.sleep(0.02)


def test_its_end_has_its_status_and_both_streams() -> None:
    end = run("import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(3)")
    assert (end.status, end.output, end.problem) == (3, "out\nerr\n", "")
    with pytest.raises(
        ProgramFailed, match=r"(?s)the program .* ended with status 3 after .*last lines:\nout\nerr"
    ):
        end.check()


def test_one_that_ends_well_is_no_error() -> None:
    assert run("print(1)").check().output == "1\n"


def test_a_signal_is_named() -> None:
    end = run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert end.status == -signal.SIGKILL
    with pytest.raises(ProgramFailed, match="was killed by SIGKILL"):
        end.check()


def test_one_that_cannot_be_started_says_so() -> None:
    async def main() -> ProgramEnd:
        return await run_program(["no-such-program"], {}, None, Deadline(math.inf))

    end = asyncio.run(main())
    assert (end.status, end.output) == (127, "no-such-program: No such file or directory\n")


def test_one_that_hangs_is_killed_after_its_time() -> None:
    end = run(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)", timeout_s=0.5
    )
    with pytest.raises(ProgramFailed, match=r"was killed: it took longer than 0\.5 s"):
        end.check()


def test_one_that_hangs_may_end_in_its_own_way() -> None:
    source = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit('saved'))\n"
    end = run(f"{source}print('ready', flush=True)\ntime.sleep(1000)", timeout_s=5.0)
    assert end.output == "ready\nsaved\n"
    assert end.problem


def test_processes_that_it_leaves_end_with_it() -> None:
    end = run(LEAVES_PROCESSES)
    assert (end.status, end.output) == (0, "left\n")
    assert not sleepers(), "the daemon too, which has no variable of the session"


def test_processes_that_it_leaves_end_with_its_worker(tmp_path: Path) -> None:
    worker = (
        "import asyncio, math\n"
        "from flexmarl.actors.deadline import Deadline\n"
        "from flexmarl.actors.gateway.program import run_program\n"
        f"source = {LEAVES_PROCESSES!r} + 'import time; time.sleep(1000)'\n"
        "async def main():\n"
        f"    await run_program([{sys.executable!r}, '-c', source], {{}}, None, Deadline(math.inf))\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", worker], env=os.environ) as process:
        wait_until(lambda: sleepers(), "it has left its daemon")
        keeper = psutil.Process(process.pid).children()[0]
        process.kill()
    wait_until(lambda: not is_alive(keeper), "the process between ends with the worker")
    assert not sleepers()


def test_gigabytes_of_output_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_module, "MOST_OUTPUT_BYTES", 8 << 20)
    end = run("import sys\nwhile True: sys.stdout.write('x' * 65536)")
    assert end.problem == "it printed more than 8 MiB"
    assert len(end.output) < 80_000


def test_the_middle_of_a_long_output_is_dropped() -> None:
    end = run("print('first'); print('x' * 1_000_000); print('last')")
    assert end.output.startswith("first\n")
    assert end.output.endswith("last\n")
    assert "bytes ...]" in end.output
    assert len(end.output) < 80_000


def test_cancellation_ends_it() -> None:
    async def main() -> None:
        task = asyncio.create_task(run_program(["sleep", SECONDS], {}, None, Deadline(math.inf)))
        while not sleepers():
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not sleepers()


def test_its_rewards_are_read_from_its_file() -> None:
    write = "import os; open(os.environ['FLEXMARL_REWARDS_FILE'], 'w').write({!r})"
    assert run(write.format('{"agents": {"solver": 1}}')).reported() == {"agents": {"solver": 1}}
    with pytest.raises(ProgramFailed, match="has written no JSON"):
        run(write.format("{")).reported()
    with pytest.raises(ProgramFailed, match="has written nothing to FLEXMARL_REWARDS_FILE"):
        run("pass").reported()


def test_no_proxy_stands_before_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    end = run("import os; print(os.environ['NO_PROXY'], os.environ[" + repr(MARK) + "])", env={MARK: "1"})
    assert end.output == "example.org,127.0.0.1,localhost 1\n"
