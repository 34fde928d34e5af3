"""Figures of an evaluation: means of the workflow's metrics, and pass@k of repeated trajectories. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from ..messages import EvaluationEnd, EvaluationSampling, EvaluationTrajectory, Query, TrajectoryFailure
from ..workflow import Rewards

REWARD: Final = "reward/"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics by name, over the trajectories that did not fail: means of the workflow's own metrics and of
    ``reward/<agent>``, and pass@k if queries were repeated."""

    trajectories: int
    metrics: dict[str, float]
    failures: list[TrajectoryFailure]


@dataclass(frozen=True, slots=True)
class EvaluationRules:
    """``samplings``: by name; the names stand before the metrics, that of the first is empty. ``success``: the metric
    of the workflow, or ``reward/<agent>``, that is at least 1 if a trajectory has solved its query; of a reward,
    ``accuracy`` is the share of those that have, unless the workflow has a metric of that name."""

    samplings: Mapping[str, EvaluationSampling] = field(default_factory=lambda: {"": EvaluationSampling()})
    success: str = "accuracy"

    def trajectories(self, queries: Sequence[Query]) -> Iterable[tuple[str, Query, int]]:
        """Name of the sampling, query and number of each trajectory. Numbers of a query are unique over all
        samplings."""
        first = 0
        for name, sampling in self.samplings.items():
            for number in range(first, first + sampling.repeats):
                yield from ((name, query, number) for query in queries)
            first += sampling.repeats

    def work(self, queries: Sequence[Query]) -> list[EvaluationTrajectory]:
        """The trajectories to run, in the order of ``trajectories``."""
        return [
            EvaluationTrajectory(query, number, self.samplings[name].temperature)
            for name, query, number in self.trajectories(queries)
        ]

    def result(self, queries: Sequence[Query], ends: Sequence[EvaluationEnd]) -> Evaluation:
        """``ends``: of ``work``, in its order."""
        named = list(zip(self.trajectories(queries), ends, strict=True))
        survived = [
            (name, query.id, Rewards(metrics=end.metrics, **end.rewards))
            for (name, query, _), end in named
            if end.failure is None
        ]
        failures = [end.failure for end in ends if end.failure is not None]
        return Evaluation(len(ends), evaluation_metrics(self, survived), failures)


def evaluation_metrics(rules: EvaluationRules, ended: Iterable[tuple[str, str, Rewards]]) -> dict[str, float]:
    """Metrics by name. ``ended``: the trajectories that succeeded in running, each with the name of its sampling, the
    id of its query and its rewards.

    ``NAME/METRIC``: the mean over the trajectories of the sampling; rewards are metrics ``reward/<agent>``.
    ``NAME/pass@k``: if the sampling repeats, for ``k`` = 1, 2, 4, ... and all repeats. The first sampling has no
    ``NAME/``.
    """
    of_sampling: dict[str, list[tuple[str, Rewards]]] = {name: [] for name in rules.samplings}
    for name, query, rewards in ended:
        of_sampling[name].append((query, rewards))
    metrics: dict[str, float] = {}
    for name, trajectories in of_sampling.items():
        means = _means([rewards for _, rewards in trajectories])
        solved = [(query, _is_solved(rules.success, rewards)) for query, rewards in trajectories]
        solutions = [(query, is_solved) for query, is_solved in solved if is_solved is not None]
        if rules.success.startswith(REWARD) and solutions:
            means.setdefault("accuracy", fmean(is_solved for _, is_solved in solutions))
        means |= _passes(rules.samplings[name].repeats, solutions)
        metrics |= {f"{name}/{metric}" if name else metric: value for metric, value in means.items()}
    return metrics


def pass_at_k(trajectories: int, solved: int, k: int) -> float:
    """The probability that one of ``k`` trajectories solves the query, if ``solved`` of ``trajectories`` did: the
    unbiased estimator ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, arXiv 2107.03374, eq. 1). ``k`` is at most
    ``trajectories``."""
    return 1.0 - math.comb(trajectories - solved, k) / math.comb(trajectories, k)


def _means(ended: Iterable[Rewards]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for rewards in ended:
        for name, value in rewards.metrics.items():
            values.setdefault(name, []).append(value)
        for agent, value in rewards.by_agent.items():
            values.setdefault(f"{REWARD}{agent}", []).append(value)
    return {name: fmean(of_metric) for name, of_metric in values.items()}


def _is_solved(success: str, rewards: Rewards) -> bool | None:
    """None if the trajectory lacks the metric."""
    value = rewards.metrics.get(success)
    if value is None and success.startswith(REWARD):
        value = rewards.by_agent.get(success.removeprefix(REWARD))
    return None if value is None else value >= 1


def _passes(repeats: int, ended: Iterable[tuple[str, bool]]) -> dict[str, float]:
    """Means over the queries with at least ``k`` trajectories. ``ended``: by query, if a trajectory has solved it."""
    if repeats == 1:
        return {}
    solved: dict[str, list[bool]] = {}
    for query, is_solved in ended:
        solved.setdefault(query, []).append(is_solved)
    passes = {}
    for k in [*_powers_of_two(repeats), repeats]:
        enough = [
            pass_at_k(len(of_query), sum(of_query), k) for of_query in solved.values() if len(of_query) >= k
        ]
        if enough:
            passes[f"pass@{k}"] = fmean(enough)
    return passes


def _powers_of_two(below: int) -> list[int]:
    return [2**power for power in range((below - 1).bit_length())]
