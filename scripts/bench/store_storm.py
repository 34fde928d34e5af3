"""Strikes a store again and again while writers and a trainer use it, and counts the samples afterwards.

\b
Examples:
  scripts/bench/run store_storm --strikes 100 --seed 1
  scripts/bench/run store_storm --strikes 100 --faults mixed --clock

A strike is kill -9, or with ``--faults stop`` SIGSTOP for longer than the heartbeats and then SIGCONT: its callers have
given it up meanwhile. ``--clock`` steps the store's wall clock with each strike, by up to a day. The store is a process
of its own that its supervisor restarts; writers put, a trainer leases and commits, none of them stops for a strike.
Every acknowledged sample must be consumed once, and no other. Prints one JSON object, and exits
with 1 if that does not hold, or if the store makes no progress any more.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from tests.stepping_clock import SteppingClock

from flexmarl.actors.columns.store_client import ExperienceReader, ExperienceWriter, segment_directories
from flexmarl.actors.errors import StoreError
from flexmarl.actors.messages import Sample
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.store.store import Store
from flexmarl.actors.store.store_setup import StoreSetup
from flexmarl.core.errors import ActorDead
from flexmarl.core.protocol.session import Settings
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.process_node import ProcessNode
from flexmarl.core.supervision.restart_policy import Intensity
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.launch.hosts import env

AGENT, POLICY, WRITERS, BATCH, MICRO_BATCH = "solver", PolicyName("solver"), 4, 8, 16
# Enough for a store to restart and read its journal, which takes well below a second.
PATIENCE_S = 60.0
# A caller waits for the connection to a store that restarts.
SETTINGS = Settings(connect_timeout_s=PATIENCE_S)
# A stopped store is given up within a second; a busy machine may overrun that too.
OF_STOPS = dataclasses.replace(SETTINGS, heartbeat_s=0.25, missed_heartbeats=4)
STOPPED_S = (1.5, 3.0)
# Rows whose lease did not reach the trainer are ready again after this.
LEASE_S = 5.0
DAY_S = 86_400.0


class StormError(Exception):
    """A sample was lost, consumed twice or never put, or the store makes no progress."""


def batches() -> Iterator[list[Sample]]:
    for number in itertools.count():
        group = f"0:q{number}"
        yield [
            Sample(f"{group}_0_{n}", AGENT, 0, 0, group, 1.0, 0.5, (1,), (2, 3, number), (-0.5,) * 3)
            for n in range(BATCH)
        ]


_ROWS_WENT_BACK = ("its rows went back at the restart", "it expired")


class Storm:
    def __init__(self, system: ActorSystem, store: ActorRef[Store], memory: str, folder: str) -> None:
        self.acknowledged: set[str] = set()
        self.consumed: Counter[str] = Counter()
        self.commits_in_doubt = 0
        self.strikes = 0
        self._system, self._store = system, store
        self._places = segment_directories(memory, folder)
        self._writing = True
        self._put = asyncio.Event()

    async def run(self, strikes: int, faults: str, rng: random.Random, clock: SteppingClock | None) -> None:
        """Raises StormError if the store makes no progress any more."""
        async with asyncio.TaskGroup() as tasks:
            source = batches()
            writers = [tasks.create_task(self._write(f"writer{n}", source)) for n in range(WRITERS)]
            trainer = tasks.create_task(self._train())
            for _ in range(strikes):
                await self._wait_for(len(self.acknowledged) + 64)
                await asyncio.sleep(rng.uniform(0.0, 0.1))  # the moment that was drawn
                if clock is not None:
                    clock.step(rng.uniform(-DAY_S, DAY_S))
                stops = faults == "stop" or (faults == "mixed" and rng.random() < 0.5)
                await self._strike(rng.uniform(*STOPPED_S) if stops else 0.0)
                self.strikes += 1
            self._writing = False
            await asyncio.wait(writers)
            await trainer

    async def _strike(self, stopped_s: float) -> None:
        """``stopped_s``: until SIGCONT; 0 for a kill."""
        pid = await self._pid()
        with contextlib.suppress(ProcessLookupError):  # a caller has given it up, and it was killed
            if not stopped_s:
                os.kill(pid, signal.SIGKILL)
                return
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(stopped_s)  # longer than the heartbeats
            finally:
                os.kill(pid, signal.SIGCONT)

    async def _pid(self) -> int:
        """The store's process. Puts may still be acknowledged when the process before it is dead already."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    figures = await self._system.process_statistics()
                    if "store" in figures:
                        return figures["store"].pid
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise StormError(f"the store was not restarted within {PATIENCE_S:g} s") from None

    async def _wait_for(self, acknowledged: int) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while len(self.acknowledged) < acknowledged:
                    self._put.clear()
                    await self._put.wait()
        except TimeoutError:
            raise StormError(f"no put was acknowledged for {PATIENCE_S:g} s") from None

    async def _write(self, name: str, source: Iterator[list[Sample]]) -> None:
        writer = ExperienceWriter(self._store, name, self._places)
        try:
            while self._writing:
                batch = next(source)
                await writer.put(batch)
                self.acknowledged.update(sample.sample_id for sample in batch)
                self._put.set()
        finally:
            writer.close()

    async def _train(self) -> None:
        reader, step = ExperienceReader(self._store, self._places), 1
        while self._writing or sum(self.consumed.values()) < len(self.acknowledged):
            try:
                ready = (await self._store.api.table_statistics())[AGENT].ready
                if not ready:
                    await asyncio.sleep(0.002)
                    continue
                leased = await self._store.api.lease(POLICY, 0, min(ready, MICRO_BATCH))
                ids = [sample.sample_id for sample in await reader.samples(leased)]
            except ActorDead:
                continue  # what was leased is ready again
            if await self._committed(leased.fence, step):
                self.consumed.update(ids)
                step += 1

    async def _committed(self, fence: int, version: int) -> bool:
        """Returns True if the commit was carried out; else the rows are ready again."""
        while True:
            try:
                await self._store.api.commit(POLICY, [fence], version)
            except ActorDead:
                self.commits_in_doubt += 1  # it may be in the journal: repeat it
            except StoreError as error:
                if not any(reason in str(error) for reason in _ROWS_WENT_BACK):
                    raise
                return False
            else:
                return True


async def storm(strikes: int, seed: int, faults: str = "kill", *, clock: bool = False) -> Storm:
    """Raises StormError unless every acknowledged sample was consumed, once, and no other."""
    with (
        TemporaryDirectory(prefix="flexmarl-", dir=env.runtime_base()) as memory,
        TemporaryDirectory() as folder,
    ):
        directory, stepping = Path(memory), SteppingClock(Path(folder)) if clock else None
        environment = dict(os.environ) if stepping is None else stepping.environment(os.environ)
        async with (
            ActorSystem(
                "storm", directory, settings=SETTINGS if faults == "kill" else OF_STOPS
            ) as system,
            Supervisor(
                system, ProcessNode(system, directory, Path(folder), environment),
                intensity=Intensity(100 * strikes, 3600),
            ) as supervisor,
        ):  # fmt: skip
            setup = StoreSetup({AgentName(AGENT): POLICY}, Path(folder) / "store", lease_s=LEASE_S)
            setup.store_dir.mkdir()
            store = await supervisor.spawn(Store, "store", setup)
            made = Storm(system, store, memory, str(setup.store_dir))
            await made.run(strikes, faults, random.Random(seed), stepping)
            left = (await store.api.table_statistics())[AGENT]
    twice = [sample for sample, times in made.consumed.items() if times > 1]
    lost, strange = made.acknowledged - made.consumed.keys(), made.consumed.keys() - made.acknowledged
    if twice or lost or strange or left.ready or left.leased or left.consumed != len(made.acknowledged):
        raise StormError(
            f"{len(made.acknowledged)} samples were acknowledged: {len(lost)} were lost, {len(twice)} consumed twice, "
            f"{len(strange)} consumed that were not acknowledged; the store says {left}"
        )
    return made


@click.command("store_storm", help=__doc__)
@click.option("--strikes", type=click.IntRange(1), default=100, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--faults", type=click.Choice(["kill", "stop", "mixed"]), default="kill", show_default=True)
@click.option("--clock", is_flag=True, help="Step the wall clock too.")
def store_storm(strikes: int, seed: int, faults: str, clock: bool) -> int:
    started = time.monotonic()
    try:
        made = asyncio.run(storm(strikes, seed, faults, clock=clock))
    except StormError as error:
        print(f"store_storm: {error}", file=sys.stderr)
        return 1
    figures = {
        "strikes": made.strikes,
        "samples": len(made.acknowledged),
        "commits_in_doubt": made.commits_in_doubt,
    }
    print(json.dumps({**figures, "seconds": round(time.monotonic() - started)}))
    return 0
