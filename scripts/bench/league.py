"""Measures what a league gains over self-play, in two zero-sum games whose exploitability is computed exactly.

The policy is a table of logits, one for each situation; it learns by the policy gradient, with the advantages of
Dr. GRPO. The pool, its pay-off matrix and its rules are those of a run. Three ways, with as many steps and games each:

    self_play          against itself as it is
    league             rule ``nash``; the result is the Nash mixture of the pool's members
    league_exploiters  the same, and a second table that plays against the newest version joins the pool; it has half of
                       the games

A result is a mixture of versions, drawn again for each game. Its exploitability is the gain of the best opponents above
the value of the game, on average over both players. The keys, by game, each of them a mean over the seeds:

    self_play, league, league_exploiters   exploitability after ``steps`` steps
    self_play_mean     that of all versions of self-play, drawn evenly: the worth of its history without pay-offs
    league_last        that of the league's newest version alone
    held_out           the mean win of the league's mixture over self-play's last versions with other seeds, which it
                       has not met; ``self_play_held_out``: of self-play's last version over the same
    ratio, ratio_exploiters   ``league`` and ``league_exploiters`` over ``self_play``
    rounds             every seed's

A test of the slot ``pool_of.rule``; real models learn the same game in the recipe kuhn-poker.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from random import Random
from statistics import fmean
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from flexmarl.actors.credit.credit_config import CreditConfig
from flexmarl.actors.names import PolicyName, Step, Version
from flexmarl.actors.orchestrator.opponents.meta_game import meta_game, mixture
from flexmarl.actors.orchestrator.opponents.past_pool import Game, PastPool
from flexmarl.actors.orchestrator.opponents.rules import draw_member, nash
from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.bench.result_tables import goals_table
from flexmarl.launch.bench.results import result_of
from flexmarl.launch.recipes.kuhn_poker import workflow as kuhn

PLAYER, SPY, RIVAL = PolicyName("player"), PolicyName("spy"), PolicyName("rival")
GOALS: Final = (
    Goal(
        "kuhn_ratio_exploiters",
        "with exploiters, exploitability in Kuhn poker over self-play's",
        1.0,
        at_most=True,
    ),
    Goal("circle_ratio_exploiters", "the same in the matrix game", 1.0, at_most=True),
)
Strategy = Mapping[str, Sequence[float]]
"""The probability of each action, by situation."""
Mixture = Sequence[tuple[float, Strategy]]
"""Strategies, each with its probability."""


@dataclass(frozen=True, slots=True)
class Options:
    """``every``, ``size``: of the pool. ``groups``: of a step, of ``trajectories`` games each. ``matches``: games of a
    new version against each member."""

    rounds: int = 3
    seed: int = 0
    steps: int = 400
    groups: int = 24
    trajectories: int = 16
    lr: float = 8.0
    every: int = 20
    size: int = 64
    matches: int = 48


@dataclass(frozen=True, slots=True)
class GameRules:
    """A zero-sum game of two players. ``situations``: with their actions. ``starts``: what chance may begin with, and
    the seat of the policy. ``play``: the win of the policy, its actions by situation. ``exploitability``: of a mixture.
    ``value``: the mean win of one strategy over another, over both seats."""

    situations: Mapping[str, int]
    starts: Sequence[Any]
    play: Callable[[Any, Strategy, Strategy, Random], tuple[float, list[tuple[str, int]]]]
    exploitability: Callable[[Mixture], float]
    value: Callable[[Strategy, Strategy], float]


# --------------------------------------------------------------------------- Kuhn poker


def _play_kuhn(
    start: Any, one: Strategy, other: Strategy, random: Random
) -> tuple[float, list[tuple[str, int]]]:
    deal, seat = start
    sides = (one, other) if seat == "first" else (other, one)
    history, taken = "", []
    while history not in kuhn.ENDS:
        turn = len(history) % 2
        situation = deal[turn] + history
        action = _drawn(sides[turn][situation], random)
        if sides[turn] is one and (turn == 0) == (seat == "first"):
            taken.append((situation, action))
        history += "pb"[action]
    won = float(kuhn.payoff(deal, history))
    return (won if seat == "first" else -won), taken


@cache
def _kuhn_plans(first: bool) -> list[Mapping[str, float]]:
    return kuhn.plans(kuhn.FIRST if first else kuhn.SECOND)


def _kuhn_exploitability(strategies: Mixture) -> float:
    """By all 64 plans of an opponent, as in the recipe, here against a mixture: its value is linear in the weights."""
    bets = [(weight, _bets(strategy)) for weight, strategy in strategies if weight > 0]
    first = max(sum(w * kuhn.value(plan, s) for w, s in bets) for plan in _kuhn_plans(True))
    second = max(sum(-w * kuhn.value(s, plan) for w, s in bets) for plan in _kuhn_plans(False))
    return (first + second) / 2


def _bets(strategy: Strategy) -> dict[str, float]:
    return {situation: shares[1] for situation, shares in strategy.items()}


def _kuhn_value(one: Strategy, other: Strategy) -> float:
    bets, against = _bets(one), _bets(other)
    return (kuhn.value(bets, against) - kuhn.value(against, bets)) / 2


# --------------------------------------------------------------------------- rock, paper, scissors

# The win of an action over that of the column; the equilibrium is 1/3, 1/6 and 1/2.
_CIRCLE: Final = ((0, -3, 1), (3, 0, -2), (-1, 2, 0))


def _play_circle(
    start: Any, one: Strategy, other: Strategy, random: Random
) -> tuple[float, list[tuple[str, int]]]:
    action, against = _drawn(one[""], random), _drawn(other[""], random)
    return float(_CIRCLE[action][against]), [("", action)]


def _circle_exploitability(strategies: Mixture) -> float:
    shares = [sum(weight * strategy[""][action] for weight, strategy in strategies) for action in range(3)]
    return max(sum(a * b for a, b in zip(row, shares, strict=True)) for row in _CIRCLE)


def _circle_value(one: Strategy, other: Strategy) -> float:
    return sum(_CIRCLE[a][b] * one[""][a] * other[""][b] for a, b in product(range(3), repeat=2))


GAMES: Final[Mapping[str, GameRules]] = {
    "kuhn": GameRules(
        dict.fromkeys(kuhn.FIRST + kuhn.SECOND, 2),
        [*product(kuhn.DEALS, ("first", "second"))],
        _play_kuhn,
        _kuhn_exploitability,
        _kuhn_value,
    ),
    "circle": GameRules({"": 3}, [None], _play_circle, _circle_exploitability, _circle_value),
}


# --------------------------------------------------------------------------- learning


def _drawn(shares: Sequence[float], random: Random) -> int:
    return random.choices(range(len(shares)), shares)[0]


@dataclass(slots=True)
class LogitTable:
    """A policy: a logit for each action of each situation. It begins away from even play, as a model does."""

    rules: GameRules
    random: Random
    logits: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.logits = {
            name: [self.random.gauss(0.0, 1.0) for _ in range(count)]
            for name, count in self.rules.situations.items()
        }

    def strategy(self) -> dict[str, list[float]]:
        shares = {name: [math.exp(logit) for logit in logits] for name, logits in self.logits.items()}
        return {name: [share / sum(all_of) for share in all_of] for name, all_of in shares.items()}

    def learn(self, opponent: Strategy, options: Options, groups: int) -> list[Game]:
        """One step of ``groups`` groups against ``opponent``; returns its games."""
        estimator = CreditConfig(name="dr_grpo").estimator
        strategy, games = self.strategy(), []
        slopes = {name: [0.0] * len(logits) for name, logits in self.logits.items()}
        scale = options.lr / (groups * options.trajectories)
        for number in range(groups):
            start = self.rules.starts[number % len(self.rules.starts)]
            played = [
                self.rules.play(start, strategy, opponent, self.random) for _ in range(options.trajectories)
            ]
            rewards = [won for won, _ in played]
            games += [Game(won, -won) for won in rewards]
            for advantage, (_, taken) in zip(estimator(rewards), played, strict=True):
                for situation, action in taken:
                    for other, share in enumerate(strategy[situation]):
                        slopes[situation][other] += scale * advantage * ((other == action) - share)
        for name, slope in slopes.items():
            self.logits[name] = [
                logit + change for logit, change in zip(self.logits[name], slope, strict=True)
            ]
        return games


def self_play(rules: GameRules, options: Options, seed: int) -> list[Strategy]:
    """All versions of a policy that plays against itself, the last one behind the others."""
    player = LogitTable(rules, Random(f"{seed} player"))
    versions: list[Strategy] = [player.strategy()]
    for _ in range(options.steps):
        player.learn(versions[-1], options, options.groups)
        versions.append(player.strategy())
    return versions


def league(rules: GameRules, options: Options, seed: int, *, exploiters: bool) -> tuple[Mixture, Strategy]:
    """The Nash mixture of a league's members, and the newest version of its policy. The pay-offs are those of matches,
    as at the evaluations of a run."""
    player, spy = LogitTable(rules, Random(f"{seed} player")), LogitTable(rules, Random(f"{seed} spy"))
    pool, strategies, random = PastPool(), dict[str, Strategy](), Random(f"{seed} matches")
    groups = options.groups // 2 if exploiters else options.groups
    for step in range(options.steps + 1):
        if step % options.every == 0:
            for policy, table in ((SPY, spy), (PLAYER, player))[not exploiters :]:
                pool.add(policy, Step(step), Version(step), options.size)
                strategies[pool.members[-1].name] = table.strategy()
            for member in pool.members[:-1]:
                pool.play(member)
                pool.count(_matches(rules, options, strategies, pool, random), PLAYER)
        member = draw_member(partial(nash, explore=0.0), pool, PLAYER, seed, RIVAL, Step(step + 1))
        pool.play(member)
        if step < options.steps:
            newest = player.strategy()
            player.learn(strategies[member.name], options, groups)
            if exploiters:
                spy.learn(newest, options, groups)
    weights = mixture(meta_game(pool.members, pool.payoffs))
    members = [strategies[member.name] for member in pool.members]
    return [*zip(weights, members, strict=True)], player.strategy()


def _matches(
    rules: GameRules, options: Options, strategies: Mapping[str, Strategy], pool: PastPool, random: Random
) -> list[Game]:
    """The games of the newest version against the member that plays."""
    newest, member = strategies[pool.members[-1].name], strategies[pool.member]
    starts = [rules.starts[number % len(rules.starts)] for number in range(options.matches)]
    rewards = [rules.play(start, newest, member, random)[0] for start in starts]
    return [Game(reward, -reward) for reward in rewards]


# --------------------------------------------------------------------------- the measurement


def of_rounds(seed: int, rounds: int, *, quick: bool) -> Callable[[Report], dict[str, Any]]:
    """The measurement of ``rounds`` seeds from ``seed`` on; ``quick``: of fewer steps."""
    options = Options(seed=seed, rounds=rounds)
    return partial(measure, replace(options, steps=40) if quick else options)


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured."""
    rounds: list[dict[str, Any]] = []
    seeds = range(options.seed, options.seed + options.rounds)
    for name, rules in GAMES.items():
        report(f"{name}: self-play")
        versions = {seed: self_play(rules, options, seed) for seed in (*seeds, seeds[-1] + 1)}
        for seed in seeds:
            report(f"{name}: seed {seed}")
            strangers = [versions[other][-1] for other in versions if other != seed]
            rounds.append(
                {"game": name, "seed": seed, **_round(rules, options, seed, versions[seed], strangers)}
            )
    figures = {
        f"{name}_{key}": fmean(each[key] for each in rounds if each["game"] == name)
        for name in GAMES
        for key in rounds[0]
        if key not in ("game", "seed")
    }
    for name, key in product(GAMES, ("", "_exploiters")):
        figures[f"{name}_ratio{key}"] = figures[f"{name}_league{key}"] / figures[f"{name}_self_play"]
    return result_of(
        options,
        figures,
        GOALS,
        rounds=[
            {key: value if isinstance(value, str) else rounded(value) for key, value in each.items()}
            for each in rounds
        ],
    )


def _round(
    rules: GameRules, options: Options, seed: int, versions: Sequence[Strategy], strangers: Sequence[Strategy]
) -> dict[str, float]:
    plain, last = league(rules, options, seed, exploiters=False)
    with_spy, _ = league(rules, options, seed, exploiters=True)
    kept = versions[:: options.every]
    return {
        "self_play": rules.exploitability([(1.0, versions[-1])]),
        "self_play_mean": rules.exploitability([(1 / len(kept), version) for version in kept]),
        "league": rules.exploitability(plain),
        "league_last": rules.exploitability([(1.0, last)]),
        "league_exploiters": rules.exploitability(with_spy),
        "held_out": fmean(sum(w * rules.value(s, other) for w, s in plain) for other in strangers),
        "self_play_held_out": fmean(rules.value(versions[-1], other) for other in strangers),
    }


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the result as tables."""
    keys = [key for key in result["rounds"][0] if key not in ("game", "seed")]
    table = Table("game", "seed", *(key.replace("_", " ") for key in keys), title="exploitability")
    for each in result["rounds"]:
        table.add_row(each["game"], str(each["seed"]), *(f"{each[key]:.3f}" for key in keys))
    console.print(table)
    console.print(goals_table("a league", result["goals"]))
