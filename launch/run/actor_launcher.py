"""The actors of a run, on all of its hosts, within its supervision: their start, and the watch over them.

An actor whose spec says so is restarted alone (``actor_specs.py``). The first other one that dies ends the run, and
with it all actors.
"""

import asyncio
import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...actors.messages import (
    ArchiveApi,
    InstanceApi,
    OrchestratorApi,
    RewardsApi,
    RolloutApi,
    RouterApi,
    RunResult,
    SessionsApi,
    SlotApi,
    StoreApi,
    TrainerApi,
)
from ...actors.orchestrator.checkpoint import RunState
from ...actors.rollout.block_watch import read_report, report_file
from ...actors.run_events import ActorEndedBadly, ActorRestarted, ActorSilent, WorkflowBlocked
from ...actors.trainer.pool.pool_config import SharedPoolConfig
from ...core.base.task_groups import first_error
from ...core.base.texts import text_of
from ...core.base.threads import in_thread
from ...core.errors import ActorDead, FlexmarlError
from ...core.ref import ActorRef
from ...core.supervision.system_api import STATISTICS_TIMEOUT_S
from ..config.run_config import RunConfig
from ..hosts.nvidia import DeviceMonitor
from ..monitoring.console.run_console import RunConsole
from ..run_folder.run_directory import RunDirectory
from ..sharing.sharing import Sharing
from .actor_specs import References, actor_specs
from .run_supervision import RunSupervision
from .span_keeper import SpanKeeper
from .stalls.watch import StallWatch, blocking_line

_STATISTICS_INTERVAL_S = 1.0
# A longer round means that the launcher itself was stopped: ctrl-Z, a frozen container.
_LONGEST_ROUND_S = 3 * STATISTICS_TIMEOUT_S
_SLOW_START_S = 60.0


@dataclass(frozen=True, slots=True)
class ActorLauncher:
    """Starts the actors of a run on all of its hosts, watches them, and waits for the end of the training.

    ``resume``: a committed checkpoint's folder and state. ``own_gpus``: the UUIDs of the GPUs of each actor that sees
    no other ones. ``archive``: the file of recorded trajectories; None: the run records nothing. ``gateway``: of
    sessions that services open; None: there is none. ``spans``: keeps those of all processes; None: they are not kept.
    ``sharing``: of other runs' groups; None without peers.
    """

    config: RunConfig
    directory: RunDirectory
    supervision: RunSupervision
    console: RunConsole
    resume: tuple[Path, RunState] | None
    own_gpus: Mapping[str, tuple[str, ...]]
    archive: ActorRef[ArchiveApi] | None = None
    gateway: ActorRef[SessionsApi] | None = None
    spans: SpanKeeper | None = None
    sharing: Sharing | None = None

    async def train(
        self, began: Callable[[ActorRef[OrchestratorApi]], None], stalls: StallWatch
    ) -> RunResult:
        """``began`` is called when the training has begun: from then on the orchestrator can be asked to stop.
        ``stalls``: not begun."""
        self.console.background(stalls.run(self.supervision), "stalls")
        orchestrator = await self.begin()
        began(orchestrator)
        if self.sharing is not None:
            self.console.background(self.sharing.run(orchestrator), "sharing")
        workers = (f"rollout-{n}" for n in range(self.config.rollout.workers))
        blocked = {name: report_file(self.directory.logs, name) for name in workers}
        silence_s = self.config.supervision.silence_s
        watch = _watch_processes(
            self.supervision, self.console, silence_s, blocked, lambda: stalls.standstill.is_still
        )
        self.console.background(watch, "statistics")
        self.console.background(_watch_devices(self.console), "devices")
        return await self.console.ended_with

    async def begin(self) -> ActorRef[OrchestratorApi]:
        """Starts all actors and the training; ``console.ended_with`` has the end."""
        if self.spans is not None:  # from the begin: processes hear early which share they record
            self.console.background(self.spans.run(), "spans")
        self.supervision.report_restarts(self._report_restart)
        self.supervision.report_late(self._late)
        orchestrator = await self._start_actors()
        await orchestrator.api.start()
        return orchestrator

    def _report_restart(self, actor: str, reason: FlexmarlError) -> None:
        self.console.ref.tell_nowait("event", ActorRestarted(actor, text_of(reason)))

    def _late(self, actor: str) -> None:
        line = blocking_line(report_file(self.directory.logs, actor))
        problem = "it did not end when it was asked to, and was killed" + (
            f"; it computed at {line}" if line else ""
        )
        self.console.ref.tell_nowait("event", ActorEndedBadly(actor, problem))

    async def _start_actors(self) -> ActorRef[OrchestratorApi]:
        """Spawns the router, to which others report when they start, and then all at once. The references are known
        before the processes run."""
        references = await self._references()
        continues = await self.console.system.run_blocking(self._prepare_store)
        specs = actor_specs(
            self.config, self.directory, references, self.resume, self.own_gpus, continues=continues
        )
        router = references.router.name
        await _start_all({router: self.supervision.spawn(router, specs.pop(router))}, self.console)
        spawned = {name: self.supervision.spawn(name, spec) for name, spec in specs.items()}
        await _start_all(spawned, self.console)
        return references.orchestrator

    async def _references(self) -> References:
        reserve, config, pool = self.supervision.reserve, self.config, self.config.pool
        slots = pool.slot_count if isinstance(pool, SharedPoolConfig) else 0
        return References(
            store=await reserve("store", StoreApi),
            trainer=await reserve("trainer", TrainerApi),
            router=await reserve("router", RouterApi),
            workers=[await reserve(f"rollout-{n}", RolloutApi) for n in range(config.rollout.workers)],
            orchestrator=await reserve("orchestrator", OrchestratorApi),
            console=self.console.ref,
            supervisor=self.supervision.restarting,
            instances={
                policies[0]: [await reserve(f"{policies[0]}-{n}", InstanceApi) for n in range(instances)]
                for policies, instances in config.served_together().items()
            },
            slots=[await reserve(f"slot-{n}", SlotApi) for n in range(slots)],
            archive=self.archive,
            gateway=self.gateway,
            rewards=[await reserve(f"rewards-{n}", RewardsApi) for n in range(config.rewards.services)],
        )

    def _prepare_store(self) -> bool:
        """Makes an empty folder: rows of an earlier process belong to steps that are repeated. True if there was
        one."""
        store_dir = self.directory.store
        continues = store_dir.exists()
        shutil.rmtree(store_dir, ignore_errors=True)
        store_dir.mkdir(mode=0o700)
        return continues


async def _watch_processes(
    supervision: RunSupervision,
    console: RunConsole,
    silence_s: float,
    blocked: Mapping[str, Path],
    is_still: Callable[[], bool],
) -> None:
    """Keeps the console's figures up to date. Reports an actor that does not answer; ends it once it has not for
    ``silence_s``, or for a fifth of that if the run stands still. The time in which this process itself was stopped
    does not count.

    ``blocked``: by rollout worker, the file with the line of the recipe that blocks its loop; each line is reported
    once. ``is_still``: True while the run stands still.
    """
    silent_s = dict.fromkeys(supervision.running, 0.0)
    lives = Counter(supervision.restarts)
    silent: set[str] = set()
    lines: set[str] = set()
    began = time.monotonic()
    await supervision.process_statistics(console.process_heard)  # these figures are of the start
    while True:
        console.refresh(await supervision.process_statistics(console.process_heard))
        for report in map(read_report, blocked.values()):
            if report is not None and (line := report.line) not in lines:
                lines.add(line)
                await console.event(WorkflowBlocked(line))
        last, began = began, time.monotonic()
        running = supervision.running  # those that are stopped or restarted have no time to answer
        for name in silent_s:
            is_new, lives[name] = lives[name] < supervision.restarts[name], supervision.restarts[name]
            if is_new or name in console.processes or name not in running:
                silent_s[name] = 0.0
                silent.discard(name)
            elif began - last <= _LONGEST_ROUND_S:
                silent_s[name] += began - last
                if name not in silent:
                    silent.add(name)
                    await console.event(ActorSilent(name, round(silent_s[name], 1)))
                elif silent_s[name] > (silence_s / 5 if is_still() else silence_s):
                    line = blocking_line(blocked[name]) if name in blocked else ""
                    supervision.end_silent(_silent_for(name, silent_s[name], line))
        await asyncio.sleep(_STATISTICS_INTERVAL_S)


async def _watch_devices(console: RunConsole) -> None:
    """Keeps the console's figures of the machine's GPUs up to date. Returns without GPUs, or if their driver fails."""
    with contextlib.closing(DeviceMonitor()) as monitor:
        while devices := await in_thread(monitor.read):
            console.devices_read(devices)
            await asyncio.sleep(_STATISTICS_INTERVAL_S)


def _silent_for(actor: str, seconds: float, line: str) -> ActorDead:
    """``line``: the one that blocks the actor's workflow, or empty."""
    hint = f"; the workflow blocks its event loop: {line}" if line else ""
    return ActorDead(actor, f"its process runs, but has not answered for {round(seconds, 1):g} s{hint}")


async def _start_all(spawned: Mapping[str, Coroutine[Any, Any, object]], console: RunConsole) -> None:
    """Waits for all of them and shows the progress: loading a large model takes long. Raises the first error."""
    slow_from = time.monotonic() + _SLOW_START_S
    starting = dict.fromkeys(spawned)
    one_ended = asyncio.Event()

    def mark_ended(task: asyncio.Task[object]) -> None:
        del starting[task.get_name()]
        one_ended.set()

    with first_error():
        async with asyncio.TaskGroup() as group:
            for name, spawning in spawned.items():
                group.create_task(spawning, name=name).add_done_callback(mark_ended)
            while starting:
                which = f" (not yet: {', '.join(starting)})" if time.monotonic() > slow_from else ""
                await console.phase(f"starting actors{which}", len(spawned) - len(starting), len(spawned))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(one_ended.wait(), _STATISTICS_INTERVAL_S)
                one_ended.clear()
