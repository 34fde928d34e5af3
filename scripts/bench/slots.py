"""Measures the effect of a slot on small tasks without a model: here the trajectories that a query source saves.

The others of EXPERIMENTS are measured in files of their own.

The task has 256 queries of 16 skills. The policy is a table: it solves a query with the probability
``sigmoid(skill + own - difficulty)``, where it learns ``skill``, which the skill's 16 queries share, and ``own`` by the
policy gradient, with the advantages of GRPO. Difficulties are drawn evenly from -6 to 6, so that many queries are
always solved and many never. Query sources and estimator are those of a run; a result depends on the seed
alone. The keys:

    uniform_rollouts   trajectories until the mean probability over all queries reaches ``target``, in turn, shuffled
    rollouts           the same with the source
    ratio              the second over the first, each of them the mean over the seeds
    taught, uniform_taught   the share of groups whose rewards differ
    rounds             every seed's
    goals              the goal of the source, if there is one, and if it is met

Also: ``versions``, ``settings``. A run that does not reach the target counts with all of its trajectories.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import fmean
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import Query
from flexmarl.actors.names import AgentName, Step
from flexmarl.actors.orchestrator.queries.position_source import PositionSource
from flexmarl.actors.recipe.query_source import GroupEnd, QuerySource
from flexmarl.actors.recipe.sources.band_source import BandConfig
from flexmarl.actors.recipe.sources.plain_source import PlainSourceConfig
from flexmarl.actors.recipe.sources.rare_success_source import RareSuccessConfig
from flexmarl.actors.recipe.sources.replay_source import ReplayConfig
from flexmarl.actors.recipe.sources.source_options import SourceOptions
from flexmarl.actors.recipe.sources.variance_source import VarianceConfig
from flexmarl.launch.bench.command import common_options, run_benchmark
from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.bench.result_tables import goals_table
from flexmarl.launch.bench.results import result_of

from . import (
    league,
    replayed,
    slot_demonstrations,
    slot_dispatch,
    slot_explorations,
    slot_extra_queries,
    slot_objectives,
    slot_overlong,
    slot_rewards,
    slot_sandbox,
    slot_sharing,
    slot_sharing_cost,
    slot_trees,
)
from .skill_table import QUERIES, SkillTable

_ROUNDS: Final = 3
AGENT: Final = AgentName("solver")
SOURCES: Final[Mapping[str, SourceOptions]] = {
    "variance": VarianceConfig(pool=QUERIES, fresh=0.0),
    "rare_success": RareSuccessConfig(pool=QUERIES, fresh=0.0),
    "band": BandConfig(pool=QUERIES, fresh=0.0),
    "replay": ReplayConfig(),
}
GOALS: Final[Mapping[str, tuple[Goal, ...]]] = {
    "variance": (Goal("ratio", "trajectories over those of queries in turn", 0.7, at_most=True),)
}


@dataclass(frozen=True, slots=True)
class Experiment:
    """A slot that is measured in a file of its own. ``measure``: gets the first seed, the number of rounds and
    ``quick``."""

    measure: Callable[..., Callable[[Report], dict[str, Any]]]
    show: Callable[[Console, Mapping[str, Any]], None]


EXPERIMENTS: Final[Mapping[str, Experiment]] = {
    "league": Experiment(league.of_rounds, league.show),
    **{name: Experiment(partial(slot_trees.of_rounds, name), slot_trees.show) for name in slot_trees.TASKS},
    **{
        name: Experiment(partial(slot_demonstrations.of_rounds, name), slot_demonstrations.show)
        for name in slot_demonstrations.RULES
    },
    "dispatch": Experiment(slot_dispatch.of_rounds, slot_dispatch.show),
    "explorations": Experiment(slot_explorations.of_rounds, slot_explorations.show),
    "extra_queries": Experiment(slot_extra_queries.of_rounds, slot_extra_queries.show),
    **{
        name: Experiment(partial(slot_objectives.of_rounds, name), slot_objectives.show)
        for name in slot_objectives.ARMS
    },
    "overlong": Experiment(slot_overlong.of_rounds, slot_overlong.show),
    "rewards": Experiment(slot_rewards.of_rounds, slot_rewards.show),
    "sandbox": Experiment(slot_sandbox.of_rounds, slot_sandbox.show),
    "sharing": Experiment(slot_sharing.of_rounds, slot_sharing.show),
    "sharing_cost": Experiment(slot_sharing_cost.of_rounds, slot_sharing_cost.show),
    "replay_recent": Experiment(replayed.of_recent, replayed.show),
    "replay_successes": Experiment(replayed.of_successes, replayed.show),
}


@dataclass(frozen=True, slots=True)
class Options:
    """``rounds``: seeds, from ``seed`` on. ``lr``: of the table."""

    name: str = "variance"
    rounds: int = _ROUNDS
    seed: int = 0
    queries_per_step: int = 16
    trajectories: int = 8
    lr: float = 0.5
    target: float = 0.8
    most_steps: int = 1500


def played(options: Options, source_options: SourceOptions, seed: int) -> tuple[int, float]:
    """The trajectories until the target, and the share of the groups whose rewards differ."""
    table, random = SkillTable(seed), Random(f"{seed} rewards")
    source = source_options.source(PositionSource(partial(_query, seed)), seed)
    estimator = CreditConfig(name="grpo").estimator
    groups = taught = 0
    for step in range(1, options.most_steps + 1):
        slopes: dict[int, float] = {}
        drawn = [source.next(step) for _ in range(options.queries_per_step)]
        for query in drawn:
            number = query.data["number"]
            chance = table.chance(number)
            rewards = [float(random.random() < chance) for _ in range(options.trajectories)]
            advantages = estimator(rewards)
            # d log pi / d score is 1 - p of a trajectory that solves the query, and -p of one that does not.
            slope = fmean(a * (r - chance) for a, r in zip(advantages, rewards, strict=True))
            slopes[number] = slopes.get(number, 0.0) + options.lr * slope
            groups, taught = groups + 1, taught + (min(rewards) < max(rewards))
            _close(source, query, step, rewards)
        table.learn(slopes)
        if table.mean_chance >= options.target:
            break
    return groups * options.trajectories, taught / groups


def _query(seed: int, position: int) -> Query:
    epoch, place = divmod(position, QUERIES)
    order = list(range(QUERIES))
    Random(f"{seed} epoch {epoch}").shuffle(order)
    return Query(f"q{order[place]}", "", {"number": order[place]})


def _close(source: QuerySource, query: Query, step: int, rewards: list[float]) -> None:
    success = fmean(rewards)
    source.closed(GroupEnd(query, Step(step), {}, {AGENT: rewards}, {"accuracy": rewards}, success, 0))


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured."""
    rounds = []
    for seed in range(options.seed, options.seed + options.rounds):
        report(f"seed {seed}")
        uniform, uniform_taught = played(options, PlainSourceConfig(), seed)
        rollouts, taught = played(options, SOURCES[options.name], seed)
        rounds.append(
            {
                "seed": seed,
                "uniform_rollouts": uniform,
                "rollouts": rollouts,
                "ratio": rollouts / uniform,
                "taught": taught,
                "uniform_taught": uniform_taught,
            }
        )
    keys = ("uniform_rollouts", "rollouts", "taught", "uniform_taught")
    figures = {key: fmean(values[key] for values in rounds) for key in keys}
    figures["ratio"] = figures["rollouts"] / figures["uniform_rollouts"]
    lines = [{key: rounded(value) for key, value in line.items()} for line in rounds]
    return result_of(options, figures, GOALS.get(options.name, ()), rounds=lines)


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the result as tables."""
    table = Table("seed", "in turn", "with the source", "ratio", "groups that teach", title="trajectories")
    for values in result["rounds"]:
        shares = f"{values['uniform_taught']:.2f}, {values['taught']:.2f}"
        row = (values["seed"], values["uniform_rollouts"], values["rollouts"])
        table.add_row(*map(str, row), f"{values['ratio']:.2f}", shares)
    console.print(table)
    if "goals" in result:
        console.print(goals_table("trajectories", result["goals"]))


@click.command
@click.argument("name", type=click.Choice([*SOURCES, *EXPERIMENTS]))
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The first round's seed.")
@common_options(rounds=_ROUNDS, quick_time="5 s")
def slots(name: str, seed: int, as_json: bool, rounds: int | None, quick: bool) -> int:
    """Measures the effect of the slot NAME: the trajectories, tokens or seconds that it saves, or exploitability.

    \b
    Examples:
      scripts/bench/run slots variance --json
      scripts/bench/run slots band --rounds 10
      scripts/bench/run slots league
    """
    count = rounds or (1 if quick else _ROUNDS)
    if name in EXPERIMENTS:
        experiment = EXPERIMENTS[name]
        return run_benchmark(experiment.measure(seed, count, quick=quick), count, experiment.show, as_json)
    options = replace(Options(name=name, seed=seed), rounds=count)
    return run_benchmark(partial(measure, options), options.rounds, show, as_json)
