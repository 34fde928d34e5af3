"""Measures how many trajectories a replay saves where rewards are sparse, on a small task without a model.

The task is that of the query sources, with difficulties from 2 to 8: at the begin one trajectory in fifty solves its
query, so that most groups teach nothing. Groups that come again take the place of new ones, as in a run. Buffer, rules
and estimator are those of a run; the weight of a trajectory that comes again is that of ``correction: tis``, the ratio
of its probabilities now and when it was generated, 2 at most. The keys:

    plain_rollouts   trajectories that are generated until the mean probability over all queries reaches ``target``
    rollouts         the same with a replay; ``steps``, ``plain_steps``: the optimizer steps
    ratio            the second over the first, each of them the mean over the seeds
    age              the mean age of the groups that came again, in versions
    rounds           every seed's

A run that does not reach the target counts with all of its trajectories.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from random import Random
from statistics import fmean
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.messages import LoggedGroup, LoggedTrajectory, LoggedTurn, Query
from flexmarl.actors.names import AgentName, PolicyName, Version
from flexmarl.actors.orchestrator.replay.recent_replay import RecentReplayConfig
from flexmarl.actors.orchestrator.replay.replay_buffer import ReplayBuffer
from flexmarl.actors.orchestrator.replay.replay_options import ReplayOptions
from flexmarl.actors.orchestrator.replay.success_replay import SuccessReplayConfig
from flexmarl.launch.bench import machine
from flexmarl.launch.bench.goals import Goal, judge
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.bench.result_tables import goals_table

from .skill_table import QUERIES, SkillTable

SOLVER, MODEL = AgentName("solver"), PolicyName("model")
GOALS: Final = (Goal("ratio", "generated trajectories over those without a replay", 1.0, at_most=True),)
_MOST_WEIGHT: Final = 2.0


@dataclass(frozen=True, slots=True)
class Options:
    """``staleness``: most versions that a group which comes again may be old. ``lr``: of the table."""

    replay: ReplayOptions
    rounds: int = 3
    seed: int = 0
    staleness: int = 8
    queries_per_step: int = 16
    trajectories: int = 8
    lr: float = 0.5
    target: float = 0.5
    most_steps: int = 4000


@dataclass(frozen=True, slots=True)
class Learned:
    """``rollouts``: generated trajectories. ``ages``: of the groups that came again, in versions."""

    rollouts: int
    steps: int
    ages: list[int]


def learn(options: Options, seed: int, *, replays: bool) -> Learned:
    """Trains the table until ``target``."""
    table, random = SkillTable(seed, 2.0, 8.0), Random(f"{seed} rewards")
    buffer = ReplayBuffer(options.replay, options.staleness, {SOLVER: MODEL})
    position = rollouts = step = 0
    ages: list[int] = []
    while table.mean_chance < options.target and step < options.most_steps:
        step += 1
        again = buffer.take({MODEL: Version(step)}, options.queries_per_step) if replays else []
        ages += [step - group.oldest()[SOLVER] for group in again]
        new = []
        for _ in range(options.queries_per_step - len(again)):
            new.append(_generated(table, _query(seed, position), step, options.trajectories, random))
            position += 1
        rollouts += len(new) * options.trajectories
        slopes: dict[int, float] = {}
        for group in (*again, *new):
            number = group.query.data["number"]
            slopes[number] = slopes.get(number, 0.0) + options.lr * _slope(table.chance(number), group)
        table.learn(slopes)
        for group in new:
            buffer.closed(group)
    return Learned(rollouts, step, ages)


def _query(seed: int, position: int) -> Query:
    epoch, place = divmod(position, QUERIES)
    order = list(range(QUERIES))
    Random(f"{seed} epoch {epoch}").shuffle(order)
    return Query(f"q{position}", "", {"number": order[place]})


def _generated(table: SkillTable, query: Query, version: int, count: int, random: Random) -> LoggedGroup:
    chance = table.chance(query.data["number"])
    trajectories = []
    for _ in range(count):
        solved = random.random() < chance
        logprob = math.log(chance if solved else 1.0 - chance)
        turn = LoggedTurn(SOLVER, [], "", (0,), (int(solved),), (logprob,), 1.0, Version(version))
        trajectories.append(LoggedTrajectory([turn], {SOLVER: float(solved)}))
    return LoggedGroup(query, trajectories)


def _slope(chance: float, group: LoggedGroup) -> float:
    """The gradient of the objective by the query's score: d log pi is 1 - p of a success, and -p of a failure."""
    rewards = [trajectory.rewards[SOLVER] for trajectory in group.trajectories]
    slopes = []
    for trajectory, advantage in zip(
        group.trajectories, CreditConfig(name="grpo").estimator(rewards), strict=True
    ):
        (turn,), reward = trajectory.turns, trajectory.rewards[SOLVER]
        now = math.log(chance if reward else 1.0 - chance)
        weight = min(math.exp(now - turn.logprobs[0]), _MOST_WEIGHT)
        slopes.append(weight * advantage * (reward - chance))
    return fmean(slopes)


def of_recent(seed: int, rounds: int, *, quick: bool) -> Callable[[Report], dict[str, Any]]:
    """The measurement of the replay ``recent``, of ``rounds`` seeds from ``seed`` on; ``quick``: of fewer steps."""
    return _of(RecentReplayConfig(share=0.25), seed, rounds, quick=quick)


def of_successes(seed: int, rounds: int, *, quick: bool) -> Callable[[Report], dict[str, Any]]:
    """The same of the replay ``successes``."""
    return _of(SuccessReplayConfig(share=0.25, times=4), seed, rounds, quick=quick)


def _of(replay: ReplayOptions, seed: int, rounds: int, *, quick: bool) -> Callable[[Report], dict[str, Any]]:
    options = Options(replay, seed=seed, rounds=rounds)
    return partial(measure, replace(options, most_steps=50) if quick else options)


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured."""
    rounds = []
    for seed in range(options.seed, options.seed + options.rounds):
        report(f"seed {seed}")
        plain, again = (learn(options, seed, replays=replays) for replays in (False, True))
        rounds.append(
            {
                "seed": seed,
                "plain_rollouts": plain.rollouts,
                "rollouts": again.rollouts,
                "plain_steps": plain.steps,
                "steps": again.steps,
                "ratio": again.rollouts / plain.rollouts,
                "age": fmean(again.ages) if again.ages else 0.0,
            }
        )
    figures = {key: fmean(each[key] for each in rounds) for key in rounds[0] if key != "seed"}
    figures["ratio"] = figures["rollouts"] / figures["plain_rollouts"]
    return {
        **{key: rounded(value) for key, value in figures.items()},
        "rounds": [{key: rounded(value) for key, value in each.items()} for each in rounds],
        "goals": [asdict(verdict) for verdict in judge(GOALS, figures)],
        "versions": machine.versions(),
        "settings": {
            **asdict(replace(options, replay=ReplayOptions())),
            "replay": options.replay.model_dump(),
        },
    }


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the result as tables."""
    table = Table("seed", "plain", "with replay", "ratio", "steps", "age", title="generated trajectories")
    for each in result["rounds"]:
        row = (each["seed"], each["plain_rollouts"], each["rollouts"])
        steps = f"{each['plain_steps']:.0f}, {each['steps']:.0f}"
        table.add_row(
            *(f"{number:.0f}" for number in row), f"{each['ratio']:.2f}", steps, f"{each['age']:.1f}"
        )
    console.print(table)
    console.print(goals_table("a replay", result["goals"]))
