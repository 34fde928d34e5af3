"""Whole runs in the process of the tests: the command ``flexmarl train``, with actors that are tasks, not processes.

All else is as in any run: the actors, their sockets, the files and the words. Each process of a run would import torch
and transformers again, which takes much longer than the training of a test. Tests of processes (signals, deaths, logs,
shared memory) have real ones: ``conftest.Launcher``.
"""

import asyncio
import io
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import structlog

from flexmarl.core.supervision.node import Launch, Running
from flexmarl.core.supervision.process_node import ProcessNode
from flexmarl.core.supervision.worker_init import WorkerInit, read_init, write_init
from flexmarl.core.system import ActorSystem
from flexmarl.core.wire.curve import Keys
from flexmarl.core.wire.zeromq import ZmqWire, ipc_address
from flexmarl.core.worker.hosted_actor import HostedActor
from flexmarl.launch.cli.main import main
from flexmarl.launch.run import run as run_module
from flexmarl.launch.run.preflight import preflight
from flexmarl.launch.run.run import Run

from .conftest import NO_FINDINGS, TINY, json_lines


class TaskNode(ProcessNode):
    """Each actor in a task of this loop. It listens where its process would, and is made from the same bytes."""

    async def launch(self, launch: Launch) -> "RunningTask":  # type: ignore[override]  # no child process
        init = read_init(io.BytesIO(write_init(self._init(launch))))
        listening = self._listening.get(launch.name)
        # A duplicate, as a process has one: its wire closes it, and this node its own.
        duplicate = None if listening is None else listening.dup()
        return RunningTask(launch.name, init, self._directory, duplicate)


class RunningTask(Running):
    """One incarnation."""

    def __init__(self, name: str, init: WorkerInit, directory: Path, listening: socket.socket | None) -> None:
        super().__init__(name, init.epoch, "task")
        self._init = init
        self._listening = listening
        self._directory = directory
        self._task = asyncio.create_task(self._live(), name=f"actor {name}")

    def has_exited(self) -> bool:
        return self._task.done()

    async def wait_exit(self) -> str:
        await asyncio.wait([self._task])
        stopped = not self._task.cancelled() and self._task.result()
        return f"exit status {0 if stopped else 1}"

    def terminate(self) -> None:
        self._task.cancel()

    end = terminate

    async def _live(self) -> bool:
        """As ``worker_main`` does."""
        init, name = self._init, self.name
        keys = None if init.keys_file is None else Keys.load(Path(init.keys_file))
        wire = ZmqWire(init.tcp or ipc_address(self._directory, name), keys, init.epoch, self._listening)
        async with ActorSystem(
            name, self._directory, tcp=init.tcp, keys=keys, wire=wire, settings=init.settings
        ) as system:
            return await HostedActor(name, init, owns_process=False).serve(system)


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that has ended. ``status``: of the command. ``text``: all that it has written. ``problems``: what asyncio
    has logged, such as an error that no task has taken."""

    directory: Path
    status: int
    text: str
    problems: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return json_lines(self.directory / "metrics.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        return json_lines(self.directory / "events.jsonl")


class RunsHere:
    """Runs that are trained in this process, until they end, in a folder of their own."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs

    def train(self, name: str, *settings: str, recipe: Path = TINY) -> Finished:
        return self._run(name, "train", str(recipe), "--runs", str(self.runs), "--name", name, *settings)

    def resume(self, name: str, *words: str) -> Finished:
        return self._run(name, "train", "--resume", str(self.runs / name), *words)

    def evaluate(self, name: str, source: Path, *words: str) -> Finished:
        return self._run(name, "eval", str(source), "--runs", str(self.runs), "--name", name, *words)

    def credit(self, source: Path, *words: str) -> Finished:
        return self._run(source.name, "credit", str(source), "--runs", str(self.runs), *words)

    def _run(self, name: str, *arguments: str) -> Finished:
        output, problems = io.StringIO(), io.StringIO()
        with (
            actors_in_tasks(),
            _unchecked(),
            _same_log(),
            structlog.testing.capture_logs(),
            redirect_stdout(output),
            redirect_stderr(output),
            _asyncio_logs_to(problems),
        ):
            status = main(arguments)
        return Finished(self.runs / name, status, output.getvalue(), problems.getvalue())


def actors_in_tasks() -> AbstractContextManager[object]:
    """The actors of runs that start within it are tasks."""
    return patch.object(run_module, "ProcessNode", TaskNode)


def _unchecked() -> AbstractContextManager[object]:
    """Without the process of the checks before a start, which has tests of its own."""
    return patch.object(preflight, "_findings", lambda *_: NO_FINDINGS)


@contextmanager
def _same_log() -> Iterator[None]:
    """A command writes the log of its process to a file, which it closes. A fixture of the whole session may run one,
    which fixtures of modules come behind."""
    before = structlog.get_config()
    try:
        yield
    finally:
        structlog.configure(**before)


@asynccontextmanager
async def run_in_loop(runs: Path, name: str, *settings: str, recipe: Path = TINY) -> AsyncIterator[Run]:
    """A run with its actors in this loop. It is stopped at the end of the block."""
    with actors_in_tasks(), _unchecked():
        async with Run(recipe, settings=settings, runs=runs, name=name) as run:
            yield run


async def wait_for_step(run: Run, step: int) -> None:
    """Returns when step ``step`` is complete. Raises the error of a run that ends before."""
    while len(json_lines(run.directory.metrics)) < step:
        assert run.result is None, f"the run ended before step {step}"
        await asyncio.sleep(0.02)


def end_of(actor: str) -> None:
    """Ends an actor of this loop, as SIGTERM ends its process."""
    (task,) = (task for task in asyncio.all_tasks() if task.get_name() == f"actor {actor}")
    task.cancel()


@contextmanager
def _asyncio_logs_to(stream: io.StringIO) -> Iterator[None]:
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
