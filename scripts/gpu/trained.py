"""Runs of ``flexmarl train`` as a person starts them, and what their folders say."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from flexmarl.launch.hosts import env
from flexmarl.launch.hosts.nvidia import DeviceMonitor

from .checks import Card, Check, holds, part

_POLL_S = 0.02
_REMOVAL_S = 60.0


class Late(Exception):
    """Something did not come in time."""


class WrongEnd(Exception):
    """A run has ended with another exit status than it should."""


class TrainRun:
    """A process of ``flexmarl train``, and the folder of its run."""

    def __init__(self, card: Card, name: str, recipe: str | Path, *words: str) -> None:
        """Starts it on the card. ``words``: settings and options."""
        self.name = name
        self.folder = card.folder / name
        self.output = card.folder / f"{name}.out"
        # Not in the folder of the test: the path of a socket has at most 107 characters.
        self.runtime = Path(tempfile.mkdtemp(prefix="gpu", dir=env.runtime_base()))
        self._began = datetime.now(UTC)
        device = f"agent_defaults.model.device={card.device}"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flexmarl.launch.cli.main", "train", str(recipe),
                 "--runs", str(card.folder), "--name", name, device, *words],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, "FLEXMARL_RUNTIME_BASE": str(self.runtime)}, start_new_session=True,
            )  # fmt: skip

    @property
    def text(self) -> str:
        """All that it has printed."""
        return self.output.read_text(errors="replace")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The figures of each step."""
        return _json_lines(self.folder / "metrics.jsonl")

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of that name."""
        return [event for event in _json_lines(self.folder / "events.jsonl") if event["event"] == name]

    def log(self, actor: str) -> str:
        """The log of an actor. Empty before the actor writes."""
        path = self.folder / "logs" / f"{actor}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def actors(self) -> dict[str, psutil.Process]:
        """The living processes of actors by name: each writes to the log of its name."""
        actors = {}
        with contextlib.suppress(psutil.NoSuchProcess):  # the run has ended
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):  # it has just ended
                    actors[Path(f"/proc/{process.pid}/fd/2").readlink().stem] = process
        return actors

    def wait_until(self, condition: Callable[[], object], what: str, deadline: float) -> None:
        """Waits for a condition. ``deadline``: of the clock ``time.monotonic``. Raises Late, also if the run ends
        first."""
        while not condition():
            if self.process.poll() is not None and not condition():
                raise Late(f"{self.name} has ended with status {self.process.returncode} before {what}")
            if time.monotonic() > deadline:
                raise Late(f"{self.name}, not in time: {what}")
            time.sleep(_POLL_S)

    def wait_for_step(self, step: int, deadline: float) -> None:
        """Waits until that step is complete."""
        self.wait_until(lambda: len(self.metrics) >= step, f"step {step}", deadline)

    def wait_end(self, deadline: float) -> None:
        """Waits for the end. Raises Late."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Late(f"{self.name} has not ended; its last line: {self.last_line()}") from None

    def last_line(self) -> str:
        """The last line that it has printed."""
        return (self.text.strip().splitlines() or ["none"])[-1][:300]

    def ready_times(self, actor: str = "") -> list[datetime]:
        """The times at which an actor was ready, again after each restart; of all actors without a name."""
        times = []
        for line in self.log("launcher").split("\n")[:-1]:
            with contextlib.suppress(json.JSONDecodeError):
                record = json.loads(line)
                if record["event"] == "actor ready" and record["name"].startswith(actor):
                    times.append(datetime.fromisoformat(record["timestamp"]))
        return times

    def seconds_until_ready(self) -> float:
        """From the start of the process until the last actor was ready. Of a run without restarts."""
        return (max(self.ready_times()) - self._began).total_seconds()

    def left_files(self) -> list[str]:
        """Sockets and shared memory that the run has left behind."""
        return [str(path.relative_to(self.runtime)) for path in self.runtime.rglob("*")]

    def close(self) -> None:
        """Kills the process if it lives, and removes its sockets and shared memory."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        # Actors of a killed process end some time later, and until then make files while others are being removed.
        deadline = time.monotonic() + _REMOVAL_S
        while self.runtime.exists() and time.monotonic() < deadline:
            shutil.rmtree(self.runtime, ignore_errors=True)
            time.sleep(_POLL_S)


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines: the last one may be half written."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


@contextmanager
def closing(runs: Sequence[TrainRun]) -> Iterator[None]:
    """Closes all of them at the end."""
    with contextlib.ExitStack() as stack:
        for run in runs:
            stack.callback(run.close)
        yield


def checks_of_part(name: str, checks: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """The checks of a part of a test, each with the part's name. An error of it is a failed check: then the next part
    comes."""
    yield from part(name, lambda: (replace(check, name=f"{name}: {check.name}") for check in checks()))


def check_end(run: TrainRun, deadline: float, status: int = 0) -> Iterator[Check]:
    """The run ends in time and leaves no file. Raises WrongEnd if its exit status is another: the rest of the part has
    nothing to look at."""
    run.wait_end(deadline)
    if run.process.returncode != status:
        raise WrongEnd(f"exit status {run.process.returncode}: {run.last_line()}")
    yield holds("exit status", status, str(status), True)
    yield Check("seconds", sum(event["wall_s"] for event in run.events("run_ended")))
    files = run.left_files()
    yield holds("sockets and shared memory left", ", ".join(files[:5]) or "none", "none", not files)


class DeviceMemory:
    """The memory in use on a card, by its driver."""

    def __init__(self, card: Card) -> None:
        import torch

        self._monitor = DeviceMonitor()
        self._uuid = f"GPU-{torch.cuda.get_device_properties(card.device).uuid}" if card.is_cuda else ""

    def used_bytes(self) -> int | None:
        """None on a CPU, and if the driver does not say."""
        use = self._monitor.read().get(self._uuid)
        return None if use is None else use.used_bytes
