"""Measures the gain of moving instances between policies, with simulated engines in virtual time.

Steps of ``balance_recipe`` in virtual time: real rollout actor, router and instances; only the simulated engines take
time. Four agents have a policy each, 76 % of the calls are to one (the skew of FlexMARL, arXiv 2602.09578), and there
are 16 instances. A result depends on the seed alone. The keys:

    static_s          seconds of a step, each policy with a quarter of the instances, turns dealt in turn
    intra_s           the same, each turn at the instance of its policy with the fewest expected tokens
    inter_s           the same, and instances move between policies; a move costs the loading of the weights
    best_static_s     as ``intra_s``, with the best fixed numbers of instances
    lower_bound_s     the larger of two: all work over all instances' batches; the step with an instance per turn
    ..._queue_p99_s   seconds that a turn waits for an instance, the 99th percentile, of each but the last

All are means over the seeds; ``rounds`` has every seed's, with its ``best_partition`` and the number of ``moves``.
Also: ``goals``, ``versions``, ``settings``.

The best fixed numbers are found by search. No partition ends before its lower bound, all work of each policy over its
instances; so partitions are tried in the order of their bounds, until a bound exceeds the best time. At most
``searched`` are tried.
"""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flexmarl.actors.inference.router.rebalancer import Scope
from flexmarl.actors.names import PolicyName
from flexmarl.core.testing import virtual_time
from flexmarl.launch.bench.command import common_options, run_benchmark
from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.bench.result_tables import goals_table
from flexmarl.launch.bench.results import result_of
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.hosts import env
from flexmarl.launch.monitoring.formatting import compact

from .pipeline import simulated
from .virtual_rollouts import Rollouts, rollouts_of

RECIPE: Final = Path(__file__).parent / "balance_recipe"
_ENOUGH: Final = 100_000
"""Turns of a batch that no step fills."""

Partition = dict[PolicyName, int]
"""Instances of each policy."""

GOALS = (
    Goal("inter_s", "a step with moves, s", 0.65, at_most=True, bare="static_s", bare_words="static"),
    Goal(
        "inter_s", "a step with moves, s", 1.1, at_most=True, bare="best_static_s", bare_words="best static"
    ),
)


@dataclass(frozen=True, slots=True)
class Options:
    """``rounds``: seeds, from ``seed`` on. ``overrides``: of the recipe's config, as for ``flexmarl train``."""

    rounds: int = 3
    seed: int = 2048
    searched: int = 12
    overrides: tuple[str, ...] = ()

    def config(self, seed: int) -> RunConfig:
        """Raises ConfigError for invalid overrides."""
        return resolve(str(RECIPE), [*self.overrides, f"seed={seed}"])


def parts(options: Options) -> int:
    """The number of calls of ``report`` that ``measure`` makes."""
    return 2 * options.rounds


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured.

    Raises BenchmarkFailed if a trajectory failed. It starts event loops, so none may run in this thread.
    """
    rounds = []
    for seed in range(options.seed, options.seed + options.rounds):
        config = options.config(seed)
        report(f"seed {seed}: equal numbers of instances")
        figures, equal = _equal_partition(config)
        report(f"seed {seed}: the best fixed numbers of instances")
        rounds.append({"seed": seed, **figures, **_best_partition(config, equal, figures, options.searched)})
    keys = [key for key in rounds[0] if key.endswith("_s")]
    means = {key: fmean(figures[key] for figures in rounds) for key in keys}
    return result_of(
        options,
        means,
        GOALS,
        rounds=[
            {key: rounded(value) if key.endswith("_s") else value for key, value in figures.items()}
            for figures in rounds
        ],
    )


def tables(console: Console, result: Mapping[str, Any]) -> None:
    console.print(goals_table("16 instances, 4 policies, simulated engines", result["goals"], "static"))
    table = Table()
    table.add_column("")
    table.add_column("step, s", justify="right")
    table.add_column("queue p99, s", justify="right")
    for key in ("static", "intra", "inter", "best_static"):
        figures = (result[f"{key}_s"], result[f"{key}_queue_p99_s"])
        table.add_row(key.replace("_", " "), *map(compact, figures))
    table.add_row("lower bound", compact(result["lower_bound_s"]), "")
    console.print(table)
    for figures in result["rounds"]:
        best = ", ".join(f"{policy} {count}" for policy, count in figures["best_partition"].items())
        console.print(Text(f"seed {figures['seed']}: {figures['moves']} moves; best static: {best}"))


def _equal_partition(config: RunConfig) -> tuple[dict[str, float], Rollouts]:
    """All figures but those of the best partition; and the rollouts with ``intra``."""
    scopes: dict[str, Scope] = {"static": "off", "intra": "intra", "inter": "intra+inter"}
    found = {key: _run(_with_scope(config, scope)) for key, scope in scopes.items()}
    figures = {f"{key}_s": rollouts.step_s for key, rollouts in found.items()}
    figures |= {f"{key}_queue_p99_s": _queue_p99_s(rollouts) for key, rollouts in found.items()}
    figures["moves"] = len(found["inter"].moves)
    figures["chain_s"] = _run(_without_queues(_with_scope(config, "intra"))).step_s
    return figures, found["intra"]


def _best_partition(
    config: RunConfig, equal: Rollouts, figures: Mapping[str, float], searched: int
) -> dict[str, Any]:
    work_s = work_by_policy(config, equal)
    slots = next(iter(config.policies.values())).engine.max_batch
    instances = sum(policy.instances for policy in config.policies.values())
    least_s = max(sum(work_s.values()) / (instances * slots), figures["chain_s"])

    def bound_s(partition: Partition) -> float:
        return max(work_s[policy] / (count * slots) for policy, count in partition.items())

    best_s, best, p99_s = figures["intra_s"], {name: p.instances for name, p in config.policies.items()}, 0.0
    p99_s = figures["intra_queue_p99_s"]
    for partition in sorted(partitions(list(work_s), instances), key=bound_s)[:searched]:
        if max(bound_s(partition), figures["chain_s"]) >= best_s:
            break
        rollouts = _run(_with_partition(_with_scope(config, "intra"), partition))
        if rollouts.step_s < best_s:
            best_s, best, p99_s = rollouts.step_s, partition, _queue_p99_s(rollouts)
    return {
        "best_static_s": best_s,
        "best_static_queue_p99_s": p99_s,
        "lower_bound_s": least_s,
        "best_partition": best,
    }


def partitions(policies: list[PolicyName], instances: int) -> Iterator[Partition]:
    """Every way to give all instances to the policies, at least one to each."""
    for cuts in combinations(range(1, instances), len(policies) - 1):
        edges = (0, *cuts, instances)
        yield {policy: edges[n + 1] - edges[n] for n, policy in enumerate(policies)}


def work_by_policy(config: RunConfig, rollouts: Rollouts) -> dict[PolicyName, float]:
    """Seconds of decoding per step, if each sequence is decoded alone."""
    work_s = dict.fromkeys(config.policies, 0.0)
    for groups in rollouts.steps:
        for sample in (sample for group in groups for sample in group.samples):
            policy = next(agent.policy for name, agent in config.agents.items() if name == sample.agent)
            engine, _ = simulated(config.policies[policy])
            steps = len(sample.tokens) + engine.prompt_share * len(sample.prompt_tokens)
            work_s[policy] += steps * engine.token_s / len(rollouts.steps)
    return work_s


def _queue_p99_s(rollouts: Rollouts) -> float:
    return rollouts.router["queue_p99_s"]


def _run(config: RunConfig) -> Rollouts:
    with tempfile.TemporaryDirectory(prefix="flexmarl-", dir=env.runtime_base()) as directory:
        return virtual_time.run(rollouts_of(config, Path(directory)))


def _with_scope(config: RunConfig, scope: Scope) -> RunConfig:
    return config.model_copy(update={"balance": config.balance.model_copy(update={"scope": scope})})


def _with_partition(config: RunConfig, partition: Partition) -> RunConfig:
    policies = {
        name: policy.model_copy(update={"instances": partition[name]})
        for name, policy in config.policies.items()
    }
    return config.model_copy(update={"policies": policies})


def _without_queues(config: RunConfig) -> RunConfig:
    """Every turn is generated as soon as it is asked for."""
    policies = {
        name: policy.model_copy(update={"engine": policy.engine.model_copy(update={"max_batch": _ENOUGH})})
        for name, policy in config.policies.items()
    }
    return config.model_copy(update={"policies": policies})


@click.command()
@click.argument("overrides", nargs=-1, metavar="[KEY.KEY=VALUE]...")
@click.option("--seed", type=click.IntRange(0), default=2048, show_default=True, help="The first seed.")
@common_options(rounds=3, quick_time="a few seconds")
def balance(overrides: tuple[str, ...], as_json: bool, rounds: int | None, seed: int, quick: bool) -> int:
    """Measure what it gains to move instances between policies: a step with 4 policies and 16 instances, in virtual
    time, with simulated engines.

    76 % of the calls are to one agent. Compared with equal numbers of instances, with the best fixed numbers, and with
    a lower bound. Each round has a seed of its own; the figures depend on nothing else.

    \b
    Examples:
      scripts/bench/run balance
      scripts/bench/run balance --json > balance.json
      scripts/bench/run balance balance.threshold=10 --seed 7

    Progress is on standard error; ctrl-C stops it.
    """
    options = Options(
        rounds=rounds or (1 if quick else 3), seed=seed, searched=2 if quick else 12, overrides=overrides
    )
    options.config(seed)  # raises for wrong overrides before anything starts
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)
