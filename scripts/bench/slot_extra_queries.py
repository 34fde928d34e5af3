"""The slot ``rollout.extra_queries``: the seconds of a step under lognormal tails, with queries beyond it and without.

Whole runs of ``tails_recipe`` in virtual time: 32 queries a step of 4 answers, which have lognormal lengths (median 200
tokens, deviation 1.0), 10 ms a token, places for all of them. All runs of a seed draw the same queries in the same
order. Both are ``async`` with a staleness of 1. The run without begins a step while the one before is under way; the
run with them does not, since open queries take that version. ``sync``: rollout waits for training. The keys:

    plain_s     virtual seconds of a step without, the mean over all steps but the first and the last
    extra_s     the same with ``extra`` queries beyond the step
    sync_s      the same in ``mode: sync``
    bound_s     the least mean of any order that begins 32 queries for each version: a query that begins at a version
                has ended ``max_staleness + 1`` steps later, so that these take as long together as the longest of 32
    carried     queries that a step leaves to the next, the mean
    trained     queries that a step trains then, the mean; without, they are 32
    stale, plain_stale   the share of the trained samples that have tokens of an older version
    sync_ratio  ``extra_s`` over ``sync_s``, each of them the mean over the seeds; ``ratio``: over ``plain_s``
    bound_ratio ``bound_s`` over ``plain_s``: the least that ``ratio`` may be
    query_ratio as ``ratio``, for each trained query: a step trains more of them then
    rounds      every seed's
    goals       the goals, and if they are met

Also: ``versions``, ``settings``. A result depends on the seed alone.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from flexmarl.actors.inference.engines.simulated_step_engine import sample_answer
from flexmarl.actors.inference.inference_config import SimulatedEngineConfig
from flexmarl.actors.names import AgentName, PolicyName
from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.bench.result_tables import goals_table
from flexmarl.launch.bench.results import result_of
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.config.run_config import RunConfig
from flexmarl.launch.errors import BenchmarkFailed
from flexmarl.launch.simulate.simulation import simulate

from .tails_recipe.workflow import train_query

_QUERIES: Final = 32
_AGENT: Final = AgentName("solver")
_POLICY: Final = PolicyName("solver")
_RECIPE: Final = Path(__file__).parent / "tails_recipe"
_SYNC: Final = ("mode=sync", "max_staleness=null", "agent_defaults.algorithm.correction=none")
_GOALS: Final = (
    Goal("sync_ratio", "seconds of a step over those of sync", 0.75, at_most=True),
    Goal("ratio", "seconds of a step over those of async without", 0.75, at_most=True),
)


@dataclass(frozen=True, slots=True)
class Options:
    """``rounds``: seeds, from ``seed`` on. ``overrides``: of the recipe's config."""

    rounds: int = 3
    seed: int = 0
    extra: int = 16
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Played:
    """A run, without its first step and its last. ``step_s``: of a step. ``carried``: queries that it passes on.
    ``stale``: the share of samples with tokens of an older version than the one that trains them."""

    step_s: float
    carried: float
    stale: float


def played(config: RunConfig) -> Played:
    """Plays a run to its end. Raises BenchmarkFailed if it ends before."""
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(config, Path(folder) / "run", config.seed)
        if run.result is None or run.result.last_step != config.training.steps:
            raise BenchmarkFailed(f"the run of seed {config.seed} ended before step {config.training.steps}")
        lines = [json.loads(line) for line in run.directory.metrics.read_text().splitlines()]
    inner = lines[1:-1]
    stale = sum(line["stale_samples"] for line in inner) / sum(line[f"samples/{_POLICY}"] for line in inner)
    return Played(
        (lines[-2]["time_s"] - lines[0]["time_s"]) / len(inner),
        fmean(line["carried_queries"] for line in inner),
        stale,
    )


def bound_s(config: RunConfig) -> float:
    """See the file's ``bound_s``: of the queries that the steps draw in turn."""
    engine = config.policies[_POLICY].engine
    assert isinstance(engine, SimulatedEngineConfig)
    most = config.agents[_AGENT].sampling.max_new_tokens

    def seconds_of(position: int) -> float:
        seeds = train_query(position, config.seed).data["seeds"]
        return engine.token_s * max(len(sample_answer(engine, seed, most)[0]) for seed in seeds)

    longest = [
        max(map(seconds_of, range(step * _QUERIES, (step + 1) * _QUERIES)))
        for step in range(config.training.steps)
    ]
    return fmean(longest) / (config.staleness + 1)


def of_rounds(seed: int, rounds: int, *, quick: bool) -> Callable[[Report], dict[str, Any]]:
    """The measurement of ``rounds`` seeds from ``seed`` on. ``quick``: of fewer steps."""
    overrides = ("training.steps=6",) if quick else ()
    return partial(measure, Options(seed=seed, rounds=rounds, overrides=overrides))


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured. It
    starts event loops, so none may run in this thread."""
    rounds = []
    for seed in range(options.seed, options.seed + options.rounds):
        report(f"seed {seed}")
        plain, sync, extra = (
            resolve(str(_RECIPE), [f"seed={seed}", *settings, *options.overrides])
            for settings in ((), _SYNC, (f"rollout.extra_queries={options.extra}",))
        )
        with_extra, without = played(extra), played(plain)
        figures = {
            "plain_s": without.step_s,
            "sync_s": played(sync).step_s,
            "extra_s": with_extra.step_s,
            "bound_s": bound_s(plain),
            "carried": with_extra.carried,
            "trained": _QUERIES + options.extra - with_extra.carried,
            "stale": with_extra.stale,
            "plain_stale": without.stale,
        }
        rounds.append({"seed": seed, **{key: rounded(value) for key, value in figures.items()}})
    means = {key: fmean(line[key] for line in rounds) for key in rounds[0] if key != "seed"}
    means["ratio"] = means["extra_s"] / means["plain_s"]
    means["sync_ratio"] = means["extra_s"] / means["sync_s"]
    means["bound_ratio"] = means["bound_s"] / means["plain_s"]
    means["query_ratio"] = means["ratio"] * _QUERIES / means["trained"]
    return result_of(options, means, _GOALS, rounds=rounds)


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the result as tables."""
    keys = ("seed", "plain_s", "sync_s", "extra_s", "bound_s", "carried", "trained")
    table = Table(
        "seed", "without", "sync", "with", "bound", "passed on", "trained", title="virtual seconds of a step"
    )
    for line in result["rounds"]:
        table.add_row(*(f"{line[key]:g}" for key in keys))
    console.print(table)
    console.print(goals_table("seconds of a step", result["goals"]))
