"""Measures the gain of sharing slots between policies, in virtual time.

Steps of training in virtual time on the pool that trains runs; computations and copies of states only take time. The
load is that of ``pool_load``: the paper's mixes of policies, on a third of the slots that they need all at once. A
result depends on the seed alone. The keys of each of ``mixes``:

    static_s        seconds of a step, each policy with slots of its own: the best numbers, fixed for all steps. With
                    fewer slots than ranks, a policy takes so many times as long; memory is not limited
    shared_s        the best fixed groups of policies that share slots; all states stay in memory, swaps cost nothing
    pool_s          the pool: each policy with all its ranks, on any slots; swaps take their time
    lower_bound_s   no schedule is shorter: the longest policy alone, or all work that is not ready before a moment, on
                    all slots
    least_of_static  lower_bound_s / static_s: no schedule has a smaller pool_s / static_s
    swap_share      share of the slots' time in which a state moved and the slot computed nothing

All are means over the seeds; ``rounds`` has every seed's, with ``suspensions`` per step, ``best_partition`` and
``best_groups``. Both fixed divisions are chosen in hindsight, over all steps of their seed.

``turns``: three policies take turns on one slot, each computing for a second; a swap takes 0.2 s. ``swap_share``, and
``without_prefetch`` if the slot has memory for one state.

Also: ``goals``, ``versions``, ``settings``.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from random import Random
from statistics import fmean
from typing import Any, Final

import click
from rich.console import Console
from rich.text import Text

from flexmarl.actors.names import PolicyName
from flexmarl.actors.trainer.pool.slot_choice import AllocatorConfig
from flexmarl.launch.bench import machine
from flexmarl.launch.bench.command import common_options, run_benchmark
from flexmarl.launch.bench.goals import Goal, judge
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.bench.result_tables import goals_table
from flexmarl.launch.monitoring.formatting import compact

from .pool_divisions import best_partition, best_sharing
from .pool_load import Computation, Mix, PolicyCost, StepLoad, draw_step, lower_bound_s, mixes
from .pool_run import StepFigures, run_steps

_TURNS: Final = 20
_TURN = Computation(0.0, 1.0, follows=True)
_TURN_COST: Final = PolicyCost(ranks=1, sample_s=0.0, step_s=0.0, load_s=0.1, save_s=0.1, connect_s=0.0)

GOALS = (
    Goal("pool_s", "a step on the pool, s", 0.6, at_most=True, bare="static_s", bare_words="static"),
    Goal("pool_s", "a step on the pool, s", 1.15, at_most=True, bare="lower_bound_s", bare_words="bound"),
    Goal("pool_s", "a step on the pool, s", 1.0, at_most=True, bare="shared_s", bare_words="shared"),
)
TURN_GOALS = (Goal("swap_share", "time lost to swaps, share", 0.1, at_most=True),)


@dataclass(frozen=True, slots=True)
class Options:
    """``rounds``: seeds, from ``seed`` on. ``steps``: of each. ``searched``: groups of policies that are tried."""

    rounds: int = 3
    steps: int = 8
    seed: int = 2048
    searched: int = 60


def parts(options: Options) -> int:
    """The number of calls of ``report`` that ``measure`` makes."""
    return options.rounds * len(mixes()) + 1


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured."""
    report("three policies on one slot")
    turns = {"swap_share": _turns_share(2), "without_prefetch": _turns_share(1)}
    return {
        "mixes": {name: _mix_figures(name, mix, options, report) for name, mix in mixes().items()},
        "turns": {key: rounded(value) for key, value in turns.items()},
        "goals": [asdict(verdict) for verdict in judge(TURN_GOALS, turns)],
        "versions": machine.versions(),
        "settings": asdict(options),
    }


def tables(console: Console, result: Mapping[str, Any]) -> None:
    for name, figures in result["mixes"].items():
        title = f"{name}: {figures['slots']} slots, {figures['ranks']} ranks"
        console.print(goals_table(title, figures["goals"], "static, bound, shared"))
        swaps = f"{figures['suspensions']:.1f} suspensions per step"
        console.print(Text(f"{swaps}, {100 * figures['swap_share']:.1f} % of the slots' time lost to swaps"))
    console.print(goals_table("three policies in turns on one slot", result["goals"]))
    console.print(Text(f"with memory for one state: {compact(result['turns']['without_prefetch'])}"))


def _mix_figures(name: str, mix: Mix, options: Options, report: Report) -> dict[str, Any]:
    rounds = []
    for seed in range(options.seed, options.seed + options.rounds):
        report(f"{name}, seed {seed}")
        random = Random(f"{name} {seed}")
        loads = [draw_step(mix.costs, random) for _ in range(options.steps)]
        rounds.append({"seed": seed, **_round_figures(mix, loads, options.searched)})
    keys = ("static_s", "shared_s", "pool_s", "lower_bound_s", "swap_share", "suspensions")
    means = {key: fmean(figures[key] for figures in rounds) for key in keys}
    return {
        **_rounded(means),
        "least_of_static": rounded(means["lower_bound_s"] / means["static_s"]),
        "policies": len(mix.costs),
        "ranks": sum(cost.ranks for cost in mix.costs.values()),
        "slots": mix.slots,
        "rounds": [_rounded(figures) for figures in rounds],
        "goals": [asdict(verdict) for verdict in judge(GOALS, means)],
    }


def _round_figures(mix: Mix, loads: list[StepLoad], searched: int) -> dict[str, Any]:
    steps = run_steps(mix.costs, mix.slots, loads)
    static_s, partition = best_partition(mix, loads)
    shared_s, groups = best_sharing(mix, loads, searched)
    return {
        "static_s": static_s,
        "shared_s": shared_s,
        "pool_s": fmean(step.step_s for step in steps),
        "lower_bound_s": fmean(lower_bound_s(load, mix.costs, mix.slots) for load in loads),
        "swap_share": _swap_share(steps, mix.slots),
        "suspensions": fmean(step.suspensions for step in steps),
        "best_partition": partition,
        "best_groups": [sorted(group) for group in groups],
    }


def _swap_share(steps: list[StepFigures], slots: int) -> float:
    return sum(step.lost_s for step in steps) / sum(step.step_s * slots for step in steps)


def _turns_share(states_per_slot: int) -> float:
    costs = {PolicyName(name): _TURN_COST for name in "abc"}
    first = Computation(0.0, _TURN.seconds)
    load = {policy: [first, *[_TURN] * (_TURNS - 1)] for policy in costs}
    return _swap_share(run_steps(costs, 1, [load], AllocatorConfig(states_per_slot=states_per_slot)), 1)


def _rounded(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {key: rounded(value) if isinstance(value, float) else value for key, value in figures.items()}


@click.command()
@click.option("--steps", type=click.IntRange(1), help="Steps of each round. Default: 8, 3 with --quick.")
@click.option("--seed", type=click.IntRange(0), default=2048, show_default=True, help="The first seed.")
@common_options(rounds=3, quick_time="a few seconds")
def pool(as_json: bool, rounds: int | None, steps: int | None, seed: int, quick: bool) -> int:
    """Measure what it gains to share slots between policies: steps of training in virtual time, on a third of the slots
    that 5, 10 or 15 policies need all at once.

    Compared with slots divided over the policies once and for all, and with a lower bound. Also the time that swaps
    cost. Each round has a seed of its own; the figures depend on nothing else.

    \b
    Examples:
      scripts/bench/run pool
      scripts/bench/run pool --json > pool.json
      scripts/bench/run pool --steps 16 --seed 7

    Progress is on standard error; ctrl-C stops it.
    """
    options = Options(
        rounds=rounds or (1 if quick else 3),
        steps=steps or (3 if quick else 8),
        seed=seed,
        searched=8 if quick else 60,
    )
    return run_benchmark(partial(measure, options), parts(options), tables, as_json)
