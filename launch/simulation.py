"""A whole run in one process and in virtual time: the actors of ``actor_specs.py``, unchanged, on a node in memory.

    simulation = simulate(config, folder, seed=7, crashes=Crashes(every_s=2.0))

A seed decides everything: the order of all messages, their delays, and which actor is killed when. Two simulations of
one seed have the same network log and the same files, byte by byte. Policies have to be simulated: nothing else takes
virtual time.

Killed actors are restarted as in a real run: instances, rollout workers and slots alone; after the loss of another one
the run begins again from its newest checkpoint, as with ``--restarts``. Not simulated: a kill in the middle of a write
to a file, and the launcher's watch for actors that are silent.
"""

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

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
from .local_launcher import LocalRun
from .resuming import Resumption
from .run_config import RunConfig
from .run_directory import RunDirectory
from .run_supervision import RunSupervision

# Simulated runs last seconds: one that reaches this hangs.
_LIMIT_S: Final = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Crashes:
    """``every_s``: the mean seconds between two kills, which are drawn from an exponential distribution; ``most``: of a
    whole run, so that it ends. ``fatal_share``: the share of kills of actors whose loss ends the run."""

    every_s: float = 5.0
    most: int = 6
    fatal_share: float = 0.2


@dataclass(slots=True)
class Simulation:
    """``log``: the network's, of all attempts. ``kills``: actors and times. ``attempts``: 1, and one more after each
    loss that ended the run. ``seconds``: virtual ones."""

    directory: RunDirectory
    log: list[str] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0
    result: RunResult | None = None


def simulate(
    config: RunConfig,
    folder: Path,
    seed: int,
    *,
    faults: Faults = NO_FAULTS,
    crashes: Crashes | None = None,
    keep_log: bool = True,
) -> Simulation:
    """Trains until the last step. ``folder``: of the run, a new one. It starts a loop, so no loop may run in this
    thread.

    Raises the errors of ``Run`` but losses, and VirtualTimeExceeded or Deadlock for a run that hangs.
    """
    simulation = Simulation(RunDirectory.create(folder, ""))
    resuming.record(simulation.directory, config)
    virtual_time.run(_Simulator(simulation, seed, faults, crashes, keep_log).run(config), limit_s=_LIMIT_S)
    return simulation


class _Simulator:
    def __init__(
        self, simulation: Simulation, seed: int, faults: Faults, crashes: Crashes | None, keep_log: bool
    ) -> None:
        self._simulation = simulation
        self._seed = seed
        self._faults = faults
        self._crashes = crashes
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
        self._simulation.seconds = loop.time()

    async def _attempt(self, life: Resumption) -> RunResult:
        config, directory = life.config, self._simulation.directory
        network = MemoryNetwork(self._random.getrandbits(64), self._faults, keep_log=self._keep_log)
        try:
            async with _node_directory() as runtime_dir:
                settings = config.supervision.settings()
                node = MemoryNode(network, runtime_dir, settings=settings, close_files=_close_files)
                async with (
                    ActorSystem(
                        "launcher", runtime_dir, wire=network.wire("launcher"), settings=settings
                    ) as system,
                    RunSupervision(system, node, config.supervision.intensity()) as supervision,
                ):
                    console = RunConsole(directory, NoDisplay(), asyncio.get_running_loop().time)
                    await system.add(console, "console")
                    run = LocalRun(config, directory, supervision, console, life.checkpoint, {})
                    return await self._until_the_end(run, node)
        finally:
            self._simulation.log += network.log

    async def _until_the_end(self, run: LocalRun, node: MemoryNode) -> RunResult:
        async def train() -> RunResult:
            await run.begin()
            return await run.console.ended_with

        work = asyncio.create_task(train(), name="run")
        death = asyncio.create_task(run.supervision.wait_failed(), name="death")
        killing = asyncio.create_task(self._kill(node), name="kills")
        tasks = [work, death, killing]
        try:
            await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not death.cancelled() and (error := death.exception()) is not None:
            raise error
        return work.result()

    async def _kill(self, node: MemoryNode) -> None:
        """Kills actors at random times."""
        crashes, draw = self._crashes, self._random
        while crashes is not None and len(self._simulation.kills) < crashes.most:
            await asyncio.sleep(draw.expovariate(1.0 / crashes.every_s))
            fatal = draw.random() < crashes.fatal_share
            victims = [name for name in node.running if _ends_the_run(name) is fatal]
            if victims:
                victim = draw.choice(victims)
                self._simulation.kills.append((asyncio.get_running_loop().time(), victim))
                node.kill(victim)


def _ends_the_run(actor: str) -> bool:
    return actor in ("store", "trainer", "orchestrator", "router")


async def _close_files(actor: Actor) -> None:
    await actor.on_stop()


@asynccontextmanager
async def _node_directory() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="flexmarl-", dir=env.runtime_base()) as directory:
        yield Path(directory)
