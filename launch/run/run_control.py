"""The launcher's actor that other programs ask about the run, and ask to stop it; ``connected_run.py`` asks it.

Steps and events are read from the run's files, as they are written: a follower that is slow delays nothing, and costs
no memory; one that comes late, or comes again, gets all that it has missed.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from ...actors.errors import QueriesRefused
from ...actors.messages import WORK_TIMEOUT_S, OrchestratorApi, Query, QueryAnswer, RunResult, StoreApi
from ...actors.run_events import RunEnded, RunEvent
from ...actors.step_metrics import StepMetrics
from ...core.actor import Actor, endpoint
from ...core.errors import ActorDead, ActorFailed, ActorNotFound, InvalidKeys
from ...core.ref import ActorRef
from ..config.config_reading import flattened
from ..config.run_config import RunConfig
from ..errors import RunDirectoryError, RunFailed, SharingRefused
from ..monitoring.console.run_console import RunConsole
from ..monitoring.slowness.finding import Finding
from ..monitoring.slowness.findings import findings
from ..run_folder.json_lines import event_from_json, lines_from, metrics_from_json, object_of, size_of
from ..run_folder.run_directory import RunDirectory
from ..sharing.shared_group import SharedGroup, Task, read_groups, task_of
from .logged_lines import LogReader
from .run_feed import Broadcast
from .run_record import end_of_run
from .stalls.watch import StallWatch

Api = TypeVar("Api")

NAME = "control"
Right = Literal["watch", "judge", "submit", "share", "stop"]
_WATCH: Final = tuple(f"{NAME}:{name}" for name in ("status", "actor_waits", "steps", "events", "log"))
CALLS: Final[Mapping[Right, tuple[str, ...]]] = {
    "watch": _WATCH,
    "judge": (
        *_WATCH,
        f"{NAME}:store",
        "store:select",
        "store:trajectory",
        "store:column",
        "store:unjudged",
        "store:fetch",
        "store:write",
    ),
    "submit": (*_WATCH, f"{NAME}:submit", f"{NAME}:submit_logged"),
    "share": (*_WATCH, f"{NAME}:shared_groups"),
    "stop": (*_WATCH, f"{NAME}:stop"),
}
"""The calls that a program from outside may make, by the right that it was given (``core/wire/permissions.py``)."""

_MOST_LOG_BYTES: Final = 1 << 20
_WAITING: Final = "policy_waiting."
# The followers of a run that has ended have this long to take the last items.
_LAST_ITEMS_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """``host``: the name of its host; empty while the actors are not placed yet."""

    pid: int
    rss_mib: float
    host: str = ""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """``step``: the last complete one, of ``steps``. ``since_s``: seconds since this life of the run began.
    ``instances``: by policy. ``processes``: those that answered last, by actor; at most about a second old. ``idle_s``:
    seconds since anything has ended. ``causes``: what a run that stands still waits for, a line each.
    ``findings``: about the newest steps. ``waiting``: turns that wait for room at an instance, by policy. ``running``:
    sequences that are generated, by instance. ``page``: the address of the page that the run serves; empty without
    one."""

    step: int
    steps: int
    phase: str
    since_s: float
    instances: dict[str, int]
    processes: dict[str, ProcessStatus]
    idle_s: float = 0.0
    causes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    waiting: dict[str, int] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    page: str = ""


class RunControl(Actor):
    """``hosts``: returns the host of each actor. ``request_stop``: see ``Run.request_stop``. ``first``: steps that
    finished before a resume."""

    def __init__(
        self,
        config: RunConfig,
        first: int,
        directory: RunDirectory,
        broadcast: Broadcast,
        console: RunConsole,
        stalls: StallWatch,
        hosts: Callable[[], Mapping[str, str]],
        request_stop: Callable[..., bool],
    ) -> None:
        self._config, self._first, self._directory = config, first, directory
        self._keys = dict(flattened(config.model_dump(mode="json")))
        self._broadcast, self._console, self._stalls = broadcast, console, stalls
        self._hosts, self._request_stop = hosts, request_stop
        self.page = ""
        """The address of the run's own page, as ``status`` reports it."""
        self._end: RunEnded | None = None
        self._followers = 0
        self._no_follower = asyncio.Event()
        self._no_follower.set()

    async def reported(self, work: Awaitable[RunResult]) -> RunResult:
        """The result of ``work``, or its error. All followers get the run's end before."""
        try:
            result = await work
        except (Exception, asyncio.CancelledError) as error:
            await self._report_end(error)
            raise
        await self._report_end(result)
        return result

    async def _report_end(self, outcome: RunResult | BaseException) -> None:
        self._end = end_of_run(outcome, self._broadcast.wall_s)
        self._broadcast.changes.beat()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_ITEMS_S):
                await self._no_follower.wait()

    # ------------------------------------------------------------------ endpoints

    @endpoint
    async def status(self) -> RunStatus:
        """The run as it is now, from numbers that the launcher has: no other actor is asked, so a stalled run answers
        too."""
        hosts = self._hosts()
        figures = {
            actor: of_actor
            for process in self._console.processes.values()
            for actor, of_actor in process.actors.items()
        }
        return RunStatus(
            step=max(self._first, self._broadcast.last_step),
            steps=self._config.training.steps,
            phase=self._broadcast.last_phase,
            since_s=round(self._broadcast.wall_s, 1),
            instances={
                ", ".join(policies): count for policies, count in self._config.served_together().items()
            },
            processes={
                name: ProcessStatus(process.pid, round(process.rss_mib, 1), hosts.get(name, ""))
                for name, process in self._console.processes.items()
            },
            idle_s=round(self._stalls.standstill.idle_s, 1),
            causes=self._stalls.causes,
            findings=tuple(findings([*self._console.recent_steps], self._keys)),
            waiting={
                name.removeprefix(_WAITING): int(count)
                for name, count in figures.get("router", {}).items()
                if name.startswith(_WAITING)
            },
            running={
                actor: int(of_actor["engine_running"])
                for actor, of_actor in figures.items()
                if "engine_running" in of_actor
            },
            page=self.page,
        )

    @endpoint
    async def actor_waits(self) -> tuple[str, ...]:
        """The waits and computations of all actors, a line each, also while the run moves. One that does not answer is
        named after 3 s."""
        return await self._stalls.waits()

    @endpoint
    async def stop(self, by: str, now: bool) -> bool:
        """Asks the run to end; True: after the steps under way, with a checkpoint."""
        return self._request_stop(by, now=now)

    @endpoint(raises=[RunFailed])
    async def steps(self, after: int | None) -> AsyncGenerator[StepMetrics, None]:
        """The steps after step ``after``, or from now on, until the run ends. Raises RunFailed at its end."""
        with self._following():
            async for line in self._lines(self._directory.metrics, from_start=after is not None):
                step = metrics_from_json(object_of(line) or {})
                if step is not None and (after is None or step.step > after):
                    yield step
            self._raise_failure()

    @endpoint(raises=[RunFailed])
    async def events(self, after: int | None) -> AsyncGenerator[RunEvent, None]:
        """The events of ``events.jsonl`` after its first ``after`` lines, or from now on; the last one is ``RunEnded``.
        Raises RunFailed at the end."""
        to_skip = after or 0
        with self._following():
            async for line in self._lines(self._directory.events, from_start=after is not None):
                to_skip -= 1
                if to_skip < 0 and (event := event_from_json(object_of(line) or {})) is not None:
                    yield event
            assert self._end is not None
            yield self._end
            self._raise_failure()

    @endpoint(raises=[SharingRefused])
    async def shared_groups(self, task: Task, after: int | None) -> AsyncGenerator[SharedGroup, None]:
        """The finished groups of this run as text, for a run of ``task``: those behind record ``after``, or from now
        on, until the run ends. The first item has no lines. Raises SharingRefused for another task."""
        task_of_run = await self.system.run_blocking(task_of, self._config)
        if task_of_run.digest != task.digest:
            raise SharingRefused(
                f"it trains {task_of_run}, and the peer {task}: share between runs of one task"
            )
        if not self._config.samples.steps:
            raise SharingRefused("it records no trajectories: set its samples.steps")
        path, agents = self._directory.samples, tuple(self._config.trained_agents)
        number = 0 if after is None else after
        yield SharedGroup(number, self._broadcast.last_step, self._broadcast.last_step, [])
        with self._following():
            while True:
                changed, ended = self._broadcast.changes.next, self._end is not None
                before = after
                if path.exists():
                    after, groups = await self.system.run_blocking(read_groups, path, after, agents)
                    for group in groups:
                        yield group
                if after == before:  # else there may be more
                    if ended:
                        return
                    await changed.wait()

    @endpoint(raises=[RunDirectoryError])
    async def log(self, actor: str, last_bytes: int) -> str:
        """The end of an actor's log, at most 1 MiB. Raises RunDirectoryError if the actor has none."""
        path = self._directory.log_of(actor)
        return await self.system.run_blocking(_tail, path, min(last_bytes, _MOST_LOG_BYTES))

    @endpoint
    async def store(self) -> ActorRef[StoreApi]:
        """The run's store. Waits until it is being started."""
        return await self.find("store", StoreApi)

    async def find(self, actor: str, api: type[Api]) -> ActorRef[Api]:
        """The actor of the run, once it is being started."""
        while True:
            changed = self._broadcast.changes.next
            try:
                return await self.system.lookup(actor, api)
            except ActorNotFound:
                await changed.wait()

    @endpoint(raises=[QueriesRefused])
    async def submit(self, queries: list[Query], judged: bool = True) -> list[QueryAnswer]:
        """See ``ConnectedRun.submit``."""
        self._refuse_deterministic()
        orchestrator = await self.find("orchestrator", OrchestratorApi)
        try:
            return await orchestrator.within(WORK_TIMEOUT_S).submit(queries, judged)
        except (ActorDead, ActorFailed) as error:
            raise QueriesRefused(f"the run has ended: {error}") from error

    @endpoint(raises=[QueriesRefused])
    async def submit_logged(self, lines: list[dict[str, Any]]) -> list[QueryAnswer]:
        """See ``ConnectedRun.submit_logged``."""
        self._refuse_deterministic()
        groups = await self.system.run_blocking(LogReader(self._config).groups, lines)
        orchestrator = await self.find("orchestrator", OrchestratorApi)
        try:
            return await orchestrator.within(WORK_TIMEOUT_S).submit_logged(groups)
        except (ActorDead, ActorFailed) as error:
            raise QueriesRefused(f"the run has ended: {error}") from error

    def _refuse_deterministic(self) -> None:
        if self._config.deterministic:
            raise QueriesRefused(
                "deterministic=true: the time at which queries come would decide what is trained"
            )

    @endpoint(raises=[InvalidKeys])
    async def admit(self, public_key: str, rights: list[Right]) -> None:
        """Accepts a further program over TCP, by its ``Keys.client_public``, for this life of the run."""
        await self.system.allow(public_key, {call for right in rights for call in CALLS[right]})

    # ------------------------------------------------------------------ followers

    async def _lines(self, path: Path, *, from_start: bool) -> AsyncIterator[bytes]:
        """The lines of a file of the run as they are written, until the run ends."""
        at = 0 if from_start else size_of(path)
        while True:
            changed, ended = self._broadcast.changes.next, self._end is not None
            lines = lines_from(path, at)
            for line in lines:
                at += len(line)
                yield line
            if not lines:
                if ended:
                    return
                await changed.wait()

    @contextlib.contextmanager
    def _following(self) -> Iterator[None]:
        self._followers += 1
        self._no_follower.clear()
        try:
            yield
        finally:
            self._followers -= 1
            if not self._followers:
                self._no_follower.set()

    def _raise_failure(self) -> None:
        if self._end is not None and self._end.error is not None and not self._end.stopped:
            raise RunFailed(self._end.error)


def _tail(path: Path, last_bytes: int) -> str:
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - last_bytes))
        return log.read(last_bytes).decode(errors="replace")
