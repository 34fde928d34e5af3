"""A whole run in one process and in virtual time: the actors of ``actor_specs.py``, unchanged, on hosts in memory.

    simulation = simulate(config, folder, seed=7, hosts=3, troubles=Troubles(every_s=2.0))

A seed decides everything: the order of all messages, their delays, and which trouble befalls which actor or host when
(``simulated_troubles.py``). Two simulations of one seed have the same network log and the same files, byte by byte.
Policies have to be simulated: nothing else takes virtual time.

Lost actors are restarted as in a real run: instances, rollout workers and slots alone; after the loss of another one
the run begins again from its newest checkpoint, as with ``--restarts``, on the hosts that are left. Not simulated: a
kill in the middle of a write to a file, and the launcher's watch for actors that are silent. Hosts share their memory:
samples and weights do not pass the network.
"""

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from ..actors.messages import RunResult
from ..core.actor import Actor
from ..core.errors import FlexmarlError, is_loss
from ..core.system import ActorSystem
from ..core.testing import virtual_time
from ..core.testing.memory_node import MemoryNode
from ..core.wire.faults import NO_FAULTS, Faults
from ..core.wire.memory import MemoryNetwork
from . import env, resuming
from .console.no_display import NoDisplay
from .console.run_console import RunConsole
from .host_description import HostDescription
from .local_launcher import LocalRun
from .placement.needs import needs_of
from .placement.place import place
from .resuming import Resumption
from .run_config import RunConfig
from .run_directory import RunDirectory
from .run_supervision import RunSupervision
from .simulated_troubles import ESSENTIAL, NO_TROUBLES, Trouble, TroubleMaker, Troubles

# Simulated runs last seconds: one that reaches this hangs.
_LIMIT_S: Final = 6 * 3600.0


@dataclass(slots=True)
class Simulation:
    """``log``: the network's, of all attempts. ``attempts``: 1, and one more after each
    loss that ended the run. ``seconds``: virtual ones."""

    directory: RunDirectory
    log: list[str] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0
    result: RunResult | None = None


def simulate(
    config: RunConfig,
    folder: Path,
    seed: int,
    *,
    hosts: int = 1,
    faults: Faults = NO_FAULTS,
    troubles: Troubles = NO_TROUBLES,
    keep_log: bool = True,
) -> Simulation:
    """Trains until the last step. ``folder``: of the run, a new one. It starts a loop, so no loop may run in this
    thread.

    Raises the errors of ``Run`` but losses, VirtualTimeExceeded or Deadlock for a run that hangs, and
    RuntimeError for one that leaves tasks, systems or memory behind.
    """
    simulation = Simulation(RunDirectory.create(folder, ""))
    resuming.record(simulation.directory, config)
    simulator = _Simulator(simulation, seed, hosts, faults, troubles, keep_log)
    virtual_time.run(simulator.run(config), limit_s=_LIMIT_S)
    return simulation


class _Simulator:
    def __init__(
        self,
        simulation: Simulation,
        seed: int,
        hosts: int,
        faults: Faults,
        troubles: Troubles,
        keep_log: bool,
    ) -> None:
        self._simulation = simulation
        self._hosts = [f"host-{n}" for n in range(hosts)]
        self._gone: set[str] = set()
        self._faults = faults
        self._troubles = troubles
        self._random = random.Random(seed)
        self._keep_log = keep_log

    async def run(self, config: RunConfig) -> None:
        life = Resumption(config, None, {}, [])
        loop = asyncio.get_running_loop()
        while self._simulation.result is None and not life.is_complete:
            self._simulation.attempts += 1
            try:
                self._simulation.result = await self._attempt(life)
            except FlexmarlError as error:
                if not is_loss(error):
                    raise
                life = resuming.prepare(self._simulation.directory, (), ())
                self._simulation.directory.forget_after(life.step)
        if self._simulation.result is None and life.checkpoint is not None:  # lost after its last checkpoint
            folder, state = life.checkpoint
            self._simulation.result = RunResult(state.step, False, {}, str(folder))
        self._simulation.seconds = loop.time()

    async def _attempt(self, life: Resumption) -> RunResult:
        network = MemoryNetwork(self._random.getrandbits(64), self._faults, keep_log=self._keep_log)
        try:
            async with _node_directory() as directory:
                settings = life.config.supervision.settings()
                names = [name for name in self._hosts if name not in self._gone]
                nodes = {
                    name: MemoryNode(
                        network, directory, name=name, settings=settings, close_files=_close_files
                    )
                    for name in names
                }
                try:
                    return await self._train(life, network, directory, nodes)
                finally:
                    for node in nodes.values():
                        await node.wait_closed()
                    _check_nothing_left(network, directory)
        finally:
            self._simulation.log += network.log

    async def _train(
        self, life: Resumption, network: MemoryNetwork, directory: Path, nodes: dict[str, MemoryNode]
    ) -> RunResult:
        config, head = life.config, next(iter(nodes.values()))
        placed = {actor: nodes[host] for actor, host in hosts_of_actors(config, list(nodes)).items()}
        settings, wire = config.supervision.settings(), network.wire(f"{head.name}/launcher")
        async with (
            ActorSystem("launcher", directory, wire=wire, settings=settings) as system,
            RunSupervision(system, head, config.supervision.intensity(), placed=placed) as supervision,
        ):
            run_directory = self._simulation.directory
            console = RunConsole(run_directory, NoDisplay(), asyncio.get_running_loop().time)
            await system.add(console, "console")
            run = LocalRun(config, run_directory, supervision, console, life.checkpoint, {})
            return await self._until_the_end(run, network, list(nodes.values()))

    async def _until_the_end(
        self, run: LocalRun, network: MemoryNetwork, nodes: list[MemoryNode]
    ) -> RunResult:
        async def train() -> RunResult:
            await run.begin()
            return await run.console.ended_with

        log = self._simulation.troubles
        maker = TroubleMaker(self._troubles, self._random, network, nodes, log, self._gone)
        work = asyncio.create_task(train(), name="run")
        death = asyncio.create_task(run.supervision.wait_failed(), name="death")
        troubles = asyncio.create_task(maker.run(), name="troubles")
        tasks: list[asyncio.Task[Any]] = [work, death, troubles]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for ended in (
            troubles,
            death,
        ):  # a death makes calls of the run fail: it is the cause if both are there
            if not ended.cancelled() and (error := ended.exception()) is not None:
                raise error
        return work.result()


def _check_nothing_left(network: MemoryNetwork, directory: Path) -> None:
    tasks = [task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}]
    blocks = [path.name for path in directory.rglob("*.arena")]
    if tasks or blocks or network.running:
        raise RuntimeError(
            f"an attempt has left tasks {sorted(tasks)}, systems {network.running} and memory {sorted(blocks)}"
        )


def hosts_of_actors(config: RunConfig, hosts: Sequence[str]) -> dict[str, str]:
    """The host of each actor; the first one is the head. Workers may be on any: simulated hosts share their memory."""
    needs = [replace(need, on_head=need.actor in ESSENTIAL) for need in needs_of(config)]
    described = [HostDescription(name, 8, 1 << 40, (), "", "", 0, 0, "", {}) for name in hosts]
    return {actor: placed.node for actor, placed in place(needs, described, hosts[0]).actors.items()}


async def _close_files(actor: Actor) -> None:
    await actor.on_stop()


@asynccontextmanager
async def _node_directory() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="flexmarl-", dir=env.runtime_base()) as directory:
        yield Path(directory)
