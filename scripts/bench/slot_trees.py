"""The slots of ``rollout.tree``: trees beside trajectories of one line, at equal tokens, on plan-path's tables.

``tree`` is AT-GRPO with ``branch: greedy``, four candidates of each prompt in two trajectories of a query; beside
AT-GRPO with eight trajectories of one line. ``echo`` is the same with ``branch: entropy``, and ``trace`` with
``branch: predicted``. They are paid for each turn.
``echo_arrival`` and ``trace_arrival`` are GRPO, paid at the end of a walk alone, 1 at the goal: on a small grid, where
single lines learn too. There a query has one tree, of eight lines at most or in the mean over all trees of a step.
Tokens are all that were generated, also of candidates that were cut. The keys:

    flat_tokens, tokens   until the greedy success on 300 other problems was first ``target``, without and with trees
    ratio                 the second over the first, each of them the mean over the seeds
    flat_success, success   at the end of the budget
    flat_mean, mean       the mean of the curve: success over all of the budget's tokens
    gain                  the second over the first
    rounds                every seed's, with the curves: pairs of tokens and success
    goals                 if the slot has one: if it is met

Also: ``versions``, ``settings``. A run that does not reach the target counts with all of its tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.environments.environment import Environment
from flexmarl.actors.trees.branch_rule import BranchRule
from flexmarl.actors.trees.entropy import EntropyRule
from flexmarl.actors.trees.greedy import GreedyRule
from flexmarl.actors.trees.predicted import PredictedRule
from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.bench.measure import Report
from flexmarl.launch.bench.result_tables import goals_table
from flexmarl.launch.bench.results import result_of
from flexmarl.launch.recipes.plan_path.workflow import PlanPath

from .tree_tables import Arm, ArrivalPaid, Settings, runs_of

_TURNS: Final = CreditConfig(name="at_grpo", rewards="turn")
_TOKENS: Final = Goal("ratio", "tokens over those of single lines", 0.8, at_most=True)


@dataclass(frozen=True, slots=True)
class Task:
    """``trees``: of a query, in place of eight lines."""

    rule: BranchRule
    goal: Goal = _TOKENS
    environment: type[Environment] = PlanPath
    credit: CreditConfig = _TURNS
    trees: int = 2
    learning: Settings = field(default_factory=Settings)


def _arrival(rule: BranchRule) -> Task:
    learning = Settings(side=3, walls=1, rounds=5, every=1_000)
    return Task(rule, environment=ArrivalPaid, credit=CreditConfig(name="grpo"), trees=1, learning=learning)


TASKS: Final[Mapping[str, Task]] = {
    "tree": Task(
        GreedyRule(width=4),
        Goal("gain", "mean success over that of single lines, at equal tokens", 1.0, at_most=False),
    ),
    "echo": Task(EntropyRule(width=4, lines=4)),
    "trace": Task(PredictedRule(width=3, lines=4)),
    "echo_arrival": _arrival(EntropyRule(width=8, lines=8)),
    "trace_arrival": _arrival(PredictedRule(width=8, lines=16, mean_lines=8.0)),
}


@dataclass(frozen=True, slots=True)
class Options:
    """``rounds``: seeds, from ``seed`` on."""

    name: str = "tree"
    rounds: int = 3
    seed: int = 0
    target: float = 0.8
    learning: Settings = field(default_factory=Settings)


def of_rounds(name: str, seed: int, rounds: int, *, quick: bool) -> Callable[[Report], dict[str, Any]]:
    """The measurement of ``rounds`` seeds from ``seed`` on. ``quick`` changes nothing but their number."""
    options = Options(name=name, seed=seed, rounds=rounds, learning=TASKS[name].learning)
    return partial(measure, options)


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured."""
    task = TASKS[options.name]
    arms = [
        Arm(task.environment, task.credit, 8),
        Arm(task.environment, task.credit, task.trees, task.rule),
    ]
    rounds: list[dict[str, Any]] = []
    for seed in range(options.seed, options.seed + options.rounds):
        report(f"seed {seed}")
        flat, tree = runs_of(arms, options.learning, seed)
        rounds.append(
            {
                "seed": seed,
                "flat_tokens": flat.tokens_to(options.target),
                "tokens": tree.tokens_to(options.target),
                "flat_success": flat.curve[-1][1],
                "success": tree.curve[-1][1],
                "flat_mean": fmean(success for _, success in flat.curve),
                "mean": fmean(success for _, success in tree.curve),
                "flat_curve": flat.curve,
                "curve": tree.curve,
            }
        )
    keys = ("flat_tokens", "tokens", "flat_success", "success", "flat_mean", "mean")
    figures = {key: fmean(line[key] for line in rounds) for key in keys}
    figures["ratio"] = figures["tokens"] / figures["flat_tokens"]
    figures["gain"] = figures["mean"] / figures["flat_mean"]
    return result_of(options, figures, (task.goal,), rounds=rounds)


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the result as tables."""
    table = Table("seed", "lines", "trees", "ratio", "success of both", title="tokens to the target")
    for line in result["rounds"]:
        success = f"{line['flat_success']:.2f}, {line['success']:.2f}"
        ratio = f"{line['tokens'] / line['flat_tokens']:.2f}"
        table.add_row(str(line["seed"]), str(line["flat_tokens"]), str(line["tokens"]), ratio, success)
    console.print(table)
    console.print(goals_table("tokens", result["goals"]))
