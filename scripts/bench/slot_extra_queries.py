"""The slot ``rollout.extra_queries``: the seconds of a step under lognormal tails, with queries beyond it and without.

Whole runs of ``tails_recipe`` in virtual time: 32 queries a step of 4 trajectories, whose answers have lognormal
lengths (median 200 tokens, deviation 1.0), 10 ms a token, places for all of them. Both are ``async`` with a staleness
of 1. The run without begins a step while the one before is under way; the run with them does not, since open queries
take that version. ``sync``: rollout waits for training. A result depends on the seed alone. The keys:

    plain_s     virtual seconds of a step without, the mean over all steps but the first and the last
    extra_s     the same with ``extra`` queries beyond the step
    sync_s      the same in ``mode: sync``
    carried     queries that a step leaves to the next, the mean
    trained     queries that a step trains then, the mean; without, they are 32
    ratio       ``extra_s`` over ``plain_s``, each of them the mean over the seeds; ``sync_ratio``: over ``sync_s``
    query_ratio the same for each trained query: a step trains more of them then
    rounds      every seed's
    goals       the goal, and if it is met

Also: ``versions``, ``settings``.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from flexmarl.launch.bench import machine
from flexmarl.launch.bench.goals import Goal, judge
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.bench.result_tables import goals_table
from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.errors import BenchmarkFailed
from flexmarl.launch.simulate.simulation import simulate

_QUERIES: Final = 32
_RECIPE: Final = Path(__file__).parent / "tails_recipe"
_SYNC: Final = ("mode=sync", "max_staleness=null", "agent_defaults.algorithm.correction=none")
_GOALS: Final = (Goal("ratio", "seconds of a step over those without", 0.75, at_most=True),)


@dataclass(frozen=True, slots=True)
class Options:
    """``rounds``: seeds, from ``seed`` on. ``overrides``: of the recipe's config."""

    rounds: int = 3
    seed: int = 0
    extra: int = 16
    overrides: tuple[str, ...] = ()


def played(seed: int, *settings: str) -> tuple[float, float]:
    """Seconds of a step, and queries that it passes on, without the first step and the last."""
    config = resolve(str(_RECIPE), [f"seed={seed}", *settings])
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(config, Path(folder) / "run", seed)
        if run.result is None or run.result.last_step != config.training.steps:
            raise BenchmarkFailed(f"the run of seed {seed} ended before step {config.training.steps}")
        lines = [json.loads(line) for line in run.directory.metrics.read_text().splitlines()]
    seconds = (lines[-2]["time_s"] - lines[0]["time_s"]) / (len(lines) - 2)
    return seconds, fmean(line["carried_queries"] for line in lines[1:-1])


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
        plain_s, _ = played(seed, *options.overrides)
        sync_s, _ = played(seed, *_SYNC, *options.overrides)
        extra_s, carried = played(seed, f"rollout.extra_queries={options.extra}", *options.overrides)
        figures = {"plain_s": plain_s, "sync_s": sync_s, "extra_s": extra_s, "carried": carried}
        figures["trained"] = _QUERIES + options.extra - carried
        rounds.append({"seed": seed, **{key: rounded(value) for key, value in figures.items()}})
    means = {key: fmean(line[key] for line in rounds) for key in rounds[0] if key != "seed"}
    means["ratio"] = means["extra_s"] / means["plain_s"]
    means["sync_ratio"] = means["extra_s"] / means["sync_s"]
    means["query_ratio"] = means["ratio"] * _QUERIES / means["trained"]
    return {
        **{key: rounded(value) for key, value in means.items()},
        "rounds": rounds,
        "goals": [asdict(verdict) for verdict in judge(_GOALS, means)],
        "versions": machine.versions(),
        "settings": asdict(options),
    }


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the result as tables."""
    table = Table(
        "seed", "without", "sync", "with", "passed on", "trained", title="virtual seconds of a step"
    )
    for line in result["rounds"]:
        table.add_row(
            *(f"{line[key]:g}" for key in ("seed", "plain_s", "sync_s", "extra_s", "carried", "trained"))
        )
    console.print(table)
    console.print(goals_table("seconds of a step", result["goals"]))
