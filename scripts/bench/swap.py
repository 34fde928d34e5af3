"""Measures how policies of PyTorch take turns on a slot worker, through the pool that trains runs.

The keys of the result:

    copy_gb_s         the copy of one thread between two warm buffers
    suspend_gb_s      of a policy of about 1 GB in the middle of a step: bytes that moved / all its seconds
    resume_gb_s       the same of its resumption; the digest is checked
    switch_ms         from one policy with 100 MB of state to another, on one slot
    switch_gang_ms    the same of two policies with two ranks each, whose groups are made again
    cycles            switches there and back in the middle of a step
    same_loss         1 if the loss and the weights after that step are those of a step without switches
    rss_change        the change of the slot worker's resident memory meanwhile, as a share
    rounds, goals, machine, settings
"""

import asyncio
import re
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import click
import numpy as np
import psutil
from rich.console import Console
from rich.text import Text

from flexmarl.actors.columns.store_client import ExperienceWriter, segment_directories
from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import ModelConfig, Sample, SlotApi
from flexmarl.actors.names import AgentName, PolicyName, Step, Version
from flexmarl.actors.recipe.recipe import RecipeConfig
from flexmarl.actors.run_events import PolicyResumed, PolicySuspended, RunEvent
from flexmarl.actors.store.store import Store
from flexmarl.actors.store.store_setup import StoreSetup
from flexmarl.actors.trainer.backends.backend_config import TorchTrainerConfig
from flexmarl.actors.trainer.pool.pool_config import SharedPoolConfig
from flexmarl.actors.trainer.pool.shared_pool import SharedPool
from flexmarl.actors.trainer.pool.static_pool import StaticPool
from flexmarl.actors.trainer.pool.training_pool import TrainingPool
from flexmarl.actors.trainer.trainer_setup import PolicySetup, SharedPoolSetup, TrainerSetup
from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.base.task_groups import first_error
from flexmarl.core.ref import ActorRef
from flexmarl.core.supervision.process_node import ProcessNode
from flexmarl.core.supervision.supervisor import Supervisor
from flexmarl.core.system import ActorSystem
from flexmarl.launch.bench import machine
from flexmarl.launch.bench.command import common_options, run_benchmark
from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.bench.measure import medians, rounded
from flexmarl.launch.bench.result_tables import goals_table, warn_if_busy
from flexmarl.launch.bench.results import result_of
from flexmarl.launch.config.config_reading import RECIPES
from flexmarl.launch.hosts import env
from flexmarl.launch.monitoring.formatting import compact

from .torch_threads import one_torch_thread

FIRST, SECOND = PolicyName("first"), PolicyName("second")
_SLOT_WORKER: Final = "flexmarl.actors.trainer.pool.slot_worker:SlotWorker"
_MODULES: Final = (
    _SLOT_WORKER.partition(":")[0],
    "flexmarl.actors.trainer.backends.torch_policy.torch_factory",
)
_COPY_BYTES: Final = 256 << 20
_WARM_UP: Final = 20
_GANG_CYCLES: Final = 5
_PATIENCE_S: Final = 60.0
_COPY: dict[str, Any] = {"bare": "copy_gb_s", "bare_words": "memcpy"}

GOALS = (
    Goal("suspend_gb_s", "suspend, GB/s", 0.7, at_most=False, **_COPY),
    Goal("resume_gb_s", "resume, GB/s", 0.7, at_most=False, **_COPY),
    Goal("rss_change", "memory after the cycles, share", 0.01, at_most=True),
    Goal("same_loss", "loss and weights as without them", 1, at_most=False),
)


@dataclass(frozen=True, slots=True)
class Size:
    """A model of ``layers`` layers, about ``13 * hidden ** 2`` parameters each; a state has 16 bytes for each."""

    hidden: int
    layers: int


SMALL: Final = Size(hidden=256, layers=6)  # a state of about 100 MB
LARGE: Final = Size(hidden=1024, layers=4)  # about 1.1 GB


@dataclass(frozen=True, slots=True)
class Options:
    rounds: int = 5
    cycles: int = 1000
    large: Size = LARGE
    small: Size = SMALL


def parts(options: Options) -> int:
    return options.rounds + 3


async def measure(options: Options, report: Callable[[str], None]) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    described = await machine.describe()
    rounds = []
    async with _bench(options.large) as bench:
        await bench.accumulate_both()
        for number in range(1, options.rounds + 1):
            report(f"large states, round {number} of {options.rounds}")
            # In a thread: slots would give up a process whose loop stands still for long on a busy machine.
            copy_gb_s = await asyncio.to_thread(_copy_gb_s)
            rounds.append({"copy_gb_s": copy_gb_s, **await bench.swap_rates()})
    report(f"{options.cycles} cycles")
    async with _bench(options.small) as bench:
        cycled = await bench.cycle(options.cycles)
    report("gangs of two ranks")
    async with _bench(options.small, ranks=2) as bench:
        gang_ms = await bench.gang_switch_ms()
    report("the same without cycles")
    # This process trains it: with the threads of a slot's process, or the weights would differ by rounding.
    with one_torch_thread():
        async with _bench(options.small, shared=False) as bench:
            undisturbed = await bench.step()
    figures = {
        **medians(rounds),
        "switch_ms": cycled.switch_ms,
        "switch_gang_ms": gang_ms,
        "cycles": float(options.cycles),
        "rss_change": cycled.rss_change,
        "same_loss": float(cycled.learned == undisturbed),
    }
    return result_of(
        options,
        figures,
        GOALS,
        described,
        rounds={key: [rounded(rates[key]) for rates in rounds] for key in rounds[0]},
    )


def tables(console: Console, result: Mapping[str, Any]) -> None:
    console.print(goals_table("policies on a slot worker", result["goals"], "memcpy"))
    switch = f"{compact(result['switch_ms'])} ms from one policy with 100 MB of state to another"
    gangs = f"{compact(result['switch_gang_ms'])} ms with two ranks each"
    console.print(Text(f"{switch}, {result['cycles']:g} times there and back; {gangs}"))
    warn_if_busy(console, result)


def _copy_gb_s() -> float:
    """Copies with one thread; the best of a few."""
    source, target = np.ones(_COPY_BYTES, np.uint8), np.zeros(_COPY_BYTES, np.uint8)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return _COPY_BYTES / 1e9 / min(seconds)


def _own_kib(pid: int) -> int:
    """The resident memory of a process, without that of files: the kernel takes their pages back when it is short of
    memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(kib) for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE))


@dataclass(frozen=True, slots=True)
class _Cycled:
    """``learned``: the loss and the digest of the weights after the step."""

    switch_ms: float
    rss_change: float
    learned: tuple[float, int | None]


class _Holder(Actor):
    """Runs the work of a pool, and gets its events."""

    def __init__(self) -> None:
        self.events: list[RunEvent] = []

        self._came = asyncio.Event()

    @endpoint
    async def event(self, event: RunEvent) -> None:
        self.events.append(event)
        self._came.set()

    async def wait_events(self, count: int) -> None:
        async with asyncio.timeout(_PATIENCE_S):
            while len(self.events) < count:
                self._came.clear()
                await self._came.wait()


@dataclass(slots=True)
class _Bench:
    pool: TrainingPool
    store: ActorRef[Store]
    holder: _Holder
    slots: list[psutil.Process]

    async def accumulate_both(self) -> None:
        for policy in (FIRST, SECOND):
            await self._accumulate(policy)

    async def _accumulate(self, policy: PolicyName) -> None:
        await self.pool.accumulate(policy, await self.store.api.lease(policy, Version(0), 2))

    async def switch(self, to: PolicyName) -> float:
        """Seconds until ``to`` is on the slot of the other policy."""
        assert isinstance(self.pool, SharedPool)
        began = time.perf_counter()
        await self.pool.bind(to)
        return time.perf_counter() - began

    async def swap_rates(self) -> dict[str, float]:
        """Measures a switch to each policy, after one to both."""
        for policy in (FIRST, SECOND):
            await self.switch(policy)
        self.holder.events.clear()
        for policy in (FIRST, SECOND):
            await self.switch(policy)
        await self.holder.wait_events(4)
        kinds: dict[str, type[PolicySuspended | PolicyResumed]] = {
            "suspend_gb_s": PolicySuspended,
            "resume_gb_s": PolicyResumed,
        }
        return {
            key: statistics.median(
                event.size_bytes / 1e9 / event.seconds
                for event in self.holder.events
                if isinstance(event, kind)
            )
            for key, kind in kinds.items()
        }

    async def cycle(self, cycles: int) -> _Cycled:
        """A step of the first policy, with ``cycles`` switches to the other and back before its last micro-batch."""
        await self.accumulate_both()
        for _ in range(_WARM_UP):
            await self._there_and_back()
        before = self._rss()
        seconds = [await self._there_and_back() for _ in range(cycles)]
        after = self._rss()
        return _Cycled(
            switch_ms=statistics.median(seconds) * 500,
            rss_change=abs(after / before - 1),
            learned=await self._end_step(),
        )

    async def _there_and_back(self) -> float:
        return await self.switch(SECOND) + await self.switch(FIRST)

    async def gang_switch_ms(self) -> float:
        await self.accumulate_both()
        await self._there_and_back()
        seconds = [await self._there_and_back() for _ in range(_GANG_CYCLES)]
        return statistics.median(seconds) * 500

    async def step(self) -> tuple[float, int | None]:
        """The same step without switches."""
        await self.accumulate_both()
        return await self._end_step()

    async def _end_step(self) -> tuple[float, int | None]:
        await self._accumulate(FIRST)
        stats, _ = await self.pool.optimizer_step(FIRST, Step(1))
        published = await self.pool.publish(FIRST)
        return stats.figures["loss"], published.handle.digest

    def _rss(self) -> int:
        return sum(_own_kib(process.pid) for process in self.slots)


@asynccontextmanager
async def _bench(size: Size, *, shared: bool = True, ranks: int = 1) -> AsyncIterator[_Bench]:
    """Two policies of that size with ``ranks`` ranks each, and rows for two micro-batches of each."""
    policies = {policy: _policy(policy, size, ranks) for policy in (FIRST, SECOND)}
    with (
        TemporaryDirectory(prefix="flexmarl-", dir=env.runtime_base()) as runtime,
        TemporaryDirectory() as disk,
    ):
        runtime_dir, store_dir = Path(runtime), Path(disk)
        for path in segment_directories(runtime_dir, store_dir).all():
            path.mkdir(mode=0o700)
        (store_dir / "workflow.py").write_text(_RECIPE)
        users = {AgentName(policy): policy for policy in policies}
        async with (
            ActorSystem("bench", runtime_dir) as system,
            Supervisor(
                system,
                ProcessNode(system, runtime_dir, store_dir, env.actor_environment(), modules=_MODULES),
                name="slots",
            ) as supervisor,
        ):
            setup_of_store = StoreSetup(
                policies=users,
                columns={agent: {} for agent in users},
                store_dir=store_dir,
            )
            store = await system.add(Store(setup_of_store), "store")
            await _put_samples(store, runtime_dir, store_dir)
            recipe = RecipeConfig(folder=str(store_dir), data={}, seed=0)
            setup = TrainerSetup(policies, recipe, 10, store, store_dir)
            holder = _Holder()
            console = await system.add(holder, "console")
            pool: TrainingPool = StaticPool(setup, system, holder.background)
            if shared:
                pool = await _shared_pool(setup, system, supervisor, holder, console, ranks)
            with first_error():
                async with asyncio.TaskGroup() as group:
                    failing = group.create_task(_raise_failure(system, supervisor))
                    await pool.start()
                    figures = await supervisor.process_statistics()
                    slots = [psutil.Process(figures[n].pid) for n in figures if n.startswith("slot-")]
                    yield _Bench(pool, store, holder, slots)
                    failing.cancel()
            await pool.close()


async def _raise_failure(system: ActorSystem, supervisor: Supervisor) -> None:
    """Raises the first failure of an actor, which others would wait for in vain."""
    failures: list[asyncio.Future[Any]] = [system.failure, supervisor.failure]
    await asyncio.wait(failures, return_when=asyncio.FIRST_COMPLETED)
    raise next(failure.result() for failure in failures if failure.done())


async def _shared_pool(
    setup: TrainerSetup,
    system: ActorSystem,
    supervisor: Supervisor,
    holder: _Holder,
    console: ActorRef[Any],
    count: int,
) -> SharedPool:
    """As many slots, with room for one state each."""
    names = [f"slot-{number}" for number in range(count)]
    for name in names:
        await supervisor.spawn(_SLOT_WORKER, name, setup)
    slots = [supervisor.reference(name, SlotApi) for name in names]
    config = SharedPoolConfig(slots=count, states_per_slot=1)
    pool = SharedPoolSetup(config, slots, supervisor.ref, console, setup.store_dir / "suspended")
    return SharedPool(setup, pool, system, holder.background, holder.watch)


async def _put_samples(store: ActorRef[Store], runtime_dir: Path, store_dir: Path) -> None:
    writer = ExperienceWriter(store, "bench", segment_directories(runtime_dir, store_dir))
    await writer.put([_sample(policy, number) for policy in (FIRST, SECOND) for number in range(4)])
    writer.close()


_RECIPE: Final = """
async def workflow(query, agents): ...
def train_query(position, seed): ...
def eval_queries(seed): ...
"""


def _policy(name: PolicyName, size: Size, ranks: int) -> PolicySetup:
    heads = size.hidden // 64
    architecture = {
        "model_type": "qwen3", "hidden_size": size.hidden, "intermediate_size": 4 * size.hidden,
        "num_hidden_layers": size.layers, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 64,
        "vocab_size": 14, "tie_word_embeddings": False, "max_position_embeddings": 32,
    }  # fmt: skip
    model = ModelConfig(config=architecture, tokenizer=str(RECIPES / "sort_digits" / "tokenizer"))
    return PolicySetup(
        model=model, trainer=TorchTrainerConfig(ranks=ranks), credit={AgentName(name): CreditConfig()}
    )


def _sample(policy: PolicyName, number: int) -> Sample:
    turn = 0 if policy == FIRST else 1
    content = ((1, 2, 10), (3, 4, 12), (-2.0, -2.5, -3.0))
    return Sample(f"1:q_{turn}_{number}", policy, 1, 0, "1:q", 1.0 - number % 2, 0.5 - number % 2, *content)


@click.command()
@click.option(
    "--cycles", type=click.IntRange(1), help="Switches there and back. Default: 1000, 50 with --quick."
)
@common_options(rounds=5, quick_time="half a minute")
def swap(as_json: bool, cycles: int | None, rounds: int | None, quick: bool) -> int:
    """Measure how policies of PyTorch take turns on a slot worker of a shared training pool.

    Suspending and resuming a state of about 1 GB against a copy by one thread; a switch between two states of 100 MB;
    1,000 switches there and back in the middle of a step, after which loss, weights and memory must be unchanged.

    \b
    Examples:
      scripts/bench/run swap
      scripts/bench/run swap --json > swap.json

    Nothing else should be running on the machine. Needs 16 GB of memory. Progress is on standard error; ctrl-C stops
    it.
    """
    options = Options(
        rounds=rounds or (1 if quick else 5),
        cycles=cycles or (50 if quick else 1000),
        large=SMALL if quick else LARGE,
    )
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)
