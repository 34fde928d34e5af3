"""A whole run in one process and in virtual time: the actors of ``actor_specs.py``, unchanged, on hosts in memory.

    simulation = simulate(config, folder, seed=7, hosts=3, planned_faults=FaultPlan().draw(7))

A seed decides everything: the order of all messages, their delays, and which fault hits which actor or host when
(``simulated_faults.py``). Two simulations of one seed have the same network log and the same files, byte by byte.
Policies have to be simulated: nothing else takes virtual time.

The hosts join as nodes of a real run do (``simulated_hosts.py``), and losses have the same consequences: an actor that
ends alone is restarted; one whose node is lost moves or is given up (``hosts/nodes/cluster.py``); after a loss without
which the run can't continue it begins again from its newest checkpoint, as with ``--restarts``, on the hosts that are
left. Not simulated: a kill in the middle of a write to a file, and the launcher's watch for actors that are silent.
Hosts share their memory: samples and weights do not pass the network. But each host's part of it, with the training
states that lie there, is lost with the host.
"""

import asyncio
import random
import sys
import tempfile
from collections import Counter, deque
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ...actors.messages import RunResult
from ...core.actor import Actor
from ...core.errors import FlexmarlError, is_loss
from ...core.protocol.session import Settings
from ...core.ref import ActorRef
from ...core.supervision.process_statistics import ProcessStatistics
from ...core.system import ActorSystem
from ...core.testing import virtual_time
from ...core.testing.memory_node import MemoryNode
from ...core.wire.faults import NO_FAULTS, Faults
from ...core.wire.memory import MemoryNetwork
from ..config.run_config import RunConfig
from ..errors import LeftBehind
from ..hosts import env
from ..hosts.nodes.cluster import Cluster
from ..hosts.nodes.head import Nodes
from ..hosts.nodes.joined_cluster import WAIT_S
from ..hosts.nodes.joining import NAME, Dismissal, Head, Offer
from ..hosts.placement.actor_needs import fewest_slots, needs_of
from ..hosts.placement.auto_ranks import with_chosen_ranks
from ..hosts.placement.place import place
from ..hosts.placement.plan import Plan
from ..hosts.placement.run_placement import RunPlacement
from ..monitoring.console.display import Display
from ..monitoring.console.no_display import NoDisplay
from ..monitoring.console.run_console import RunConsole
from ..run import resuming
from ..run.actor_launcher import ActorLauncher
from ..run.actor_specs import ActorSpec
from ..run.resuming import StartState
from ..run.run_record import begin_of_run, end_of_run
from ..run.run_supervision import RunSupervision
from ..run.span_keeper import SpanKeeper
from ..run.stalls.watch import StallWatch
from ..run_folder.run_directory import RunDirectory
from ..run_folder.spans.span_log import SpanLog
from .cluster_links import ClusterLinks
from .interrupts import interruptible
from .simulated_disk import SimulatedDisk
from .simulated_faults import ESSENTIAL, FaultInjector, FaultKind, InjectedFault, PlannedFault
from .simulated_hosts import SimulatedHost, describe

# Simulated runs last seconds: one that reaches this hangs.
_LIMIT_S: Final = 6 * 3600.0
_OF_THE_DISK: Final = frozenset({FaultKind.HEAD_POWER, FaultKind.FULL_DISK})
_LAUNCHER: Final = "launcher"
_MOST_ATTEMPTS: Final = 20
"""Attempts that begin at one step. Faults cost fewer: what is lost so often has a cause that stays."""
_LOOK_S: Final = 1.0
_SPANS_S: Final = 10.0
"""Virtual seconds between two rounds for spans: no person watches them come, and a process has room for 40,000."""


@dataclass(slots=True)
class Simulation:
    """``log``: the network's, of all attempts. ``attempts``: 1, and one more after each
    loss that ended the run. ``seconds``: virtual ones. ``statistics``: those of all actors at the end, by actor.
    ``links``: of the cluster, with all transfers."""

    directory: RunDirectory
    log: list[str] = field(default_factory=list)
    injected_faults: list[InjectedFault] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0
    result: RunResult | None = None
    statistics: dict[str, dict[str, float]] = field(default_factory=dict)
    links: ClusterLinks | None = None


def simulate(
    config: RunConfig,
    folder: Path,
    seed: int,
    *,
    hosts: int = 1,
    faults: Faults = NO_FAULTS,
    planned_faults: Sequence[PlannedFault] = (),
    keep_log: bool = True,
    reads_statistics: bool = False,
    watches: bool = False,
    records_spans: bool = False,
    stand_ins: Mapping[str, str] = MappingProxyType({}),
    links: ClusterLinks | None = None,
    display: Display | None = None,
    limit_s: float = _LIMIT_S,
) -> Simulation:
    """Trains until the last step. ``folder``: of the run, a new one. ``faults``: of messages. ``planned_faults``: in
    the order of their beginnings. ``links``: have the places of the actors, and take the time of transfers; None:
    those take none. ``reads_statistics``: of the actors, at the end, without the memory and the time of their
    processes. ``watches``: for standstills, whose causes are events. ``records_spans``: in virtual time, as the
    settings ``trace`` say. ``stand_ins``: classes that actors have in place of their own, by actor. ``display``: shows
    the run; None: nothing does. It starts a loop, so no loop may run in this thread.

    Ctrl-C ends the run, and is raised as KeyboardInterrupt.

    Raises the errors of ``Run`` but losses, VirtualTimeExceeded or Deadlock for a run that hangs, and
    LeftBehind for one that leaves tasks, systems or memory.
    """
    config = with_chosen_ranks(config, list)
    disk = SimulatedDisk(folder, random.Random(f"disk {seed}"))
    is_watched = any(fault.kind in _OF_THE_DISK for fault in planned_faults)
    # A watched disk holds each file that was ever synced.
    with disk.watched() if is_watched else nullcontext():
        simulation = Simulation(RunDirectory.create(folder, ""), links=links)
        resuming.record(simulation.directory, config)
        simulator = _Simulator(
            simulation,
            seed,
            hosts,
            faults,
            planned_faults,
            disk,
            keep_log,
            reads_statistics,
            watches,
            records_spans,
            stand_ins,
            links,
            display or NoDisplay(),
        )
        virtual_time.run(interruptible(simulator.run(config)), limit_s=limit_s)
    return simulation


class _Simulator:
    def __init__(
        self,
        simulation: Simulation,
        seed: int,
        hosts: int,
        faults: Faults,
        planned_faults: Sequence[PlannedFault],
        disk: SimulatedDisk,
        keep_log: bool,
        reads_statistics: bool,
        watches: bool,
        records_spans: bool,
        stand_ins: Mapping[str, str],
        links: ClusterLinks | None,
        display: Display,
    ) -> None:
        self._links = links
        self._display = display
        self._simulation = simulation
        self._hosts = [f"host-{n}" for n in range(hosts)]
        self._gone: set[str] = set()
        self._faults = faults
        self._planned_faults = deque(planned_faults)
        self._random = random.Random(seed)
        self._disk = disk
        self._keep_log = keep_log
        self._reads_statistics = reads_statistics
        self._watches = watches
        self._records_spans = records_spans
        self._stand_ins = stand_ins

    async def run(self, config: RunConfig) -> None:
        start = StartState(config, None, {}, [])
        loop = asyncio.get_running_loop()
        begun = Counter[int]()
        while self._simulation.result is None and not start.is_complete:
            self._simulation.attempts += 1
            begun[start.step] += 1
            try:
                self._simulation.result = await self._attempt(start)
            except FlexmarlError as error:
                if not is_loss(error) or begun[start.step] > _MOST_ATTEMPTS:
                    raise
                self._disk.restore()
                start = resuming.plan_resume(self._simulation.directory, (), ())
                self._simulation.directory.forget_after(start.step)
        if self._simulation.result is None and start.checkpoint is not None:  # lost after its last checkpoint
            folder, state = start.checkpoint
            self._simulation.result = RunResult(state.step, False, {}, str(folder))
        self._simulation.seconds = loop.time()

    async def _attempt(self, start: StartState) -> RunResult:
        network = MemoryNetwork(self._random.getrandbits(64), self._faults, keep_log=self._keep_log)
        try:
            async with _node_directory() as directory:
                settings = start.config.supervision.settings()
                names = [name for name in self._hosts if name not in self._gone]
                head_node, *other_nodes = [self._node(network, directory, name, settings) for name in names]
                address = f"memory://{head_node.name}/{_LAUNCHER}"
                hosts = [
                    SimulatedHost(
                        network,
                        node,
                        settings,
                        address,
                        None if self._links is None else self._links.of_node(node.name),
                    )
                    for node in other_nodes
                ]
                try:
                    return await self._train(start, network, head_node, hosts)
                finally:
                    for node in (head_node, *other_nodes):
                        await node.wait_closed()
                    error = sys.exception()
                    if error is None or is_loss(error):  # any other is worth more than what it has left
                        _check_nothing_left(network, directory)
        finally:
            self._simulation.log += network.log

    def _node(self, network: MemoryNetwork, directory: Path, name: str, settings: Settings) -> MemoryNode:
        links_of = {} if self._links is None else {"links_of": self._links.of}
        return MemoryNode(
            network, directory, name=name, settings=settings, close_files=_close_files, **links_of
        )

    async def _train(
        self, start: StartState, network: MemoryNetwork, head_node: MemoryNode, hosts: list[SimulatedHost]
    ) -> RunResult:
        config, directory = start.config, self._simulation.directory
        settings, wire = config.supervision.settings(), network.wire(f"{head_node.name}/{_LAUNCHER}")
        injector = FaultInjector(
            self._planned_faults,
            network,
            head_node,
            hosts,
            self._simulation.injected_faults,
            self._gone,
            self._disk,
        )
        async with ActorSystem(_LAUNCHER, head_node.directory, wire=wire, settings=settings) as system:
            console = RunConsole(directory, self._display, clock=asyncio.get_running_loop().time)
            await system.add(console, "console")
            began_s = asyncio.get_running_loop().time()
            await console.event(begin_of_run(start, _machine(head_node.name), str(directory.path)))
            async with (
                _running(*(host.run() for host in hosts)) as alive,
                _join_hosts(
                    system,
                    head_node,
                    config,
                    dict(zip([host.name for host in hosts], alive, strict=True)),
                    console,
                    self._links,
                ) as cluster,
                _Supervision(
                    self._stand_ins,
                    system,
                    head_node,
                    config.supervision.intensity(),
                    placed=cluster.placed,
                    another_node=cluster.another_node,
                ) as supervision,
                _running(injector.run()) as injecting,
            ):
                cluster.take_up = supervision.take_up
                with closing(SpanLog(directory.trace, config.trace, self._display.warn)) as log:
                    spans = SpanKeeper(
                        supervision,
                        log,
                        lambda: {_LAUNCHER: head_node.name, **cluster.hosts},
                        system.run_blocking,
                        _SPANS_S,
                    )
                    launcher = ActorLauncher(
                        config,
                        directory,
                        supervision,
                        console,
                        start.checkpoint,
                        {},
                        spans=spans if self._records_spans else None,
                    )
                    return await self._until_the_end(launcher, began_s, [cluster.failure, *alive, *injecting])

    async def _until_the_end(
        self, launcher: ActorLauncher, began_s: float, failures: Sequence[asyncio.Future[Any]]
    ) -> RunResult:
        """``began_s``: the virtual time at the begin of this life. ``failures``: those that end the run by their error
        or result."""

        async def train() -> RunResult:
            if self._watches:
                launcher.console.background(_watch(launcher), "stalls")
            await launcher.begin()
            result = await launcher.console.ended_with
            await launcher.console.event(end_of_run(result, asyncio.get_running_loop().time() - began_s))
            if launcher.spans is not None:
                await launcher.spans.end(self._display.warn)
            if self._reads_statistics:
                await launcher.supervision.process_statistics(self._note_statistics)
            return result

        death = launcher.supervision.wait_failed()
        async with _running(train(), death) as (work, dead):
            await asyncio.wait([work, dead, *failures], return_when=asyncio.FIRST_COMPLETED)
            # A death makes calls of the run fail: it is the cause if both are there.
            if dead.done():
                dead.result()
            for failure in failures:
                if failure.done():
                    raise failure.result()
            result: RunResult = work.result()
            return result

    def _note_statistics(self, name: str, process: ProcessStatistics) -> None:
        self._simulation.statistics |= process.actors


class _Supervision(RunSupervision):
    """``stand_ins``: the classes that actors have in place of their own."""

    def __init__(self, stand_ins: Mapping[str, str], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._stand_ins = stand_ins

    async def spawn(self, name: str, spec: ActorSpec) -> ActorRef[Any]:
        """See ``RunSupervision.spawn``."""
        return await super().spawn(
            name, replace(spec, actor_class=self._stand_ins.get(name, spec.actor_class))
        )


async def _watch(launcher: ActorLauncher) -> None:
    """Reports standstills with their causes, as in a real run. Runs until it is cancelled."""
    console, supervision = launcher.console, launcher.supervision

    def last_step() -> int:
        return console.recent_steps[-1].step if console.recent_steps else 0

    stalls = StallWatch(console, launcher.config.supervision, launcher.directory, last_step)
    async with asyncio.TaskGroup() as group:
        group.create_task(stalls.run(supervision), name="stalls")
        while True:
            await supervision.process_statistics(console.process_heard)
            await asyncio.sleep(_LOOK_S)


@asynccontextmanager
async def _running(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Tasks, which are cancelled at the end."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # the first end of all decides


@asynccontextmanager
async def _join_hosts(
    system: ActorSystem,
    head_node: MemoryNode,
    config: RunConfig,
    hosts: Mapping[str, asyncio.Task[None]],
    console: RunConsole,
    links: ClusterLinks | None,
) -> AsyncIterator[Cluster]:
    """Waits for the other hosts and places the actors. At the end they are dismissed, as in
    ``hosts/nodes/joined_cluster.py``. Raises the error of a host that fails before all have joined."""
    head = describe(head_node.name)
    nodes = Nodes(Head(head, Offer("", "", system.settings, {}), {}, system.address))
    await system.add(nodes, NAME)
    try:
        async with _running(nodes.wait_joined(len(hosts), WAIT_S, lambda joined: None)) as (joining,):
            await asyncio.wait([joining, *hosts.values()], return_when=asyncio.FIRST_COMPLETED)
            for host in hosts.values():
                if host.done():
                    host.result()
            await joining
        placement = RunPlacement(
            (head, *(joined.host for joined in nodes.joined.values())),
            place_simulated(config, [head_node.name, *hosts])
            if links is None
            else links.placement(needs_of(config)),
        )
        report = partial(console.ref.tell_nowait, "event")
        yield Cluster(head_node, nodes, placement, False, fewest_slots(config), report)
    finally:
        await nodes.dismiss(Dismissal("the run has ended"))


def _check_nothing_left(network: MemoryNetwork, directory: Path) -> None:
    tasks = [task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}]
    blocks = [path.name for path in directory.rglob("*.arena")]
    if tasks or blocks or network.running:
        raise LeftBehind(sorted(tasks), network.running, sorted(blocks))


def _machine(head: str) -> env.Machine:
    """This interpreter on the simulated host ``head``. No process id: it would make each simulation's files differ."""
    return {**env.describe_machine(), "cpus": describe(head).cores, "pid": 0}


def place_simulated(config: RunConfig, hosts: Sequence[str]) -> Plan:
    """Places all actors; the first host is the head. Workers may be on any: simulated hosts share their memory."""
    needs = [replace(need, on_head=need.actor in ESSENTIAL) for need in needs_of(config)]
    return place(needs, [*map(describe, hosts)], hosts[0])


async def _close_files(actor: Actor) -> None:
    await actor.on_stop()


@asynccontextmanager
async def _node_directory() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="flexmarl-", dir=env.runtime_base()) as directory:
        yield Path(directory)
