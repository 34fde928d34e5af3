"""Measures the experience store: samples put and got by two client processes, with the journal.

A sample has the sizes that other frameworks were measured with: 512 and 1024 int32, 1024 float32, and scalars. Batches
of 64 go in, batches of 16 come out. The arrays that come out are copied: a consumer keeps no memory of the store.

Before that one client puts single samples, in turns with and without 12 expensive expressions in the store, whose time
limit is a second.

The keys of the result:

    put_samples_per_s, get_samples_per_s                              of both clients together, median of the rounds
    put_with_queries_ratio     time of a put with the expressions / without, median of the rounds
    transferqueue_put_samples_per_s, transferqueue_get_samples_per_s  None: it is not measured here
    rounds, goals, machine, settings
"""

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
from rich.console import Console

from flexmarl.actors.columns.store_client import ExperienceReader, ExperienceWriter, segment_directories
from flexmarl.actors.errors import SelectTimeout
from flexmarl.actors.messages import Sample, StoreApi
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.store.segment_arena import ArenaLimits
from flexmarl.actors.store.select_pool import SelectLimits
from flexmarl.actors.store.store import Store
from flexmarl.actors.store.store_setup import StoreSetup
from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.launch.bench.command import common_options, run_benchmark
from flexmarl.launch.bench.goals import Goal, judge
from flexmarl.launch.bench.result_tables import goals_table
from flexmarl.launch.errors import BenchmarkFailed
from flexmarl.launch.hosts import env

AGENT, POLICY = AgentName("solver"), PolicyName("solver")
PUT_BATCH, GET_BATCH = 64, 16
_CLIENTS = 2
_CALL_TIMEOUT_S = 600.0
_EXPRESSIONS = 12
_QUERIED_S = 2.0
_SELECTS = SelectLimits(timeout_s=1.0)
# 10^12 combinations and more: each evaluation ends at the time limit.
_EXPENSIVE = (
    "(select count(*) from samples a, samples b, samples c, samples d where a.reward + d.reward < 0) > 0"
)

GOALS = (
    Goal("put_samples_per_s", "put, samples/s", 55_000, at_most=False),
    Goal("get_samples_per_s", "get, samples/s", 30_000, at_most=False),
    Goal("put_with_queries_ratio", "put beside 12 expensive queries, ratio", 2.0, at_most=True),
)


@dataclass(frozen=True, slots=True)
class Options:
    """``samples``: put, and then got, by each client in each round."""

    rounds: int = 5
    samples: int = 25_600


class Client(Actor):
    def __init__(self, store: ActorRef[StoreApi], name: str, runtime_dir: str, store_dir: str) -> None:
        places = segment_directories(runtime_dir, store_dir)
        self._store = store
        self._name = name
        self._writer = ExperienceWriter(store, name, places)
        self._reader = ExperienceReader(store, places)
        random = np.random.default_rng(1)
        self._prompt, self._tokens = (random.integers(0, 2**17, n, np.int32) for n in (512, 1024))
        self._logprobs = -random.random(1024, np.float32)
        self._batches: list[list[Sample]] = []

    @endpoint
    async def prepare(self, version: int, count: int) -> None:
        """Makes the samples of ``put``, whose time does not include it."""
        numbers = (range(first, first + PUT_BATCH) for first in range(0, count, PUT_BATCH))
        self._batches = [[self._sample(version, n) for n in batch] for batch in numbers]

    @endpoint
    async def put_singly(self, version: int, name: str, seconds: float) -> int:
        """Puts samples one by one for ``seconds``; returns their number."""
        one = self._sample(version, 0)
        count, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            group = f"{version}:{name}{count}"
            await self._writer.put([replace(one, sample_id=f"{group}_0_0", group=group)])
            count += 1
        return count

    @endpoint
    async def put(self) -> None:
        for batch in self._batches:
            await self._writer.put(batch)

    def _sample(self, version: int, number: int) -> Sample:
        group = f"{version}:{self._name}{number // 8}"
        # Arrays, though a workflow has tuples: the conversion is not the store's cost.
        bulk: Any = (self._prompt, self._tokens, self._logprobs)
        return Sample(f"{group}_0_{number % 8}", AGENT, version, version, group, 1.0, 0.5, *bulk)

    @endpoint
    async def get(self, version: int, count: int) -> list[int]:
        """Returns the fences of the leases. Raises BenchmarkFailed if a sample differs from the one that was put."""
        fences = []
        for _ in range(0, count, GET_BATCH):
            leased = await self._store.api.lease(POLICY, version, GET_BATCH)
            rows = zip(*(await self._reader.arrays(leased)).values(), strict=True)
            copies = [[cell.copy() for cell in row] for row in rows]
            fences.append(leased.fence)
            prompt, completion, logprobs = copies[-1]
            if (
                prompt[-1] != self._prompt[-1]
                or completion.sum() != self._tokens.sum()
                or logprobs.size != 1024
            ):
                raise BenchmarkFailed("a sample came out different")
        return fences


def parts(options: Options) -> int:
    return 2 * options.rounds


async def measure(options: Options, tell: Callable[[str], None]) -> dict[str, Any]:
    """The object that ``--json`` prints. Raises BenchmarkFailed."""
    rounds: list[dict[str, float]] = []
    ratios: list[float] = []
    with (
        TemporaryDirectory(prefix="flexmarl-", dir=env.runtime_base()) as runtime_dir,
        TemporaryDirectory() as store_dir,
    ):
        # All samples of a round lie in memory at once, as in the measurements of other frameworks.
        limits = ArenaLimits(memory_bytes=8 * 2**30)
        async with ActorSystem("bench", Path(runtime_dir)) as system:
            setup = StoreSetup({AGENT: POLICY}, Path(store_dir), limits=limits, selects=_SELECTS)
            store = await system.spawn(Store, "store", setup, process=True)
            kwargs = {"store": store, "runtime_dir": runtime_dir, "store_dir": store_dir}
            names = [f"client{n}" for n in range(_CLIENTS)]
            clients = [
                await system.spawn(Client, name, {"name": name, **kwargs}, process=True) for name in names
            ]
            await _round(store, clients, 0, PUT_BATCH * 8)  # warm: connections, segments, memory
            for number in range(1, options.rounds + 1):
                tell(f"queries, round {number} of {options.rounds}")
                ratios.append(await _queried_ratio(store, clients[0], number))
            for number in range(1, options.rounds + 1):
                version = options.rounds + number
                tell(f"round {number} of {options.rounds}")
                rounds.append(await _round(store, clients, version, options.samples))
    rounds = [
        {**round_, "put_with_queries_ratio": ratio} for round_, ratio in zip(rounds, ratios, strict=True)
    ]
    figures = {key: statistics.median(round_[key] for round_ in rounds) for key in rounds[0]}
    return {
        **{key: _rounded(key, value) for key, value in figures.items()},
        "transferqueue_put_samples_per_s": None,
        "transferqueue_get_samples_per_s": None,
        "rounds": {key: [_rounded(key, round_[key]) for round_ in rounds] for key in figures},
        "goals": [asdict(verdict) for verdict in judge(GOALS, figures)],
        "machine": {**env.describe_machine(), "pid": os.getpid()},
        "settings": asdict(options),
    }


def tables(console: Console, result: Mapping[str, Any]) -> None:
    console.print(goals_table("experience store", result["goals"]))


async def _round(
    store: ActorRef[Store], clients: list[ActorRef[Client]], version: int, count: int
) -> dict[str, float]:
    await asyncio.gather(*(client.within(_CALL_TIMEOUT_S).prepare(version, count) for client in clients))
    start = time.perf_counter()
    await asyncio.gather(*(client.within(_CALL_TIMEOUT_S).put() for client in clients))
    put_s = time.perf_counter() - start
    start = time.perf_counter()
    got = await asyncio.gather(*(client.within(_CALL_TIMEOUT_S).get(version, count) for client in clients))
    get_s = time.perf_counter() - start
    rows = await store.within(_CALL_TIMEOUT_S).commit(
        POLICY, [fence for fences in got for fence in fences], version
    )
    total = count * len(clients)
    if rows != total:
        raise BenchmarkFailed(f"{total} samples were put and {rows} consumed")
    return {"put_samples_per_s": total / put_s, "get_samples_per_s": total / get_s}


async def _queried_ratio(store: ActorRef[Store], client: ActorRef[Client], version: int) -> float:
    """The time of a put with expensive expressions in the store / without."""
    putting = client.within(_CALL_TIMEOUT_S)
    quiet = await putting.put_singly(version, "quiet", _QUERIED_S)
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(_ask(store)) for _ in range(_EXPRESSIONS)]
        queried = await putting.put_singly(version, "queried", _QUERIED_S)
        for task in asking:
            task.cancel()
    leased = await store.within(_CALL_TIMEOUT_S).lease(POLICY, version, quiet + queried)
    await store.within(_CALL_TIMEOUT_S).commit(POLICY, [leased.fence], version)
    return quiet / queried


async def _ask(store: ActorRef[Store]) -> None:
    """Asks until it is cancelled."""
    while True:
        with suppress(SelectTimeout):
            await store.within(_CALL_TIMEOUT_S).select(_EXPENSIVE, 10)


def _rounded(key: str, value: float) -> float:
    return round(value, 2) if key.endswith("ratio") else round(value)


@click.command()
@common_options(rounds=5, quick_time="a few seconds")
def store(as_json: bool, rounds: int | None, quick: bool) -> int:
    """Measure the experience store: samples of 10 KiB put and got by two client processes, journal on; and single puts
    beside 12 expensive expressions of other clients.

    \b
    Examples:
      scripts/bench/run store
      scripts/bench/run store --json > store.json

    Nothing else should be running on the machine. Needs 1 GiB of memory. Progress is on standard error; ctrl-C stops
    it.
    """
    options = Options(rounds=rounds or (1 if quick else 5), samples=PUT_BATCH * (50 if quick else 400))
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)
