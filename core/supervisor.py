"""Spawns actors into processes of their own, sees them die, and leaves nothing of them behind.

    async with Supervisor(system, directory, log_directory, env) as supervisor:
        await supervisor.spawn("pkg.module:Store", "store", {"budget": 10})
        store = supervisor.reference("store", StoreApi)
        await supervisor.wait_for_death()      # raises ActorDead or ActorFailed

A spawned actor is one process; its name is its log file's.
"""

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import structlog

from .actor import Actor, endpoint
from .errors import ActorDead, ActorFailed, CallTimeout, FlexmarlError
from .host import HostInit, write_init
from .ref import ActorRef
from .system import ActorSystem, SystemActor, ipc_address
from .telemetry import ProcessStatistics

log = structlog.get_logger()

Api = TypeVar("Api")

# A policy may be downloaded and loaded first. A process that lives is not late: one that does not is noticed at once.
START_TIMEOUT_S = 3600.0
_STOP_GRACE_S = 5.0
_TERM_GRACE_S = 2.0
STATISTICS_TIMEOUT_S = 10.0
_LOG_TAIL_LINES = 15
_LOG_TAIL_BYTES = 2**16


@asynccontextmanager
async def private_directory(base: Path) -> AsyncIterator[Path]:
    """A new 0700 directory for sockets and shared memory, removed at the end with all that is in it."""
    directory = Path(tempfile.mkdtemp(prefix="flexmarl-", dir=base))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@dataclass(slots=True)
class _Child:
    name: str
    address: str
    process: asyncio.subprocess.Process
    log_path: Path
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    death: FlexmarlError | None = None  # ActorFailed as soon as the actor says so, else set when it has ended
    watch: asyncio.Task[None] | None = None


class Supervisor(Actor):
    """One-for-all: the first death ends the run. The system's actor named ``supervisor``."""

    def __init__(
        self, system: ActorSystem, directory: Path, log_directory: Path, env: Mapping[str, str]
    ) -> None:
        """``env``: the whole environment of the spawned processes."""
        self._host_system = system
        self._directory = directory
        self._log_directory = log_directory
        self._env = dict(env)
        self._children: dict[str, _Child] = {}
        self._stopping = False

    async def __aenter__(self) -> Self:
        self._death: asyncio.Future[FlexmarlError] = asyncio.get_running_loop().create_future()
        await self._host_system.add(self, "supervisor")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop_all()
        self._death.cancel()

    @endpoint
    async def ready(self, name: str, pid: int) -> None:
        log.info("actor ready", name=name, pid=pid)
        self._children[name].started.set()

    @endpoint
    async def failed(self, name: str, error: str, remote_traceback: str) -> None:
        death = self._children[name].death = ActorFailed(name, error, remote_traceback)
        # Now, not when its process has ended: others that fail in consequence may be gone before it.
        self._died(death)

    def reference(self, name: str, api: type[Api]) -> ActorRef[Api]:
        """To the actor spawned, or to be spawned, under ``name``."""
        return self._host_system.ref(name, ipc_address(self._directory, name), api)

    async def spawn(self, actor_class: str, name: str, kwargs: Mapping[str, Any]) -> None:
        """Starts ``module:Class`` in a new process and returns once its ``on_start`` is through.

        Raises ActorFailed where its constructor or ``on_start`` raised, ActorDead where the process ended
        otherwise or is not ready within START_TIMEOUT_S.
        """
        child = await self._start_process(actor_class, name, kwargs)
        ended = asyncio.ensure_future(child.ended.wait())
        started = asyncio.ensure_future(child.started.wait())
        try:
            await asyncio.wait([started, ended], timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            started.cancel()
            ended.cancel()
        if child.ended.is_set():
            assert child.death is not None
            raise child.death
        if not child.started.is_set():
            raise ActorDead(name, f"not ready within {START_TIMEOUT_S:g} s; its log: {child.log_path}")

    async def _start_process(self, actor_class: str, name: str, kwargs: Mapping[str, Any]) -> _Child:
        own = {"name": "supervisor", "address": self._host_system.address}
        init = write_init(HostInit(actor_class, dict(kwargs), own))
        log_path = self._log_directory / f"{name}.log"
        with log_path.open("ab") as log_file:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "flexmarl.core.host", str(self._directory), name,
                stdin=asyncio.subprocess.PIPE, stdout=log_file, stderr=log_file,
                env=self._env, start_new_session=True,
            )  # fmt: skip
        child = _Child(name, ipc_address(self._directory, name), process, log_path)
        self._children[name] = child
        child.watch = asyncio.create_task(self._watch(child), name=f"watch {name}")
        assert process.stdin is not None
        process.stdin.write(init)  # never closed: its end tells the child that this process is gone
        return child

    async def _watch(self, child: _Child) -> None:
        code = await child.process.wait()
        if child.death is None:
            how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
            last = "" if self._stopping else _last_lines(child.log_path)
            child.death = ActorDead(child.name, f"process {child.process.pid} {how}{last}")
        child.ended.set()
        self._host_system.mark_dead(child.address, child.death)
        self._died(child.death)

    def _died(self, death: FlexmarlError) -> None:
        if not self._stopping and not self._death.done():
            self._death.set_result(death)

    async def wait_for_death(self) -> None:
        """Raises ActorDead or ActorFailed when the first of the spawned actors is gone."""
        raise await asyncio.shield(self._death)

    @property
    def running(self) -> list[str]:
        """The names of the actors that have started and have not ended."""
        return [
            name
            for name, child in self._children.items()
            if child.started.is_set() and not child.ended.is_set()
        ]

    async def statistics(self) -> dict[str, ProcessStatistics]:
        """The own figures of this process, and of every running one that answers within 10 s, by actor name."""
        addresses = {name: self._children[name].address for name in self.running}
        addresses[self._host_system.name] = self._host_system.address
        refs = {name: self._host_system.ref("system", at, SystemActor) for name, at in addresses.items()}
        figures = await asyncio.gather(*(_statistics_of(ref) for ref in refs.values()))
        return {name: figure for name, figure in zip(refs, figures, strict=True) if figure is not None}

    async def stop_all(self) -> None:
        """Asks every process to end, then makes it: none is left when this returns."""
        self._stopping = True
        children = list(self._children.values())
        await asyncio.gather(*(self._stop(child) for child in children))
        await asyncio.gather(*(child.watch for child in children if child.watch is not None))

    async def kill_all(self) -> None:
        """Ends every process at once, whatever it is doing."""
        self._stopping = True
        for child in self._children.values():
            _send_signal(child, signal.SIGKILL)
        await asyncio.gather(*(child.ended.wait() for child in self._children.values()))

    async def _stop(self, child: _Child) -> None:
        if child.started.is_set() and not child.ended.is_set():
            ref = self._host_system.ref("system", child.address, SystemActor)
            try:
                if child.death is None:  # else it is ending already
                    await ref.within(_STOP_GRACE_S).stop()
                await asyncio.wait_for(child.ended.wait(), _STOP_GRACE_S)
            except (FlexmarlError, TimeoutError) as error:
                log.warning("actor did not stop when asked", name=child.name, error=str(error))
        for number, grace_s in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, None)):
            if not child.ended.is_set():
                _send_signal(child, number)
                try:
                    await asyncio.wait_for(child.ended.wait(), grace_s)
                except TimeoutError:
                    log.warning("actor ignored SIGTERM", name=child.name)
        if child.process.stdin is not None:
            child.process.stdin.close()


def _last_lines(log_path: Path) -> str:
    """The end of an actor's log, as a paragraph that begins a new line; empty where there is nothing to show."""
    try:
        with log_path.open("rb") as log_file:
            log_file.seek(max(0, log_path.stat().st_size - _LOG_TAIL_BYTES))
            lines = log_file.read().decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    except OSError as error:
        return f"\nIts log can't be read: {error}"
    return f"\nThe last lines of {log_path}:\n" + "\n".join(lines) if lines else ""


def _send_signal(child: _Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, and the loop has not been told yet
        child.process.send_signal(number)


async def _statistics_of(ref: ActorRef[SystemActor]) -> ProcessStatistics | None:
    """None where the process is gone, or too busy or too stuck to answer."""
    try:
        return await ref.within(STATISTICS_TIMEOUT_S).statistics()
    except (ActorDead, ActorFailed, CallTimeout):
        return None
