"""Measures a training step with a barrier (``sync``) and without one (``strict``), with simulated engines.

Runs of ``flexmarl train`` on ``pipeline_recipe``, every actor in a process of its own, over ipc. Engines and trainer
are simulated: they sleep instead of computing, so that only the schedule and its overhead are measured. Both modes draw
the same answers of the same lengths. The keys:

    sync_s, strict_s          seconds per step; the median of the rounds, each the mean over its steps but the first
    lower_bound_s             lower bound of a step with a global barrier, the mean over the same steps
    orchestrator_core_share   CPU seconds (user and system, by psutil) of the orchestrator's process per 1,000 turns,
                              from a run of its own, scaled in time so that about 1,000 turns end per second
    load                      that run: turns_per_s, and core_share of every process in the same unit
    rounds                    every round's figures, by key
    goals                     the goal of each figure, and if it is met

Also: ``machine``, ``versions``, ``settings``. The bound (``barrier_bound_s``) is computed from rollouts of the same
draws in virtual time, in which only the engines take time. A run in ``strict`` may be faster: its barrier is per
policy, and turns of the next step begin while other policies still train.
"""

import asyncio
import contextlib
import io
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
import psutil
import uvloop
from rich.console import Console
from rich.text import Text

from flexmarl.actors.inference.inference_config import SimulatedEngineConfig
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.actors.orchestrator.plan import Mode
from flexmarl.actors.step_metrics import StepMetrics
from flexmarl.actors.trainer.backends.backend_config import SimulatedTrainerConfig
from flexmarl.actors.trainer.backends.simulated_policy import micro_batch_s
from flexmarl.core.testing import virtual_time
from flexmarl.launch.bench import machine
from flexmarl.launch.bench.command import common_options, run_benchmark
from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.bench.measure import Report, in_turns, rounded
from flexmarl.launch.bench.result_tables import goals_table, warn_if_busy
from flexmarl.launch.bench.results import result_of
from flexmarl.launch.cli.signals import train_until_signal
from flexmarl.launch.config.config_reading import resolve, to_yaml
from flexmarl.launch.config.config_sections import PolicyConfig
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.errors import BenchmarkFailed, Interrupted
from flexmarl.launch.hosts import env
from flexmarl.launch.monitoring.console.progress import Progress
from flexmarl.launch.monitoring.formatting import compact
from flexmarl.launch.run.prepared_run import PreparedRun
from flexmarl.launch.run.resuming import StartState
from flexmarl.launch.run.run import Run
from flexmarl.launch.run_folder.run_directory import RunDirectory

from .virtual_rollouts import ClosedGroup, rollouts_of

RECIPE = Path(__file__).parent / "pipeline_recipe"
MODES: tuple[Mode, ...] = ("sync", "strict")

_LOAD_TURNS_PER_S = 1000.0

GOALS = (
    Goal("strict_s", "a strict step, s", 0.6, at_most=True, bare="sync_s", bare_words="sync"),
    Goal("strict_s", "a strict step, s", 1.1, at_most=True, bare="lower_bound_s", bare_words="bound"),
    Goal("orchestrator_core_share", "orchestrator, cores at 1,000 turns/s", 0.1, at_most=True),
)


@dataclass(frozen=True, slots=True)
class Options:
    """``overrides``: of the recipe's config, as for ``flexmarl train``."""

    rounds: int = 3
    steps: int = 6
    seed: int = 2048
    overrides: tuple[str, ...] = ()

    @property
    def counted_steps(self) -> int:
        return self.steps - 1

    def config(self, mode: Mode) -> RunConfig:
        """Raises ConfigError for invalid overrides."""
        own = (f"seed={self.seed}", f"training.steps={self.steps}", f"mode={mode}")
        return resolve(str(RECIPE), [*self.overrides, *own])


def parts(options: Options) -> int:
    """The number of calls of ``report`` that ``measure`` makes."""
    return 3 + len(MODES) * options.rounds


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured.

    Raises BenchmarkFailed if a trajectory failed, KeyboardInterrupt after ctrl-C, and the errors of a run.
    """
    report("how busy the machine is with other things")
    described = asyncio.run(machine.describe())
    report("the lower bound, in virtual time")
    bounds = lower_bounds_s(options.config("sync"))
    rounds: dict[str, list[float]] = {f"{mode}_s": [] for mode in MODES}
    numbers = dict.fromkeys(MODES, 0)
    for mode in in_turns(MODES, options.rounds):
        numbers[mode] += 1
        report(f"{mode}, round {numbers[mode]} of {options.rounds}")
        run = _timed_run(options.config(mode))
        rounds[f"{mode}_s"].append(run.step_s)
    figures = {key: median(values) for key, values in rounds.items()}
    figures["lower_bound_s"] = fmean(bounds[1:])  # of the steps that are measured
    report("the orchestrator under load")
    turns_per_s = run.turns / options.counted_steps / figures["strict_s"]
    load = _timed_run(scaled(options.config("strict"), turns_per_s / _LOAD_TURNS_PER_S))
    figures["orchestrator_core_share"] = load.core_shares["orchestrator"]
    return result_of(
        options,
        figures,
        GOALS,
        described,
        load={
            "turns_per_s": rounded(load.turns_per_s),
            "core_share": {name: rounded(share) for name, share in load.core_shares.items()},
        },
        rounds={key: [rounded(value) for value in values] for key, values in rounds.items()},
    )


def tables(console: Console, result: Mapping[str, Any]) -> None:
    console.print(goals_table("pipeline, simulated engines", result["goals"], "sync, bound"))
    shares = result["load"]["core_share"].items()
    turns_per_s = compact(result["load"]["turns_per_s"])
    words = ", ".join(f"{name} {share:.2f}" for name, share in shares)
    console.print(Text(f"cores at 1,000 turns/s (measured at {turns_per_s}): {words}"))
    warn_if_busy(console, result)


# --------------------------------------------------------------------------- the lower bound


def barrier_bound_s(
    groups: Sequence[ClosedGroup],
    micro_batch: int,
    trainers: Mapping[PolicyName, SimulatedTrainerConfig],
    policy_of: Mapping[AgentName, PolicyName],
    install_s: float,
) -> float:
    """The least seconds of a step if no turn of the next step begins before all policies have stepped.

    The larger of two, for one trainer that computes one micro-batch at a time:

    - the last group's closing + the shortest of the policies' last micro-batches + an optimizer step + a weight
      install;
    - the time of the first complete micro-batch of any policy + all micro-batches + all optimizer steps.

    A micro-batch holds rows of all agents of its policy. ``groups``: in the order in which they closed.
    """
    rolled_out_s = groups[-1].closed_s
    first_ready_s = rolled_out_s
    last_s: list[float] = []
    work_s = 0.0
    for policy, trainer in trainers.items():
        rows = [
            (group.closed_s, sample)
            for group in groups
            for sample in group.samples
            if policy_of[AgentName(sample.agent)] == policy
        ]
        if len(rows) >= micro_batch:
            first_ready_s = min(first_ready_s, rows[micro_batch - 1][0])
        batches = [rows[n : n + micro_batch] for n in range(0, len(rows), micro_batch)]
        costs = [
            micro_batch_s(trainer, [sample for _, sample in batch], trainer.most_ranks) for batch in batches
        ]
        last_s.append(costs[-1] + trainer.optimizer_s)
        work_s += sum(costs) + trainer.optimizer_s
    return max(rolled_out_s + min(last_s) + install_s, first_ready_s + work_s)


def lower_bounds_s(config: RunConfig) -> list[float]:
    """``barrier_bound_s`` of every step. It starts a loop, so no loop may run in this thread."""
    trainers = {name: simulated(policy)[1] for name, policy in config.policies.items()}
    policy_of = {name: agent.policy for name, agent in config.agents.items()}
    install_s = min(simulated(policy)[0].install_s for policy in config.policies.values())
    with tempfile.TemporaryDirectory(prefix="flexmarl-", dir=env.runtime_base()) as directory:
        rollouts = virtual_time.run(rollouts_of(config, Path(directory)))
    micro_batch = config.training.micro_batch
    return [barrier_bound_s(groups, micro_batch, trainers, policy_of, install_s) for groups in rollouts.steps]


# --------------------------------------------------------------------------- real runs


@dataclass(slots=True)
class _Moment:
    """At the end of a step: seconds of the run, turns of the step, CPU seconds of every process so far."""

    time_s: float
    turns: int
    cpu_s: dict[str, float]


@dataclass(slots=True)
class _Run:
    """Measurements of one run, from the end of its first step to the end of its last."""

    moments: list[_Moment] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.moments[-1].time_s - self.moments[0].time_s

    @property
    def step_s(self) -> float:
        return self.seconds / (len(self.moments) - 1)

    @property
    def turns_per_s(self) -> float:
        return self.turns / self.seconds

    @property
    def turns(self) -> int:
        return sum(moment.turns for moment in self.moments[1:])

    @property
    def core_shares(self) -> dict[str, float]:
        """Share of one core by process, at 1,000 turns per second."""
        first, last = self.moments[0].cpu_s, self.moments[-1].cpu_s
        per_turn = {name: (last[name] - first[name]) / self.turns for name in last}
        return {name: share * _LOAD_TURNS_PER_S for name, share in per_turn.items()}


class _Watch(Progress):
    """Shows nothing; takes measurements at the end of each step."""

    def __init__(self, config: RunConfig) -> None:
        console = Console(file=io.StringIO())
        super().__init__(
            console,
            run_name="bench",
            mode=config.mode,
            total_steps=config.training.steps,
            agents={name: agent.policy for name, agent in config.agents.items()},
        )
        self.run = _Run()
        self._processes: dict[str, psutil.Process] = {}

    def step(self, metrics: StepMetrics) -> None:
        if failed := metrics.figures["failed_trajectories"]:
            raise BenchmarkFailed(f"{failed} trajectories failed: the modes can't be compared")
        if not self._processes:
            self._processes = {_actor_of(child): child for child in psutil.Process().children(recursive=True)}
        turns = sum(int(policy.get("samples", 0)) for policy in metrics.by_policy.values())
        cpu_s = {name: sum(process.cpu_times()[:2]) for name, process in self._processes.items()}
        self.run.moments.append(_Moment(metrics.time_s, turns, cpu_s))


def _actor_of(process: psutil.Process) -> str:
    """The last words of an actor's command line are its directory and its name."""
    return " ".join(process.cmdline()).split()[-1]


def _timed_run(config: RunConfig) -> _Run:
    """One run from start to end. Raises KeyboardInterrupt after a signal, when all its processes have ended."""
    watch = _Watch(config)
    with tempfile.TemporaryDirectory(prefix="flexmarl-") as folder, _interrupts():
        directory = RunDirectory.create(Path(folder) / "run", to_yaml(config))
        prepared = PreparedRun(directory, StartState(config, None, {}, []), {})
        result = uvloop.run(train_until_signal(Run.from_prepared(prepared, watch), watch))
        if result.stopped:
            raise KeyboardInterrupt
    return watch.run


@contextlib.contextmanager
def _interrupts() -> Iterator[None]:
    try:
        yield
    except Interrupted:
        raise KeyboardInterrupt from None


def simulated(policy: PolicyConfig) -> tuple[SimulatedEngineConfig, SimulatedTrainerConfig]:
    """The settings of a simulated policy. Raises BenchmarkFailed if it is another."""
    if isinstance(policy.engine, SimulatedEngineConfig) and isinstance(
        policy.trainer, SimulatedTrainerConfig
    ):
        return policy.engine, policy.trainer
    raise BenchmarkFailed("engine.name and trainer.name have to be simulated: nothing else is measured")


def scaled(config: RunConfig, factor: float) -> RunConfig:
    """The same with all simulated times multiplied by ``factor``."""
    policies = {}
    for name, policy in config.policies.items():
        engine, trainer = (
            part.model_copy(
                update={key: value * factor for key, value in part.model_dump().items() if key.endswith("_s")}
            )
            for part in simulated(policy)
        )
        policies[name] = policy.model_copy(update={"engine": engine, "trainer": trainer})
    return config.model_copy(update={"policies": policies})


@click.command()
@click.argument("overrides", nargs=-1, metavar="[KEY.KEY=VALUE]...")
@click.option(
    "--steps",
    type=click.IntRange(2),
    help="Steps of each run; the first is not counted. Default: 6, 3 with --quick.",
)
@click.option("--seed", type=click.IntRange(0), default=2048, show_default=True, help="Seed of all draws.")
@common_options(rounds=3, quick_time="less than a minute")
def pipeline(
    overrides: tuple[str, ...], as_json: bool, rounds: int | None, steps: int | None, seed: int, quick: bool
) -> int:
    """Measure the overlap of rollout and training: a step in the modes sync and strict, with simulated engines.

    Real runs of three agents that are called 1:2:6 times per trajectory, with answers of long-tailed lengths
    (lognormal, sigma 1). Engines and trainer sleep instead of computing. Also shown: the lower bound of a step with a
    global barrier, and the CPU time of the orchestration.

    \b
    Examples:
      scripts/bench/run pipeline
      scripts/bench/run pipeline --json > pipeline.json
      scripts/bench/run pipeline --quick
      scripts/bench/run pipeline training.queries_per_step=64 agents.checker.instances=2

    Nothing else should be running on the machine. Progress is on standard error; ctrl-C stops it.
    """
    options = Options(
        rounds=rounds or (1 if quick else 3),
        steps=steps or (3 if quick else 6),
        seed=seed,
        overrides=overrides,
    )
    options.config("sync")  # raises for wrong overrides before anything starts
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)
