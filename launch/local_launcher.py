"""One run on this machine: the actor processes, from their start to the last of them gone.

    launcher ── Supervisor ──┬─ store
             └─ RunConsole   ├─ trainer
                             ├─ <policy>-0, <policy>-1, ...   (instances)
                             ├─ rollout
                             └─ orchestrator

The first actor that dies ends the run, and with it all others.
"""

import asyncio
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..actors.messages import InstanceApi, OrchestratorApi, RolloutApi, RunResult, StoreApi, TrainerApi
from ..actors.orchestrator.checkpoint import RunState
from ..actors.run_events import ActorSilent
from ..actors.store_client import segment_directories
from ..core.errors import ActorDead
from ..core.private_directory import private_directory
from ..core.ref import ActorRef
from ..core.supervision.supervisor import Supervisor
from ..core.system import ActorSystem
from ..core.task_groups import first_error
from ..core.telemetry import LogLevel
from . import env
from .actor_specs import References, actor_specs
from .console.display import Display
from .console.run_console import RunConsole
from .errors import Interrupted
from .run_config import RunConfig
from .run_directory import RunDirectory

_STATISTICS_INTERVAL_S = 1.0
_SILENCE_S = 300.0
_SLOW_START_S = 60.0


async def run(
    config: RunConfig,
    directory: RunDirectory,
    display: Display,
    resume: tuple[Path, RunState] | None,
    log_level: LogLevel = "info",
) -> RunResult:
    """Trains until the last step, a stop signal, or a failure.

    The first ctrl-C (SIGINT) or SIGTERM ends the run after the steps under way, with a checkpoint; a second one, or
    one before the training begins, ends it at once (Interrupted). Raises ActorDead or ActorFailed if an actor
    was lost. In every case no process, socket or shared memory is left.
    """
    with _Signals(display) as signals:  # outermost: a signal during the cleanup must not interrupt it
        async with (
            private_directory(env.runtime_base()) as runtime_dir,
            ActorSystem("launcher", runtime_dir) as system,
            Supervisor(
                system, runtime_dir, directory.logs, env.actor_environment(), log_level=log_level
            ) as supervisor,
        ):
            console = RunConsole(directory, display)
            await system.add(console, "console")
            local_run = LocalRun(config, directory, runtime_dir, supervisor, console, resume)
            work = asyncio.create_task(local_run.train(signals))
            death = asyncio.create_task(supervisor.wait_failed())
            ends: list[asyncio.Future[Any]] = [signals.interrupted, death, system.failure, work]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                signals.stop_gracefully = None
                await _cancelled(work, death)
            # In this order: a death makes calls fail, so it is the cause if both are there.
            if signals.interrupted.done():
                await supervisor.kill_all()
                raise Interrupted(f"stopped by {signals.interrupted.result()}")
            if death.done() and not death.cancelled():
                death.result()
            if system.failure.done():
                raise system.failure.result()
            return work.result()


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A run within its supervisor. ``runtime_dir``: the run's directory on tmpfs. ``resume``: a committed checkpoint's
    folder and state."""

    config: RunConfig
    directory: RunDirectory
    runtime_dir: Path
    supervisor: Supervisor
    console: RunConsole
    resume: tuple[Path, RunState] | None

    async def train(self, signals: "_Signals") -> RunResult:
        orchestrator = await self._start_actors()
        await orchestrator.api.start()
        signals.stop_gracefully = lambda: orchestrator.tell_nowait("stop")
        self.console.background(_watch_processes(self.supervisor, self.console), "statistics")
        return await self.console.ended_with

    async def _start_actors(self) -> ActorRef[OrchestratorApi]:
        """Spawns all actors at once; their references are known before their processes run."""
        references = self._references()
        self._prepare_store(references.store)
        specs = actor_specs(self.config, self.directory, self.runtime_dir, references, self.resume)
        spawn = self.supervisor.spawn
        spawned = {name: spawn(spec.actor_class, name, spec.setup) for name, spec in specs.items()}
        await _all_started(spawned, self.console)
        return references.orchestrator

    def _references(self) -> References:
        reference = self.supervisor.reference
        return References(
            store=reference("store", StoreApi),
            trainer=reference("trainer", TrainerApi),
            rollout=reference("rollout", RolloutApi),
            orchestrator=reference("orchestrator", OrchestratorApi),
            console=self.console.ref,
            instances={
                policy: [reference(f"{policy}-{n}", InstanceApi) for n in range(settings.instances)]
                for policy, settings in self.config.policies.items()
            },
        )

    def _prepare_store(self, store: ActorRef[StoreApi]) -> None:
        """Makes an empty folder: rows of an earlier process belong to steps that are repeated."""
        store_dir = self.directory.store
        shutil.rmtree(store_dir, ignore_errors=True)
        store_dir.mkdir(mode=0o700)
        self.directory.store_address.write_text(store.address)  # for `flexmarl store`
        for path in segment_directories(self.runtime_dir, store_dir).all():
            path.mkdir(mode=0o700)


async def _watch_processes(supervisor: Supervisor, console: RunConsole) -> None:
    """Keeps the console's figures up to date. Reports an actor that does not answer; raises ActorDead in the end.

    If this process itself was stopped for long, all actors are reported, and answer in the next round.
    """
    last_answer = dict.fromkeys(supervisor.running, time.monotonic())
    silent: set[str] = set()
    await supervisor.process_statistics()  # these figures are of the start
    while True:
        console.refresh(await supervisor.process_statistics())
        for name in supervisor.running:  # those that are being stopped have no time to answer
            answered_at = last_answer[name]
            silent_s = round(time.monotonic() - answered_at, 1)
            if name in console.processes:
                last_answer[name] = time.monotonic()
                silent.discard(name)
            elif name not in silent:
                silent.add(name)
                await console.event(ActorSilent(name, silent_s))
            elif silent_s > _SILENCE_S:
                raise ActorDead(name, f"its process runs, but has not answered for {silent_s:g} s")
        await asyncio.sleep(_STATISTICS_INTERVAL_S)


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Signals:
    """SIGINT and SIGTERM during a run: the first asks it to stop, the second ends it.

    ``interrupted`` is set to the name of the signal that ends it.
    """

    def __init__(self, display: Display) -> None:
        self.interrupted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stop_gracefully: Callable[[], None] | None = None
        self._display = display
        self._asked = False

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._received, number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        self.interrupted.cancel()

    def _received(self, number: signal.Signals) -> None:
        if self.stop_gracefully is not None and not self._asked:
            self._asked = True
            name = signal.Signals(number).name
            self._display.warn(
                f"{name}: stopping after the steps under way; once more stops at once", at_once=True
            )
            self.stop_gracefully()
        elif not self.interrupted.done():
            self.interrupted.set_result(signal.Signals(number).name)


async def _all_started(spawned: Mapping[str, Coroutine[Any, Any, object]], console: RunConsole) -> None:
    """Waits for all of them and shows the progress: loading a large model takes long. Raises the first error."""
    slow_from = time.monotonic() + _SLOW_START_S
    with first_error():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(spawning, name=name) for name, spawning in spawned.items()]
            while starting := [task for task in tasks if not task.done()]:
                names = ", ".join(task.get_name() for task in starting)
                which = f" (not yet: {names})" if time.monotonic() > slow_from else ""
                await console.phase(f"starting actors{which}", len(tasks) - len(starting), len(tasks))
                await asyncio.wait(
                    starting, timeout=_STATISTICS_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
                )
