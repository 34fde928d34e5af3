"""Measures the router: turns of 8 rollout workers, routed to 512 instances of a policy.

The keys of the result:

    pure_turns_per_s    asked, routed and ended by ``Router`` alone, in this process; median of the rounds
    ipc_turns_per_s     the same by the router's process, over ipc, per second of its CPU time: one core's worth
    route_p50_us, route_p99_us
                        from asking to the route, over ipc, at 1,000 turns/s
    call_p50_us, call_p99_us
                        an empty call to the same process at the same rate, by turns with the routes: what the machine
                        gives while they are measured
    rounds, goals, machine, settings

The instances of the actor's measurement do nothing: they are actors of this process that acknowledge a version.
"""

import asyncio
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console

from flexmarl.actors.inference.router.router import Router
from flexmarl.actors.inference.router.router_actor import RouterActor
from flexmarl.actors.inference.router.router_config import RouterConfig
from flexmarl.actors.inference.router.router_decisions import Load, Route
from flexmarl.actors.inference.router.router_setup import RouterSetup
from flexmarl.actors.messages import (
    ConsoleApi,
    GenerateRequest,
    Generation,
    InstanceApi,
    Loaded,
    Published,
    RouterApi,
    RouteRequest,
    TextTo,
    VersionRange,
)
from flexmarl.actors.names import PolicyName, Version
from flexmarl.actors.rollout.turn_routes import TurnRoutes
from flexmarl.core.actor import Actor, endpoint
from flexmarl.core.base.collector import spare_collector
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.launch.bench import machine
from flexmarl.launch.bench.command import common_options, run_benchmark
from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.bench.measure import Report, in_turns, percentile, rounded
from flexmarl.launch.bench.result_tables import goals_table, warn_if_busy
from flexmarl.launch.bench.results import result_of
from flexmarl.launch.hosts import env
from flexmarl.transport.handle import StateHandle

POLICY = PolicyName("solver")
_CAPACITY = 64
_ROUND = 64
_TOKENS = 200
_TIMEOUT_S = 60.0
_LATENCIES_S = 3.0
_SLICES = 4
_ONE = VersionRange.exactly(Version(0))

GOALS = (
    Goal("pure_turns_per_s", "Router alone, turns/s", 5000, at_most=False),
    Goal("ipc_turns_per_s", "over ipc, turns per CPU second", 5000, at_most=False),
    Goal("route_p99_us", "a route at 1,000 turns/s, p99, us", 1000, at_most=True),
    Goal(
        "route_p50_us", "a route at 1,000 turns/s, p50, us", 2, at_most=True,
        bare="call_p50_us", bare_words="empty call",
    ),
    Goal(
        "route_p99_us", "a route at 1,000 turns/s, p99, us", 2, at_most=True,
        bare="call_p99_us", bare_words="empty call",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """``turns``: of each measurement, in each round. ``in_flight``: turns that have an instance or wait for one."""

    rounds: int = 3
    turns: int = 20_000
    workers: int = 8
    instances: int = 512
    in_flight: int = 8192
    rate_per_s: float = 1000.0


def parts(options: Options) -> int:
    """The number of calls of ``report`` that ``measure`` makes."""
    return 2 + 2 * options.rounds


async def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    report("how busy the machine is with other things")
    described = await machine.describe()
    rounds: defaultdict[str, list[float]] = defaultdict(list)
    report("the start of the router and of the instances")
    with TemporaryDirectory(prefix="flexmarl-", dir=env.runtime_base()) as directory:
        async with ActorSystem("bench", Path(directory)) as system:
            workers = await _start(system, options)
            for number in range(1, options.rounds + 1):
                report(f"Router alone, round {number} of {options.rounds}")
                rounds["pure_turns_per_s"].append(pure_turns_per_s(options))
                report(f"over ipc, round {number} of {options.rounds}")
                rounds["ipc_turns_per_s"].append(await _ipc_turns_per_s(workers, options))
                for name, latencies_us in (await _latencies_us(workers, options)).items():
                    rounds[f"{name}_p50_us"].append(percentile(latencies_us, 0.5))
                    rounds[f"{name}_p99_us"].append(percentile(latencies_us, 0.99))
            workers.close()
    figures = {key: statistics.median(values) for key, values in rounds.items()}
    return result_of(
        options,
        figures,
        GOALS,
        described,
        rounds={key: [rounded(value) for value in values] for key, values in rounds.items()},
    )


def tables(console: Console, result: Mapping[str, Any]) -> None:
    console.print(goals_table("router, 8 workers and 512 instances", result["goals"], "empty call"))
    warn_if_busy(console, result)


# --------------------------------------------------------------------------- the pure Router


def pure_turns_per_s(options: Options) -> float:
    """Turns per second of this process's CPU time, with ``in_flight`` turns at the instances."""
    router = Router([POLICY], RouterConfig())
    for number in range(options.instances):
        router.joined(f"{POLICY}-{number}", (POLICY,), _CAPACITY, 0.0)
    router.published(POLICY, Version(0), 0.0)
    for decision in router.decisions(0.0):
        if isinstance(decision, Load):
            router.loaded(decision.instance, decision.version, 0.0)
    router.decisions(0.0)
    running: deque[tuple[int, int]] = deque()
    asked = 0
    began = 0.0
    while asked < options.in_flight + options.turns:
        if not began and asked >= options.in_flight:
            began = time.process_time()
        now = asked / options.rate_per_s
        for _ in range(_ROUND):
            worker, prefix = asked % options.workers, f"q{asked // 8}"
            tokens = 50 + asked * 37 % 400
            request = RouteRequest(
                asked, POLICY, Version(0), Version(0), tokens, float(asked % 5 * 100), prefix
            )
            router.requested(worker, request, now)
            asked += 1
        for decision in router.decisions(now):
            assert isinstance(decision, Route), "there is room for all turns"
            running.append((decision.session, decision.routed.turn))
        while len(running) > options.in_flight:
            router.ended(*running.popleft(), _TOKENS + asked % 97, now)
    return options.turns / (time.process_time() - began)


# --------------------------------------------------------------------------- the actor


class _Instance(Actor, InstanceApi):
    @endpoint
    async def load(self, published: Published) -> Loaded:
        return Loaded(published.policy, published.version, 0.0, 0.0, 0.0)

    @endpoint
    async def served_version(self, policy: PolicyName) -> Version | None:
        return Version(0)

    @endpoint
    async def generate(self, request: GenerateRequest, text_to: TextTo | None = None) -> Generation:
        return Generation("", (), (), (), Version(0), "stop")


class _MeasuredRouter(RouterActor):
    @endpoint
    async def cpu_s(self) -> float:
        """CPU seconds of its process."""
        return time.process_time()


@dataclass(frozen=True, slots=True)
class _Workers:
    """The sessions of rollout workers."""

    cpu_s: Callable[[], Awaitable[float]]
    sessions: list[TurnRoutes]
    readers: list[asyncio.Task[None]]

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        for reader in self.readers:
            reader.cancel()


async def _start(system: ActorSystem, options: Options) -> _Workers:
    nobody: ActorRef[ConsoleApi] = system.ref("console", system.address, ConsoleApi)
    router: Any = await system.spawn(
        _MeasuredRouter, "router", {"setup": RouterSetup((POLICY,), nobody)}, process=True
    )
    api: ActorRef[RouterApi] = system.ref(router.name, router.address, RouterApi)
    for number in range(options.instances):
        instance = await system.add(_Instance(), f"{POLICY}-{number}")
        await api.api.join(instance, (POLICY,), _CAPACITY)
    handle = StateHandle("bench", 0, 0, 0, (), ())
    await api.within(_TIMEOUT_S).publish(Published(POLICY, Version(0), handle))
    sessions = [TurnRoutes(api, f"rollout-{number}") for number in range(options.workers)]
    for session in sessions:
        await session.open()
    readers = [asyncio.create_task(session.run()) for session in sessions]
    spare_collector()  # as actors' processes do
    return _Workers(router.api.cpu_s, sessions, readers)


async def _ipc_turns_per_s(workers: _Workers, options: Options) -> float:
    """Turns per CPU second of the router's process: every worker asks for a round of turns, and ends the one before."""
    before = await workers.cpu_s()
    turns = options.turns // options.workers // _ROUND * _ROUND

    async def work(session: TurnRoutes) -> None:
        for _ in range(turns // _ROUND):
            routes = await asyncio.gather(*(_route(session, n) for n in range(_ROUND)))
            for route in routes:
                session.ended(route, _TOKENS)

    async with asyncio.TaskGroup() as tasks:
        for session in workers.sessions:
            tasks.create_task(work(session))
    return turns * options.workers / (await workers.cpu_s() - before)


async def _route(session: TurnRoutes, number: int) -> int:
    route = await session.route(POLICY, _ONE, prompt_tokens=50 + number % 400, prefix=f"q{number // 8}")
    return route.turn


async def _latencies_us(workers: _Workers, options: Options) -> dict[str, list[float]]:
    """Durations of routes, asked for by one worker after the other, and of empty calls, in slices by turns."""

    async def route(number: int) -> None:
        session = workers.sessions[number % options.workers]
        session.ended(await _route(session, number), _TOKENS)

    async def call(number: int) -> None:
        await workers.cpu_s()

    found: dict[str, list[float]] = {"route": [], "call": []}
    measured = ((route, found["route"]), (call, found["call"]))
    turns = min(options.turns, int(_LATENCIES_S * options.rate_per_s)) // _SLICES
    for once, latencies_us in in_turns(measured, _SLICES):
        latencies_us += await _at_rate(once, turns, options.rate_per_s)
    return found


async def _at_rate(once: Callable[[int], Awaitable[None]], count: int, rate_per_s: float) -> list[float]:
    """Durations in microseconds of ``once(0)``, ``once(1)``, ..., begun at even distances."""
    latencies_us: list[float] = []
    clock = time.perf_counter  # the loop's own counts milliseconds
    began = clock()

    async def timed(number: int) -> None:
        asked = clock()
        await once(number)
        latencies_us.append((clock() - asked) * 1e6)

    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / rate_per_s - clock()))
            tasks.create_task(timed(number))
    return latencies_us


@click.command()
@common_options(rounds=3, quick_time="a few seconds")
def router(as_json: bool, rounds: int | None, quick: bool) -> int:
    """Measure the router: turns of 8 rollout workers, routed to 512 instances.

    By the rules alone and over ipc, per second of CPU time; and the time until a turn has its route, at 1,000 turns/s.

    \b
    Examples:
      scripts/bench/run router
      scripts/bench/run router --json > router.json

    Nothing else should be running on the machine. Progress is on standard error; ctrl-C stops it.
    """
    options = Options(rounds=rounds or (1 if quick else 3), turns=4_096 if quick else 20_000)
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)
