"""The slot ``rollout.demonstrations``: trajectories along an expert's, beside others, at equal tokens, on plan-path's
tables.

The expert walks the shortest way, by breadth-first search; its planner names the next step. A plan agrees with its own
if both have the same first free direction. All arms have eight trajectories of a query, and are paid as follows:

    online      at the end of the walk, 1 at the goal: trajectories without demonstrations
    unpatched   by their agreement, and end at the first departure: ``{patch: threshold, most: 0}``
    patched     by their agreement: ``{patch: threshold, most: 2}``, or ``{patch: chance, chance: 0.5}``

Tokens are all that were generated; recorded actions do not count. The keys:

    tokens, unpatched_tokens, online_tokens   until the greedy success on 300 other problems was first ``target``
    ratio                                     the first over the second, each of them the mean over the seeds
    online_ratio                              the first over the third
    success, unpatched_success, online_success   at the end of the budget
    mean, unpatched_mean, online_mean         the mean of the curve: success over all of the budget's tokens
    gain, online_gain                         the first over the second, and over the third
    rounds                                    every seed's, with the curves: pairs of tokens and success
    goals                                     the goal of the slot, and if it is met

Also: ``versions``, ``settings``. A run that does not reach the target counts with all of its tokens.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.demonstrations.chance import ChanceRule
from flexmarl.actors.demonstrations.demonstration import Demonstration
from flexmarl.actors.demonstrations.patch_rule import PatchRule
from flexmarl.actors.demonstrations.threshold import ThresholdRule
from flexmarl.actors.messages import Query
from flexmarl.actors.workflow import Turn
from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.bench.measure import Report
from flexmarl.launch.bench.result_tables import goals_table
from flexmarl.launch.bench.results import result_of
from flexmarl.launch.recipes.plan_path.workflow import DIRECTIONS, Grid, Place, PlanPath

from .tree_tables import Arm, ArrivalPaid, Settings, runs_of

_FILE: Final = "expert"
RULES: Final[Mapping[str, PatchRule]] = {
    "demonstrations": ThresholdRule(file=_FILE, most=2),
    "demonstrations_chance": ChanceRule(file=_FILE, chance=0.5),
}
GOALS: Final = (Goal("gain", "mean success over that without patches, at equal tokens", 1.0, at_most=False),)
_BOTH: Final = CreditConfig(name="at_grpo")


class GuidedPath(PlanPath):
    """Walks in which a plan agrees with a recorded one by the step that it leads to."""

    def agrees(self, turn: Turn, action: str) -> bool:
        if turn.agent == "executor":
            return turn.text == action
        return self._first_free(turn.text) == self._first_free(action)

    def _first_free(self, plan: str) -> str:
        return next(
            (step for step in plan if self.grid.after(self.place, step, self.before) != self.place), ""
        )


def demonstration_of(query: Query) -> Demonstration:
    """The expert's walk: plans of the next step and one across, and the steps."""
    data = query.data
    steps = shortest_way(Grid(data["side"], data["walls"]), tuple(data["start"]), tuple(data["goal"]))
    plans = tuple(step + ("L" if step in "UD" else "U") for step in steps)
    return Demonstration({"planner": plans, "executor": steps}, "the expert")


def shortest_way(grid: Grid, start: Place, goal: Place) -> tuple[str, ...]:
    """The steps of a shortest way, the first in the order of ``DIRECTIONS``. Raises KeyError if there is none."""
    came: dict[Place, tuple[Place, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        place = queue.popleft()
        for step in DIRECTIONS:
            if (neighbour := grid.after(place, step)) not in came:
                came[neighbour] = (place, step)
                queue.append(neighbour)
    steps: list[str] = []
    link = came[goal]
    while link is not None:
        place, step = link
        steps.append(step)
        link = came[place]
    return tuple(reversed(steps))


@dataclass(frozen=True, slots=True)
class Options:
    """``rounds``: seeds, from ``seed`` on."""

    name: str = "demonstrations"
    rounds: int = 3
    seed: int = 0
    target: float = 0.8
    learning: Settings = field(default_factory=Settings)


def arms_of(name: str) -> dict[str, Arm]:
    """The arms of an experiment, by their names."""
    unpatched = ThresholdRule(file=_FILE, most=0)
    return {
        "online": Arm(ArrivalPaid, _BOTH, 8),
        "unpatched": Arm(GuidedPath, _BOTH, 8, patch=unpatched, expert=demonstration_of),
        "patched": Arm(GuidedPath, _BOTH, 8, patch=RULES[name], expert=demonstration_of),
    }


def of_rounds(name: str, seed: int, rounds: int, *, quick: bool) -> Callable[[Report], dict[str, Any]]:
    """The measurement of ``rounds`` seeds from ``seed`` on. ``quick`` changes nothing but their number."""
    return partial(measure, Options(name=name, seed=seed, rounds=rounds))


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured."""
    arms = arms_of(options.name)
    rounds: list[dict[str, Any]] = []
    for seed in range(options.seed, options.seed + options.rounds):
        report(f"seed {seed}")
        line: dict[str, Any] = {"seed": seed}
        for name, run in zip(arms, runs_of([*arms.values()], options.learning, seed), strict=True):
            prefix = "" if name == "patched" else f"{name}_"
            line[f"{prefix}tokens"] = run.tokens_to(options.target)
            line[f"{prefix}success"] = run.curve[-1][1]
            line[f"{prefix}mean"] = fmean(success for _, success in run.curve)
            line[f"{prefix}curve"] = run.curve
        rounds.append(line)
    keys = [key for key in rounds[0] if key != "seed" and not key.endswith("curve")]
    figures = {key: fmean(line[key] for line in rounds) for key in keys}
    figures["ratio"] = figures["tokens"] / figures["unpatched_tokens"]
    figures["online_ratio"] = figures["tokens"] / figures["online_tokens"]
    figures["gain"] = figures["mean"] / figures["unpatched_mean"]
    figures["online_gain"] = figures["mean"] / figures["online_mean"]
    return result_of(options, figures, GOALS, rounds=rounds)


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the result as tables."""
    arms = ("online_", "unpatched_", "")
    table = Table("seed", "online", "unpatched", "patched", "mean success", title="tokens to the target")
    for line in result["rounds"]:
        means = ", ".join(f"{line[f'{arm}mean']:.2f}" for arm in arms)
        table.add_row(str(line["seed"]), *(str(line[f"{arm}tokens"]) for arm in arms), means)
    console.print(table)
    console.print(goals_table("success", result["goals"]))
