"""The slot ``sharing``: trajectories that each of four runs generates until they have learned, alone and together.

The task is that of the replay: 256 queries of 16 skills, difficulties from 2 to 8, so that one trajectory in fifty
succeeds at first. Four runs have tables of their own, and draw their queries in different orders. Each step a run
trains 16 groups of 8 trajectories; with sharing a quarter of them are groups of the others, as its ``SharedPool``
draws them. Their probabilities are those of the table that trains them, as text of another run has no other ones.
The keys:

    alone_rollouts   trajectories that a run generates until the mean probability of all runs' tables reaches ``target``
    rollouts         the same with sharing; ``steps``, ``alone_steps``: the optimizer steps
    ratio            the second over the first, each of them the mean over the seeds
    step_ratio       the same of the steps
    shared           groups of others that a run has trained
    rounds           every seed's

Also: ``versions``, ``settings``. Runs that do not reach the target count with all of their trajectories.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from statistics import fmean
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.bench.results import result_of
from flexmarl.launch.sharing.shared_group import SharedGroup
from flexmarl.launch.sharing.shared_pool import SharedPool
from flexmarl.launch.sharing.sharing_config import PeerConfig, SharingConfig

from .skill_table import QUERIES, SkillTable

_AGENT: Final = "solver"


@dataclass(frozen=True, slots=True)
class Options:
    """``rounds``: seeds, from ``seed`` on. ``share``: of a step's groups. ``lr``: of the tables."""

    rounds: int = 3
    seed: int = 0
    runs: int = 4
    share: float = 0.25
    queries_per_step: int = 16
    trajectories: int = 8
    lr: float = 0.5
    target: float = 0.5
    most_steps: int = 4000


class _Run:
    """One run of several, with a table of its own."""

    def __init__(self, options: Options, seed: int, number: int) -> None:
        self.table = SkillTable(seed, 2.0, 8.0)
        self._options, self._name = options, f"{seed} run {number}"
        self._random = Random(f"{self._name} rewards")
        peers = {f"r{other}": PeerConfig(file="") for other in range(options.runs) if other != number}
        config = SharingConfig(peers=peers, share=options.share)
        self.pool = SharedPool(config, options.queries_per_step, seed)
        self._estimator = CreditConfig(name="grpo").estimator
        self.generated = self.shared = 0

    def step(self, step: int, *, together: bool) -> list[SharedGroup]:
        """Trains a step. Returns the groups that it has generated."""
        foreign = [waiting.group for waiting in self.pool.take(step)] if together else []
        new = [self._generate(step) for _ in range(self._options.queries_per_step - len(foreign))]
        self.shared += len(foreign)
        slopes: dict[int, float] = {}
        for group in (*foreign, *new):
            number = int(group.lines[0]["turns"][0]["prompt"])
            slopes[number] = slopes.get(number, 0.0) + self._options.lr * self._slope(number, group)
        self.table.learn(slopes)
        return new

    def _generate(self, step: int) -> SharedGroup:
        epoch, place = divmod(self.generated, QUERIES)
        order = list(range(QUERIES))
        Random(f"{self._name} epoch {epoch}").shuffle(order)
        number, chance = order[place], self.table.chance(order[place])
        self.generated += 1
        lines = [
            {"turns": [{"prompt": str(number)}], "reward": {_AGENT: float(self._random.random() < chance)}}
            for _ in range(self._options.trajectories)
        ]
        return SharedGroup(self.generated, step, step, lines)

    def _slope(self, number: int, group: SharedGroup) -> float:
        """The gradient of the objective by the query's score: d log pi is 1 - p of a success, and -p of a failure."""
        chance, rewards = self.table.chance(number), [line["reward"][_AGENT] for line in group.lines]
        pairs = zip(self._estimator(rewards), rewards, strict=True)
        return fmean(advantage * (reward - chance) for advantage, reward in pairs)


def played(options: Options, seed: int, *, together: bool) -> dict[str, float]:
    """Trajectories and shared groups of a run, and the steps, until the target."""
    runs = [_Run(options, seed, number) for number in range(options.runs)]
    step = 0
    while fmean(run.table.mean_chance for run in runs) < options.target and step < options.most_steps:
        step += 1
        groups = [run.step(step, together=together) for run in runs]
        for number, run in enumerate(runs):
            for origin, of_origin in enumerate(groups):
                if together and origin != number:
                    for group in of_origin:
                        run.pool.add(f"r{origin}", group, step)
    rollouts = fmean(run.generated for run in runs) * options.trajectories
    return {"rollouts": rollouts, "steps": step, "shared": fmean(run.shared for run in runs)}


def of_rounds(seed: int, rounds: int, *, quick: bool) -> Callable[[Report], dict[str, Any]]:
    """The measurement of ``rounds`` seeds from ``seed`` on. ``quick``: of fewer steps."""
    return partial(measure, Options(seed=seed, rounds=rounds, most_steps=50 if quick else 4000))


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured."""
    rounds = []
    for seed in range(options.seed, options.seed + options.rounds):
        report(f"seed {seed}")
        alone, together = (played(options, seed, together=way) for way in (False, True))
        rounds.append(
            {
                "seed": seed, "alone_rollouts": alone["rollouts"], "rollouts": together["rollouts"],
                "alone_steps": alone["steps"], "steps": together["steps"], "shared": together["shared"],
            }
        )  # fmt: skip
    means = {key: fmean(line[key] for line in rounds) for key in rounds[0] if key != "seed"}
    means["ratio"] = means["rollouts"] / means["alone_rollouts"]
    means["step_ratio"] = means["steps"] / means["alone_steps"]
    lines = [{key: rounded(value) for key, value in line.items()} | {"seed": line["seed"]} for line in rounds]
    return result_of(options, means, rounds=lines)


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the result as a table."""
    table = Table("seed", "alone", "together", "ratio", "steps", title="trajectories that a run generates")
    for line in result["rounds"]:
        table.add_row(
            str(line["seed"]), f"{line['alone_rollouts']:g}", f"{line['rollouts']:g}",
            f"{line['rollouts'] / line['alone_rollouts']:.2f}", f"{line['alone_steps']:g}, {line['steps']:g}",
        )  # fmt: skip
    console.print(table)
