"""The slot ``router.lengths``: a step whose turns wait for instances, by the mean length and by that of the query.

Turns of one agent are routed by a run's router in virtual time: 64 queries a step of 256 that come again, 4 turns each,
on 8 instances with 8 places. A turn takes a second for 100 tokens in any place. Its length is lognormal: the query's
part has a deviation of 1.0, the turn's own 0.3. A result depends on the seed alone. The keys:

    mean_s        seconds of a step, once every query has come: turns in the order of their requests
    predicted_s   the same with ``router.lengths: query``
    known_s       the same with the true lengths as predictions
    bound_s       the larger of all work over all places, and the longest turn
    ratio         the second over the first, each of them the mean over the seeds
    rounds        every seed's

Also: ``versions``, ``settings``.
"""

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from statistics import fmean
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from flexmarl.actors.inference.router.router import Router
from flexmarl.actors.inference.router.router_config import RouterConfig
from flexmarl.actors.inference.router.router_decisions import Load, Route
from flexmarl.actors.inference.router.turn_lengths import Lengths
from flexmarl.actors.messages import RouteRequest
from flexmarl.actors.names import PolicyName, Version
from flexmarl.launch.bench.measure import Report, rounded
from flexmarl.launch.bench.results import result_of

_POLICY: Final = PolicyName("solver")
_TOKENS_PER_S: Final = 100.0
_PROMPT: Final = 50


@dataclass(frozen=True, slots=True)
class Options:
    """``rounds``: seeds, from ``seed`` on. ``steps``: measured, after those in which every query comes once."""

    rounds: int = 3
    seed: int = 0
    steps: int = 12
    queries: int = 256
    queries_per_step: int = 64
    turns: int = 4
    instances: int = 8
    places: int = 8
    median_tokens: float = 200.0
    query_sigma: float = 1.0
    turn_sigma: float = 0.3


class _Steps:
    """Steps of one way to predict. ``knows``: each turn is a topic, whose length the predictor has seen."""

    def __init__(self, options: Options, seed: int, lengths: Lengths, *, knows: bool = False) -> None:
        self._options, self._seed, self._knows = options, seed, knows
        self._router = Router([_POLICY], RouterConfig(lengths=lengths))
        for number in range(options.instances):
            self._router.joined(f"{_POLICY}-{number}", (_POLICY,), options.places, 0.0)
        self._router.published(_POLICY, Version(0), 0.0)
        for decision in self._router.decisions(0.0):
            if isinstance(decision, Load):
                self._router.loaded(decision.instance, decision.version, 0.0)
        self._router.decisions(0.0)
        self._now = 0.0
        self._asked = 0

    def play(self, step: int) -> tuple[float, float]:
        """Seconds of a step, and the least that it could take."""
        tokens = lengths_of(self._options, self._seed, step)
        began = self._now
        numbers = {}
        for (query, turn), length in tokens.items():
            topic = f"{step} {query} {turn}" if self._knows else query
            if self._knows:  # often enough to outweigh the mean of all
                for _ in range(16):
                    self._router._policies[_POLICY].lengths.ended(topic, length)
            self._asked += 1
            numbers[self._asked] = length
            request = RouteRequest(
                self._asked, _POLICY, Version(0), Version(0), _PROMPT, 0.0, f"{step} {query}", topic
            )
            self._router.requested(1, request, self._now)
        running: list[tuple[float, int]] = []
        while True:
            for decision in self._router.decisions(self._now):
                if isinstance(decision, Route):
                    number = decision.routed.turn
                    heapq.heappush(running, (self._now + numbers[number] / _TOKENS_PER_S, number))
            if not running:
                break
            self._now, number = heapq.heappop(running)
            self._router.ended(1, number, numbers[number], self._now)
        places = self._options.instances * self._options.places
        bound = max(sum(tokens.values()) / places, max(tokens.values())) / _TOKENS_PER_S
        return self._now - began, bound


def lengths_of(options: Options, seed: int, step: int) -> dict[tuple[str, int], int]:
    """The tokens of the turns of a step, by query and number, in the order of their requests."""
    epoch, place = divmod(step * options.queries_per_step, options.queries)
    order = list(range(options.queries))
    Random(f"{seed} epoch {epoch}").shuffle(order)
    draws = Random(f"{seed} step {step}")
    found = {}
    for query in order[place : place + options.queries_per_step]:
        part = Random(f"{seed} query {query}").gauss(0.0, options.query_sigma)
        for turn in range(options.turns):
            spread = math.exp(part + draws.gauss(0.0, options.turn_sigma))
            found[f"q{query}", turn] = max(1, round(options.median_tokens * spread))
    return found


def of_rounds(seed: int, rounds: int, *, quick: bool) -> Callable[[Report], dict[str, Any]]:
    """The measurement of ``rounds`` seeds from ``seed`` on. ``quick`` changes nothing but their number."""
    return partial(measure, Options(seed=seed, rounds=rounds))


def measure(options: Options, report: Report) -> dict[str, Any]:
    """The object that ``--json`` prints; ``report`` is called with the name of each part before it is measured."""
    first = options.queries // options.queries_per_step
    rounds = []
    for seed in range(options.seed, options.seed + options.rounds):
        report(f"seed {seed}")
        ways = {
            "mean_s": _Steps(options, seed, "mean"),
            "predicted_s": _Steps(options, seed, "query"),
            "known_s": _Steps(options, seed, "query", knows=True),
        }
        played = {
            key: [steps.play(step) for step in range(first + options.steps)][first:]
            for key, steps in ways.items()
        }
        figures = {key: fmean(seconds for seconds, _ in pairs) for key, pairs in played.items()}
        figures["bound_s"] = fmean(bound for _, bound in played["mean_s"])
        rounds.append({"seed": seed, **{key: rounded(value) for key, value in figures.items()}})
    means = {key: fmean(line[key] for line in rounds) for key in rounds[0] if key != "seed"}
    means["ratio"] = means["predicted_s"] / means["mean_s"]
    return result_of(options, means, rounds=rounds)


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Prints the result as a table."""
    table = Table("seed", "mean", "by query", "true lengths", "bound", title="seconds of a step")
    for line in result["rounds"]:
        table.add_row(*(f"{line[key]:g}" for key in ("seed", "mean_s", "predicted_s", "known_s", "bound_s")))
    console.print(table)
