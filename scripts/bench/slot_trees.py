"""The slots of ``rollout.tree``: trees beside trajectories of one line, at equal tokens, on plan-path's tables.

``tree`` is AT-GRPO with ``branch: greedy``, four candidates of each prompt in two trajectories of a query; beside
AT-GRPO with eight trajectories of one line. ``echo`` is the same with ``branch: entropy``, and ``trace`` with
``branch: predicted``. They are paid for each turn.
``trace_arrival`` is GRPO with ``branch: predicted``, paid at the end of a walk alone, 1 at the goal.
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
from dataclasses import asdict, dataclass, field
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
from flexmarl.launch.bench import machine
from flexmarl.launch.bench.goals import Goal, judge
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.bench.result_tables import goals_table
from flexmarl.launch.recipes.plan_path.workflow import PlanPath

from .tree_tables import Arm, ArrivalPaid, Settings, runs_of

RULES: Final[Mapping[str, BranchRule]] = {
    "tree": GreedyRule(width=4),
    "echo": EntropyRule(width=4, lines=4),
    "trace": PredictedRule(width=3, lines=4),
    "trace_arrival": PredictedRule(width=3, lines=4),
}
GOALS: Final[Mapping[str, tuple[Goal, ...]]] = {
    "tree": (Goal("gain", "mean success over that of single lines, at equal tokens", 1.0, at_most=False),),
    "echo": (Goal("ratio", "tokens over those of single lines", 0.8, at_most=True),),
    "trace": (Goal("ratio", "tokens over those of single lines", 0.8, at_most=True),),
    "trace_arrival": (
        Goal("gain", "mean success over that of single lines, at equal tokens", 1.0, at_most=False),
    ),
}
_TURNS: Final = (PlanPath, CreditConfig(name="at_grpo", rewards="turn"))
_AT_THE_END: Final = (ArrivalPaid, CreditConfig(name="grpo"))
PAID: Final[Mapping[str, tuple[type[Environment], CreditConfig]]] = {
    "tree": _TURNS,
    "echo": _TURNS,
    "trace": _TURNS,
    "trace_arrival": _AT_THE_END,
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
    return partial(measure, Options(name=name, seed=seed, rounds=rounds))


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured."""
    environment, credit = PAID[options.name]
    arms = [Arm(environment, credit, 8), Arm(environment, credit, 2, RULES[options.name])]
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
    return {
        **{key: rounded(value) for key, value in figures.items()},
        "rounds": rounds,
        "goals": [asdict(verdict) for verdict in judge(GOALS[options.name], figures)],
        "versions": machine.versions(),
        "settings": asdict(options),
    }


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the result as tables."""
    table = Table("seed", "lines", "trees", "ratio", "success of both", title="tokens to the target")
    for line in result["rounds"]:
        success = f"{line['flat_success']:.2f}, {line['success']:.2f}"
        ratio = f"{line['tokens'] / line['flat_tokens']:.2f}"
        table.add_row(str(line["seed"]), str(line["flat_tokens"]), str(line["tokens"]), ratio, success)
    console.print(table)
    console.print(goals_table("tokens", result["goals"]))
