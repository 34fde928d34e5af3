"""Real runs of the tiny recipe: started as a person would, watched from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..patience import PATIENCE_S

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


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.02)


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Launched:
    """A ``flexmarl`` process, its actors, and the run directory that it works on."""

    def __init__(self, directory: Path, *arguments: str, terminal: int | None = None) -> None:
        """``terminal``: a terminal's descriptor, to run on instead of with its output in a file."""
        self.directory = directory
        self.output = directory.parent / f"{directory.name}-{time.monotonic_ns()}.out"
        environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-c",
            "import sys; from flexmarl.launch.cli import main; sys.exit(main())",
            *arguments,
        ]
        with self.output.open("wb") as output:
            stream = output.fileno() if terminal is None else terminal
            self.process = subprocess.Popen(
                command if terminal is None else ["setsid", "--ctty", "--wait", *command],
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=stream,
                stderr=stream,
                env=environment,
                start_new_session=terminal is None,
            )
        self._seen: set[psutil.Process] = set()
        self.private: Path | None = None

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
        """The actors' processes by name: each writes to the log of its name."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            self._seen.add(child)
            found[Path(f"/proc/{child.pid}/fd/2").readlink().stem] = child
        if self.private is None:
            sockets = [
                Path(str(c.laddr))
                for c in psutil.Process(self.process.pid).net_connections("unix")
                if c.laddr
            ]
            own = (path.parent for path in sockets if path.name == "launcher.sock")
            self.private = next(own, None)  # it may not listen yet
        return found

    def wait_for_output(self, text: str) -> None:
        def there() -> bool:
            assert self.process.poll() is None or text in self.text, f"ended without {text!r}:\n{self.text}"
            return text in self.text

        wait_until(there, f"{text!r} in\n{self.text}")

    def wait_for_step(self, step: int) -> None:
        """Returns when step ``step`` is complete; the actors are known from then on."""

        def there() -> bool:
            assert self.process.poll() is None, f"ended before step {step}:\n{self.text}"
            return len(self.metrics) >= step

        wait_until(there, f"step {step}")
        self.actors()

    # ------------------------------------------------------------------ ending

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        return self.process.wait(timeout_s)

    def assert_nothing_is_left(self) -> None:
        """No process, no socket, no shared memory."""
        wait_until(
            lambda: not any(p.is_running() and p.status() != "zombie" for p in self._seen), "actors gone", 10
        )
        assert self.private is not None, "look at the actors while they run"
        assert not self.private.exists()

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
        for process in self._seen:
            if process.is_running():
                process.send_signal(signal.SIGCONT)


class Launcher:
    """Starts runs in a folder of its own."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.recipe = TINY
        self._launched: list[Launched] = []

    def train(self, name: str, *settings: str, recipe: Path = TINY, terminal: int | None = None) -> Launched:
        arguments = ("train", str(recipe), "--runs", str(self.runs), "--name", name, *settings)
        return self._launch(name, *arguments, terminal=terminal)

    def resume(self, name: str, *words: str) -> Launched:
        return self._launch(name, "train", "--resume", str(self.runs / name), *words)

    def _launch(self, name: str, *arguments: str, terminal: int | None = None) -> Launched:
        self._launched.append(Launched(self.runs / name, *arguments, terminal=terminal))
        return self._launched[-1]

    def close(self) -> None:
        for launched in self._launched:
            launched.close()


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory.mktemp("runs"))
    yield launcher
    launcher.close()
