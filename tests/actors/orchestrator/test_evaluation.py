"""Evaluations: their samplings and repeats, means, and pass@k."""

import itertools
from statistics import fmean
from typing import Any

import pytest
from pydantic import ValidationError

from flexmarl.actors.messages import EvaluationSampling, Query
from flexmarl.actors.orchestrator.evaluation import EvaluationRules, evaluation_metrics, pass_at_k
from flexmarl.actors.orchestrator.orchestrator_config import EvaluationConfig
from flexmarl.actors.workflow import Rewards

REPEATED = EvaluationSampling(temperature=1.0, repeats=4)


def rules(**config: Any) -> EvaluationRules:
    checked = EvaluationConfig(**config)
    return EvaluationRules(checked.all_samplings(), checked.success)


@pytest.mark.parametrize("trajectories", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_draws_of_k_with_a_success(trajectories: int) -> None:
    for solved in range(trajectories + 1):
        outcomes = [number < solved for number in range(trajectories)]
        for k in range(1, trajectories + 1):
            draws = [any(draw) for draw in itertools.combinations(outcomes, k)]
            assert pass_at_k(trajectories, solved, k) == pytest.approx(fmean(draws), abs=1e-12)


def test_pass_at_k_of_many_trajectories() -> None:
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)
    assert pass_at_k(2000, 0, 1000) == 0.0 and pass_at_k(2000, 1001, 1000) == 1.0


def test_metrics_are_means_and_passes_over_the_queries() -> None:
    solved = {"a": (1.0, 0.0, 0.0, 0.0), "b": (0.0,) * 4, "c": (1.0, 1.0)}  # two of c's trajectories failed
    ended = [
        ("", query, Rewards(solver=value / 2, metrics={"accuracy": value}))
        for query, values in solved.items()
        for value in values
    ]
    metrics = evaluation_metrics(rules(temperature=1.0, repeats=4), ended)
    assert metrics == {
        "accuracy": pytest.approx(0.3),
        "reward/solver": pytest.approx(0.15),
        "pass@1": pytest.approx((0.25 + 0 + 1) / 3),
        "pass@2": pytest.approx((0.5 + 0 + 1) / 3),
        "pass@4": pytest.approx(0.5),  # c has too few
    }


def test_each_further_sampling_has_its_name_before_its_metrics() -> None:
    config = rules(success="solved", samplings={"sampled": REPEATED, "cool": {"temperature": 0.3}})
    one = Rewards(solver=1.0, metrics={"solved": 1.0, "length": 3.0})
    ended = [("", "a", one), ("cool", "a", one), *(("sampled", "a", one) for _ in range(4))]
    assert evaluation_metrics(config, ended) == {
        f"{prefix}{name}": value
        for prefix in ("", "sampled/", "cool/")
        for name, value in {"solved": 1.0, "length": 3.0, "reward/solver": 1.0}.items()
    } | {f"sampled/pass@{k}": 1.0 for k in (1, 2, 4)}


def test_success_is_at_least_one_and_a_workflow_without_the_metric_has_no_passes() -> None:
    ended = [("", "a", Rewards(metrics={"accuracy": value})) for value in (0.5, 0.999, 1.0, 2.0)]
    metrics = evaluation_metrics(rules(temperature=None, repeats=4), ended)
    assert metrics["pass@1"] == 0.5 and metrics["accuracy"] == pytest.approx(4.499 / 4)
    ended = [("", "a", Rewards(metrics={"length": 1.0})) for _ in range(4)]
    assert evaluation_metrics(rules(temperature=1.0, repeats=4), ended) == {"length": 1.0}


def test_trajectories_of_a_query_have_numbers_of_their_own() -> None:
    queries = [Query("a", ""), Query("b", "")]
    config = rules(samplings={"sampled": REPEATED, "again": REPEATED})
    trajectories = list(config.trajectories(queries))
    assert trajectories[:2] == [("", queries[0], 0), ("", queries[1], 0)]
    assert sorted(number for _, query, number in trajectories if query.id == "a") == list(range(9))
    assert {name for name, _, number in trajectories if 1 <= number <= 4} == {"sampled"}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"repeats": 4}, "greedy decoding repeats the same answer"),
        ({"samplings": {"x": {"repeats": 2}}}, "greedy decoding repeats the same answer"),
        ({"temperature": -0.1}, "greater than or equal to 0"),
        ({"repeats": 0}, "greater than or equal to 1"),
        ({"samplings": {"reward": {}}}, "not reward"),
        ({"samplings": {"pass@k": {}}}, "lower-case letters"),
        ({"samplings": {"x": {"every": 3}}}, "Extra inputs"),
    ],
)
def test_a_wrong_config_is_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        EvaluationConfig(**config)
