"""The slot ``rewards``: seconds in which a step's rewards are computed, by processes of each worker and by services.

4 rollout workers have 16 rewards each at once. A reward takes a lognormal time (median 20 ms, deviation 1.0) in which
its process sleeps, as one does that waits for a program. Pools, services and processes are those of a run, with 4
processes in all. A result depends on the machine as little as a process that sleeps does. The keys:

    own_s        seconds of a step, one process for each worker
    one_s        the same, one service of 4 processes
    two_s        the same, two services of 2 processes, each near two of the workers
    bound_s      the larger of all work over all processes, and the longest reward
    ratio        ``one_s`` over ``own_s``, each of them the mean over the seeds; ``two_ratio``: of ``two_s``
    rounds       every seed's

Also: ``versions``, ``settings``.
"""

import asyncio
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from flexmarl.actors.deadline import Deadline
from flexmarl.actors.environments.process_pool import Pool, Processes
from flexmarl.actors.environments.rewards_config import RewardsConfig
from flexmarl.actors.messages import Query
from flexmarl.actors.names import Step
from flexmarl.actors.rewards.reward_service import RewardService, RewardServiceSetup
from flexmarl.actors.rollout.rollout_config import RolloutConfig
from flexmarl.actors.rollout.rollout_waits import RolloutWaits
from flexmarl.actors.rollout.services.reward_pool import RewardPool
from flexmarl.actors.rollout.trajectory import Trajectory
from flexmarl.core.ref import ActorRef
from flexmarl.core.system import ActorSystem
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.bench.results import result_of

_LIMIT_S: Final = 600.0
_SERVICES: Final = {"own_s": 0, "one_s": 1, "two_s": 2}


@dataclass(frozen=True, slots=True)
class Options:
    """``rounds``: seeds, from ``seed`` on. ``steps``: measured, of each seed. ``processes``: of all pools together."""

    rounds: int = 3
    seed: int = 0
    steps: int = 10
    workers: int = 4
    processes: int = 4
    rewards: int = 16
    median_s: float = 0.02
    sigma: float = 1.0


def times_of(options: Options, seed: int, step: int) -> list[list[float]]:
    """Seconds of the rewards of a step, by worker."""
    draws = Random(f"{seed} step {step}")
    return [
        [options.median_s * math.exp(draws.gauss(0.0, options.sigma)) for _ in range(options.rewards)]
        for _ in range(options.workers)
    ]


async def played(options: Options, seed: int, services: int) -> float:
    """Mean seconds of a step."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rewards"))
        system = await stack.enter_async_context(ActorSystem("bench", Path(folder)))
        places = options.processes // (services or options.workers)
        setup = RewardServiceSetup("", places)
        refs = [await system.add(RewardService(setup), f"rewards-{n}") for n in range(services)]
        pools = [_pool(stack, refs, places, worker, Path(folder)) for worker in range(options.workers)]
        # All processes start before the first step.
        await asyncio.gather(*(pool.run(time.sleep, [0.2], None) for pool in pools for _ in range(places)))
        seconds = []
        for step in range(options.steps):
            began = time.perf_counter()
            await asyncio.gather(
                *(
                    pool.run(time.sleep, [sleep_s], None)
                    for pool, times in zip(pools, times_of(options, seed, step), strict=True)
                    for sleep_s in times
                )
            )
            seconds.append(time.perf_counter() - began)
        return fmean(seconds)


def _pool(
    stack: AsyncExitStack, services: Sequence[ActorRef[Any]], processes: int, worker: int, folder: Path
) -> Pool:
    """The pool of a worker, as its trajectories have it."""
    of_worker = Processes(processes)
    stack.push_async_callback(of_worker.close)
    trajectory = Trajectory(Query("q", ""), Step(1), worker, {})
    trajectory.deadline = Deadline(_LIMIT_S)
    stack.callback(trajectory.deadline.stop)
    config = RewardsConfig(services=len(services), processes=processes, timeout_s=_LIMIT_S)
    waits = RolloutWaits(folder, RolloutConfig())
    return RewardPool(services, config, worker, of_worker, waits).of(trajectory)


def of_rounds(seed: int, rounds: int, *, quick: bool) -> Callable[[Report], dict[str, Any]]:
    """The measurement of ``rounds`` seeds from ``seed`` on. ``quick``: of fewer steps."""
    return partial(measure, Options(seed=seed, rounds=rounds, steps=2 if quick else 10))


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured. It
    starts event loops, so none may run in this thread."""
    rounds = []
    for seed in range(options.seed, options.seed + options.rounds):
        report(f"seed {seed}")
        figures = {key: asyncio.run(played(options, seed, services)) for key, services in _SERVICES.items()}
        steps = [[*chain(*times_of(options, seed, step))] for step in range(options.steps)]
        figures["bound_s"] = fmean(max(sum(times) / options.processes, max(times)) for times in steps)
        rounds.append({"seed": seed, **{key: rounded(value) for key, value in figures.items()}})
    means = {key: fmean(line[key] for line in rounds) for key in rounds[0] if key != "seed"}
    means["ratio"] = means["one_s"] / means["own_s"]
    means["two_ratio"] = means["two_s"] / means["own_s"]
    return result_of(options, means, rounds=rounds)


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the result as a table."""
    table = Table("seed", "own", "one service", "two services", "bound", title="seconds of a step's rewards")
    for line in result["rounds"]:
        table.add_row(*(f"{line[key]:g}" for key in ("seed", *_SERVICES, "bound_s")))
    console.print(table)
