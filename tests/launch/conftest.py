"""Real runs of the tiny recipe: started as a person would, watched from outside."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from flexmarl.launch.hosts import env

from ..patience import PATIENCE_S
from ..warm_process import TEMPLATE, WarmProcess

if TYPE_CHECKING:
    from .in_process import Finished, RunsHere

TINY = Path(__file__).parent / "recipes" / "tiny"
SOURCES = Path(__file__).parents[2] / "scripts" / "src"
ONE_AGENT = ("agents={solver: {}}", "data.shape=alone")
# Trainers and instances that do not import transformers start in a third of the time.
SIMULATED_POLICIES = ("engine={name: simulated, token_s: 1.0e-4}", "trainer.name=simulated")
# One agent without torch: such a run starts in a third of the time. The trainer's checkpoint names the trained samples.
SIMULATED = (
    *ONE_AGENT,
    "agent_defaults.model=null",
    "engine={name: simulated, median_tokens: 2}",
    "trainer.name=simulated",
)
# One query a step and one sequence at a time: then not even the rounding of a sum depends on the order of arrival.
REPRODUCIBLE = (
    "training.queries_per_step=1",
    "training.micro_batch=4",
    "agent_defaults.engine.max_batch=1",
    "agent_defaults.sft={batches: 2, batch_size: 4}",
)

# The process of the checks before a start takes as long as an actor's. It has tests of its own.
NO_FINDINGS = {"recipe": [], "models": [], "cached": False}
UNCHECKED = f"""
from flexmarl.launch.run.preflight import preflight
preflight._findings = lambda *_: {NO_FINDINGS}
"""


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.02)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines: the last one may be half written."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def whole_lines(path: Path) -> int:
    """Their number. They are not parsed, which costs more than the run if it is asked for again and again."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Launched:
    """A ``flexmarl`` process, its actors, and the run directory that it works on."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        terminal: int | None = None,
        prelude: str = "",
        on: Sequence[str] = (),
        warm: bool = False,
    ) -> None:
        """``terminal``: a terminal's descriptor, to run on instead of with its output in a file. ``prelude``: code that
        the process runs first. ``on``: words before the command, which run it on another host. ``warm``: it is a fork
        of a process that has imported torch, if its environment is the usual one (``warm_process.py``)."""
        self.directory = directory
        self.output = directory.parent / f"{directory.name}-{time.monotonic_ns()}.out"
        # Every process with this folder in its environment and every file in this folder belong to the run.
        self._runtime_base = Path(tempfile.mkdtemp(prefix="r", dir=env.runtime_base()))
        environment = {
            **os.environ,
            "PYTHONPATH": str(SOURCES),
            "OMP_NUM_THREADS": "1",
            "FLEXMARL_RUNTIME_BASE": str(self._runtime_base),
        }
        code = f"{prelude}\nimport sys; from flexmarl.launch.cli.main import main; sys.exit(main())"
        command = [*on, sys.executable, "-c", code, *arguments]
        warm = warm and terminal is None
        with self.output.open("wb") as output:
            stream = output.fileno() if terminal is None else terminal
            forked = TEMPLATE.start(code, arguments, environment, stream, on=on) if warm else None
            self.process: WarmProcess | subprocess.Popen[bytes] = forked or subprocess.Popen(
                command if terminal is None else ["setsid", "--ctty", "--wait", *command],
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=stream,
                stderr=stream,
                env=environment,
                start_new_session=terminal is None,
            )

    # ------------------------------------------------------------------ looking

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return json_lines(self.directory / "metrics.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        return json_lines(self.directory / "events.jsonl")

    def actors(self) -> dict[str, psutil.Process]:
        """The actors' processes by name: each writes to the log of its name. One process has forked all of them."""
        found: dict[str, psutil.Process] = {}
        for actor in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):  # it has just ended
                if actor.ppid() != self.process.pid:
                    found.setdefault(Path(f"/proc/{actor.pid}/fd/2").readlink().stem, actor)
        return found

    def _processes(self) -> list[psutil.Process]:
        """All that run and belong to the run, also without their launcher."""
        found = []
        variable = f"FLEXMARL_RUNTIME_BASE={self._runtime_base}".encode()
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):  # it has ended, or is another user's
                if variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        return found

    def wait_for_output(self, text: str) -> None:
        def there() -> bool:
            assert self.process.poll() is None or text in self.text, f"ended without {text!r}:\n{self.text}"
            return text in self.text

        wait_until(there, f"{text!r} in\n{self.text}")

    def wait_for_step(self, step: int) -> None:
        """Returns when step ``step`` is complete."""

        def there() -> bool:
            ended = self.process.poll() is not None  # asked first: its last step may come meanwhile
            if whole_lines(self.directory / "metrics.jsonl") >= step:
                return True
            assert not ended, f"ended before step {step}:\n{self.text}"
            return False

        wait_until(there, f"step {step}")

    # ------------------------------------------------------------------ ending

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        return self.process.wait(timeout_s)

    def lose_host(self) -> None:
        """Nothing of it runs from one moment to the next, and what was in its memory is gone."""
        while found := self._processes():  # a child may have begun meanwhile
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait(PATIENCE_S)
        for path in self._runtime_base.iterdir():
            shutil.rmtree(path)

    def assert_nothing_is_left(self) -> None:
        """No process, no socket, no shared memory."""
        wait_until(lambda: not self._processes(), "actors gone")
        assert not list(self._runtime_base.rglob("*")), self.text

    def assert_logs_are_clean(self) -> None:
        for log in (self.directory / "logs").iterdir():
            text = log.read_text()
            for sign in (
                "Traceback",
                "never retrieved",
                "was destroyed",
                "never awaited",
                "Exception in callback",
            ):
                assert sign not in text, f"{log}:\n{text}"

    def close(self) -> None:
        """Ends a process that a failed test left behind."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # its launcher's end has ended it meanwhile
                process.send_signal(signal.SIGCONT)
        wait_until(lambda: not self._processes(), "actors gone")
        wait_until(self._is_removed, f"nothing left in {self._runtime_base} of\n{self.text}")

    def _is_removed(self) -> bool:
        """The process that cleans up for a killed launcher may be about to remove the files, and no longer be listed:
        so the folder is tried again."""
        with contextlib.suppress(FileNotFoundError):
            try:
                self._runtime_base.rmdir()
            except OSError as error:
                if error.errno == errno.ENOTEMPTY:
                    return False
                raise
        return True


class Launcher:
    """Starts runs in a folder of its own."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.recipe = TINY
        self._launched: list[Launched] = []

    def train(
        self,
        name: str,
        *settings: str,
        recipe: Path = TINY,
        terminal: int | None = None,
        prelude: str = UNCHECKED,
        on: Sequence[str] = (),
    ) -> Launched:
        arguments = ("train", str(recipe), "--runs", str(self.runs), "--name", name, *settings)
        return self._launch(name, *arguments, terminal=terminal, prelude=prelude, on=on)

    def node(self, run: str, name: str, *options: str, on: Sequence[str] = ()) -> Launched:
        """A node of the run, which may begin later."""
        join = ("node", "--join", str(self.runs / run / "address"), "--name", name, *options)
        return self._launch(run, *join, on=on)

    def resume(self, name: str, *words: str) -> Launched:
        return self._launch(name, "train", "--resume", str(self.runs / name), *words)

    def serve(self, name: str, source: Path, *words: str) -> Launched:
        return self._launch(name, "serve", str(source), "--runs", str(self.runs), "--name", name, *words)

    def _launch(self, name: str, *arguments: str, prelude: str = UNCHECKED, **options: Any) -> Launched:
        # A run that is checked first is one as a person starts it: with new interpreters throughout.
        warm = prelude.startswith(UNCHECKED)
        launched = Launched(self.runs / name, *arguments, prelude=prelude, warm=warm, **options)
        self._launched.append(launched)
        return self._launched[-1]

    def close(self) -> None:
        """Ends all that failed tests left behind, also if one of them can't be ended."""
        with contextlib.ExitStack() as stack:
            for launched in self._launched:
                stack.callback(launched.close)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """A run of six steps that nothing disturbs. Tests read its folder."""
    launcher = Launcher(tmp_path_factory.mktemp("whole"))
    run = launcher.train("whole", *REPRODUCIBLE, f"data.trace={launcher.runs / 'whole.trace'}", prelude="")
    assert run.wait() == 0, run.text
    yield run
    launcher.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> "Finished":
    """The same run in this process, which takes a quarter of the time: its losses are the same, bit for bit."""
    from .in_process import RunsHere

    runs = RunsHere(tmp_path_factory.mktemp("undisturbed"))
    run = runs.train("whole", *REPRODUCIBLE, f"data.trace={runs.runs / 'whole.trace'}")
    assert run.status == 0, run.text
    return run


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory.mktemp("runs"))
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def runs_here(tmp_path_factory: pytest.TempPathFactory) -> "RunsHere":
    from .in_process import RunsHere

    return RunsHere(tmp_path_factory.mktemp("runs"))
