"""One run, of which this process is the head, as a context of the loop that is running.

    async with flexmarl.Run("sort-digits", settings=["training.steps=50"], name="first") as run:
        async for step in run.steps():
            print(step.step, step.tokens)

Nothing outside of the run is changed: no signal handler, no logging, no environment variable. A program may have
several runs, at once too.

    launcher ── RunSupervision ──┬─ store
             └─ RunConsole       ├─ trainer
                                 ├─ <policy>-0, <policy>-1, ...   (instances)
                                 ├─ router
                                 ├─ rollout-0, rollout-1, ...
                                 └─ orchestrator
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from ...actors.messages import ArchiveApi, OrchestratorApi, RunResult, SessionsApi
from ...actors.run_events import RunEvent
from ...actors.step_metrics import StepMetrics
from ...core.base.threads import in_thread
from ...core.durable.private_directory import private_directory
from ...core.errors import FlexmarlError, is_loss
from ...core.ref import ActorRef
from ...core.supervision.process_node import ProcessNode
from ...core.system import ActorSystem
from ...core.telemetry import LogLevel
from ..config.config_reading import flattened
from ..config.config_warnings import warnings_about
from ..errors import Interrupted
from ..gateway.gateway import opened_front
from ..hosts import env
from ..hosts.nodes.joined_cluster import NodeRequest, joined_cluster
from ..monitoring.console.display import Display
from ..monitoring.console.no_display import NoDisplay
from ..monitoring.console.run_console import RunConsole
from ..monitoring.sinks.function_sink import FunctionSink, MetricsFunction, check_function, name_of
from ..monitoring.sinks.run_sinks import RunSinks
from ..monitoring.sinks.sink import SinkRun
from ..run_folder.run_directory import RunDirectory
from ..run_folder.samples.archive import Archive
from ..run_folder.spans.span_log import SpanLog, count_spans
from ..sharing.sharing import Sharing
from .actor_launcher import ActorLauncher
from .actor_specs import modules_of
from .prepared_run import GivenConfig, PreparedRun, new_run, resumed_run
from .run_control import NAME as CONTROL
from .run_control import RunControl
from .run_feed import Broadcast
from .run_page import opened_page
from .run_record import RunRecord
from .run_supervision import RunSupervision
from .span_keeper import SpanKeeper
from .stalls.watch import StallWatch

Result = TypeVar("Result")

_NO_NODES: Final = NodeRequest()
_NOT_ENTERED: Final = "this Run has not been entered: async with Run(...) as run"


class Run:
    """A run from its start to its last process gone. ``directory``: its files.

    Entering checks the config, makes the run's folder and begins to start the actors. Leaving the block stops the run
    as ``stop`` does, but at once if the block was cancelled or the steps under way take longer than
    ``stop_timeout_s``. In every case no process, socket or shared memory is left. An error of the run is raised by the
    iterations, ``wait`` and ``result``, and if none of them has raised it, at the end of the block: an error that
    ``is_loss`` if an actor was lost, ActorFailed if one failed for another reason.

    It is one class, of more than 300 lines: the block, the run's task, the stops and the readers of its end all decide
    by the same few flags, and apart from each other they would have to pass on every change of one.
    """

    directory: RunDirectory

    def __init__(
        self,
        config: GivenConfig,
        *,
        settings: Sequence[str] = (),
        runs: Path | str = "runs",
        name: str | None = None,
        stop_timeout_s: float = 300.0,
        log_level: LogLevel = "info",
        nodes: NodeRequest = _NO_NODES,
        sinks: Sequence[MetricsFunction] = (),
    ) -> None:
        """``config``: the name or folder of a recipe, a YAML file, a mapping with the keys of ``config.yaml`` and
        ``recipe``, or a RunConfig. ``settings``: ``key.key=value``, as on the command line. ``runs``: the folder of all
        runs. ``name``: the run's; None: recipe and time. ``log_level``: of the files in ``logs/``.
        ``nodes``: other hosts for which the run waits (``flexmarl node``). ``sinks``: functions that are called with
        each step and its figures, in threads of their own, beside the sinks of the config.

        Raises ConfigError if one of them can't be called so. Entering raises ConfigError with every mistake in the
        config, RunDirectoryError if the folder exists, OSError.
        """
        self._preparing: Callable[[], AbstractContextManager[PreparedRun]] = partial(
            new_run, config, settings, Path(runs), name, joining=nodes.count
        )
        self._stop_timeout_s = stop_timeout_s
        self._log_level = log_level
        self._nodes = nodes
        self._functions = [check_function(function, repr(function)) for function in sinks]
        self._broadcast = Broadcast(NoDisplay(), self._raise_failure)
        self._life: asyncio.Task[RunResult] | None = None
        self._exits = ExitStack()
        self._entered = False
        self._stop_gracefully: Callable[[], None] | None = None
        self._hosts: Callable[[], Mapping[str, str]] = dict
        self._at_once = asyncio.Event()
        self._stop_asked = asyncio.Event()
        self._stopped_by = ""
        self._reported = False

    @classmethod
    def resume(
        cls,
        folder: Path | str,
        *,
        settings: Sequence[str] = (),
        accept: Sequence[str] = (),
        stop_timeout_s: float = 300.0,
        log_level: LogLevel = "info",
        nodes: NodeRequest = _NO_NODES,
        sinks: Sequence[MetricsFunction] = (),
    ) -> "Run":
        """The run in ``folder``, continued from its newest checkpoint, as ``flexmarl train --resume`` does. ``accept``:
        changed files of the recipe, by name.

        Entering raises ResumeRefused if a setting or a file has changed that may not, or if all steps are trained;
        CheckpointIncomplete, RunDirectoryError and the errors of a new run's config."""
        run = cls({}, stop_timeout_s=stop_timeout_s, log_level=log_level, nodes=nodes, sinks=sinks)
        run._preparing = partial(resumed_run, Path(folder), settings, accept, nodes.count)
        return run

    @classmethod
    def from_prepared(
        cls,
        prepared: PreparedRun,
        display: Display,
        log_level: LogLevel = "info",
        nodes: NodeRequest = _NO_NODES,
    ) -> "Run":
        """A run that is prepared, new or resumed, on ``display``."""
        # By its private fields, as ``resume`` does: the parameters of the constructor are an interface for programs,
        # which have a config or a folder, and neither a folder that is locked nor a display.
        run = cls(prepared.start.config, log_level=log_level, nodes=nodes)
        run._preparing = lambda: nullcontext(prepared)
        run._broadcast = Broadcast(display, run._raise_failure)
        return run

    # ------------------------------------------------------------------ from start to end

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError("this Run has been used: make another one")
        self._entered = True
        with ExitStack() as exits:
            self._prepared = await in_thread(exits.enter_context, self._preparing())
            self.directory = self._prepared.directory
            self._record = RunRecord(self.directory, self._prepared.start, self._broadcast)
            self._exits = exits.pop_all()
        self._life = asyncio.create_task(self._live(), name=f"run {self.directory.path.name}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._life is not None
        by = "the end of its block"
        try:
            if not self._life.done() and (error is None or isinstance(error, Exception)):
                self.request_stop(by)
                await asyncio.wait([self._life], timeout=self._stop_timeout_s)
        finally:
            self.request_stop(by, now=True)
            with self._exits:
                await _await_end(self._life)
        if not self._life.cancelled():
            self._life.exception()  # now asyncio logs no error that the block's own one hides
        if error is None and not self._reported:
            self._raise_failure()

    async def _live(self) -> RunResult:
        start, display = self._prepared.start, self._broadcast
        try:
            with display:
                for text in [*start.warnings, *warnings_about(start.config)]:
                    display.warn(text)
                display.phase("starting actors")
                async with self._sinks() as display.sinks:
                    result = await self._until_the_end()
            self._record.complete(result)
            await in_thread(self._record.report)
            return result
        except KeyboardInterrupt:  # no await: it ends the loop
            self._record.fail(Interrupted("stopped by SIGINT"))
            raise
        except (Exception, asyncio.CancelledError) as error:
            self._record.fail(error)
            await in_thread(self._record.report_if_any)
            raise
        finally:
            display.end()

    def _sinks(self) -> RunSinks:
        start, folder = self._prepared.start, self.directory.path.resolve()
        config = dict(flattened(start.config.model_dump(mode="json")))
        named = [(sink.label, sink.sink()) for sink in start.config.sinks]
        named += [
            (f"{number}:{name_of(function)}", FunctionSink(function))
            for number, function in enumerate(self._functions, 1)
        ]
        spans = count_spans(self.directory.trace)
        run = SinkRun(folder, Path(start.config.recipe), start.step, config, spans)
        return RunSinks(named, run, self._record.log)

    async def _until_the_end(self) -> RunResult:
        config, directory = self._prepared.start.config, self.directory
        async with (
            private_directory(env.runtime_base()) as runtime_dir,
            ActorSystem(
                "launcher", runtime_dir, tcp=config.network.tcp(), settings=config.supervision.settings()
            ) as system,
        ):
            console = RunConsole(directory, self._broadcast, self._record.events)
            await system.add(console, "console")
            first = self._prepared.start.step
            archive = await self._archive(system)
            self._stalls = StallWatch(
                console, config.supervision, directory, lambda: max(first, self._broadcast.last_step)
            )
            control = RunControl(
                config,
                first,
                directory,
                self._broadcast,
                console,
                self._stalls,
                lambda: self._hosts(),
                self.request_stop,
            )
            await system.add(control, CONTROL)
            async with (
                opened_page(config.page.listen, directory, self._broadcast) as control.page,
                opened_front(system, config, directory, control.find, console.ref) as gateway,
            ):
                return await control.reported(
                    self._on_its_nodes(system, runtime_dir, console, archive, gateway)
                )

    async def _archive(self, system: ActorSystem) -> ActorRef[ArchiveApi] | None:
        start = self._prepared.start
        if not start.config.samples.steps:
            return None
        path, warn = self.directory.samples, self._broadcast.warn
        return await system.add(Archive(path, start.config.samples, start.step, warn), "archive")

    async def _on_its_nodes(
        self,
        system: ActorSystem,
        runtime_dir: Path,
        console: RunConsole,
        archive: ActorRef[ArchiveApi] | None,
        gateway: ActorRef[SessionsApi] | None,
    ) -> RunResult:
        start, directory = self._prepared.start, self.directory
        head_node = self._head_node(system, runtime_dir)
        async with AsyncExitStack() as exits:
            joining = joined_cluster(system, head_node, self._prepared, self._nodes, console)
            cluster = await self._unless_stopped(exits.enter_async_context(joining))
            self._hosts = lambda: {system.name: cluster.placement.hosts[0].name, **cluster.hosts}
            supervision = await exits.enter_async_context(
                RunSupervision(
                    system,
                    head_node,
                    start.config.supervision.intensity(),
                    self._log_level,
                    cluster.placed,
                    cluster.another_node,
                )
            )
            cluster.take_up = supervision.take_up
            log = exits.enter_context(closing(self._span_log()))
            spans = SpanKeeper(supervision, log, self._hosts, system.run_blocking)
            launcher = ActorLauncher(
                start.config,
                directory,
                supervision,
                console,
                start.checkpoint,
                cluster.placement.own_gpus(),
                archive,
                gateway,
                spans,
                Sharing(start.config, system, console, self._broadcast)
                if start.config.sharing.peers
                else None,
            )
            return await self._train(launcher, [system.failure, cluster.failure])

    def _head_node(self, system: ActorSystem, runtime_dir: Path) -> ProcessNode:
        return ProcessNode(
            system,
            runtime_dir,
            self.directory.logs,
            {**env.actor_environment(), **self._prepared.environment},
            modules=modules_of(self._prepared.start.config),
            late_variables=env.LATE_VARIABLES,
        )

    def _span_log(self) -> SpanLog:
        loop = asyncio.get_running_loop()

        def warn(text: str) -> None:  # the log writes in a thread
            loop.call_soon_threadsafe(self._broadcast.warn, text)

        return SpanLog(self.directory.trace, self._prepared.start.config.trace, warn)

    async def _unless_stopped(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of ``work``. Raises Interrupted if the run is stopped before."""
        working = asyncio.create_task(work)
        stop = asyncio.create_task(self._at_once.wait())
        try:
            await asyncio.wait([working, stop], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = working.done()
            await _cancel(working, stop)
        if not ended:
            raise Interrupted(f"stopped by {self._stopped_by}")
        return working.result()

    async def _train(self, launcher: ActorLauncher, failures: "Sequence[asyncio.Future[Any]]") -> RunResult:
        """``failures``: set to errors that end the run."""
        supervision = launcher.supervision
        begins = partial(self._training_begins, launcher.gateway)
        work = asyncio.create_task(launcher.train(begins, self._stalls))
        death = asyncio.create_task(supervision.wait_failed())
        stop = asyncio.create_task(self._at_once.wait())
        patience = asyncio.create_task(self._end_standstill(supervision))
        ends: list[asyncio.Future[Any]] = [stop, death, *failures, work]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stop_gracefully = None
            self._stalls.close()
            await _cancel(work, death, stop, patience)
        if launcher.spans is not None and not self._at_once.is_set():  # of a run that has failed too
            await launcher.spans.end(self._broadcast.warn)
        if self._at_once.is_set():
            await supervision.kill_all()
            raise Interrupted(f"stopped by {self._stopped_by}")
        try:
            # In this order: a death makes calls fail, so it is the cause if both are there.
            if death.done() and not death.cancelled():
                death.result()
            for failure in failures:
                if failure.done():
                    raise failure.result()
            return work.result()
        except FlexmarlError as error:
            if self._stopped_by and is_loss(error):  # nothing is restarted any more
                raise Interrupted(
                    f"stopped by {self._stopped_by}, before its last checkpoint was saved: {error}"
                ) from error
            raise

    async def _end_standstill(self, supervision: RunSupervision) -> None:
        """Ends a run at once that was asked to stop and stands still: its steps under way may never end."""
        await self._stop_asked.wait()
        config, clock = self._prepared.start.config, asyncio.get_running_loop().time
        stop_s = clock() + (0.0 if config.gateway.listen is None else config.gateway.stop_s)
        least_s, standstill = config.supervision.stop_patience_s, self._stalls.standstill
        while not standstill.is_given_up(least_s, clock() - stop_s):
            await self._stalls.observed.next.wait()
        text = f"stopping at once: nothing has ended for {standstill.idle_s:.0f} s"
        causes = () if self._stalls.causes else await self._stalls.ask(supervision)  # those were named before
        self._broadcast.warn("; ".join([text, *causes]), at_once=True)
        self._at_once.set()

    def _training_begins(
        self, gateway: ActorRef[SessionsApi] | None, orchestrator: ActorRef[OrchestratorApi]
    ) -> None:
        def stop() -> None:
            orchestrator.tell_nowait("stop")
            if gateway is not None:
                gateway.tell_nowait("run_stops")

        self._stop_gracefully = stop

    # ------------------------------------------------------------------ while it runs

    def steps(self) -> AsyncIterator[StepMetrics]:
        """The steps that are complete from now on, as ``metrics.jsonl`` has them, until the run ends or is stopped.
        Raises the run's error at its end."""
        return self._broadcast.steps.reader()

    def events(self) -> AsyncIterator[RunEvent]:
        """The events from now on, as ``events.jsonl`` has them; the last one is ``RunEnded``. Raises the run's error
        at its end."""
        return self._broadcast.events.reader()

    @property
    def result(self) -> RunResult | None:
        """None while it runs. Raises the run's error; Interrupted if it was stopped at once."""
        if self._life is None or not self._life.done():
            return None
        self._reported = True
        if self._life.cancelled():
            raise Interrupted("stopped: its task was cancelled")
        return self._life.result()

    async def wait(self) -> RunResult:
        """Waits for the run's end. Raises the run's error; Interrupted if it was stopped at once."""
        if self._life is None:
            raise RuntimeError(_NOT_ENTERED)
        await asyncio.wait([self._life])
        result = self.result
        assert result is not None
        return result

    async def stop(self, *, now: bool = False) -> RunResult | None:
        """Ends the run after the steps under way, with a checkpoint, and returns its result. At once, and None: with
        ``now``, or before the training has begun. Raises the run's error."""
        if self._life is None:
            raise RuntimeError(_NOT_ENTERED)
        self.request_stop("the program", now=now)
        await asyncio.wait([self._life])
        self._raise_failure()
        return None if self._at_once.is_set() else self.result

    def request_stop(self, by: str, *, now: bool = False) -> bool:
        """Asks the run to end, as ``stop`` does, without waiting for it. True: it ends after the steps under way.
        ``by``: the reason, for messages."""
        if self._at_once.is_set() or (self._life is not None and self._life.done()):
            return False
        if not now and self._stop_gracefully is not None:
            if not self._stopped_by:
                self._stopped_by = by
                self._stop_asked.set()
                self._stop_gracefully()
            return True
        self._stopped_by = by
        self._at_once.set()
        return False

    def _raise_failure(self) -> None:
        """Raises the run's error, if it has failed. A stop counts as one only if an actor was lost before its
        checkpoint."""
        try:
            _ = self.result
        except Interrupted as error:
            if error.__cause__ is not None:
                raise


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _await_end(task: asyncio.Task[Any]) -> None:
    """Waits for the end of ``task``, also if the waiter is cancelled meanwhile, which is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
