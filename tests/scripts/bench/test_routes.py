"""The figures of ``scripts/bench/run routes``: of made-up choices, and of small models."""

import numpy as np
import pytest

from scripts.bench.routes import GOALS, Figures, Options, compute, figures_of, tables

from ...bench_tables import drawn


def test_figures_count_other_choices_whatever_their_order() -> None:
    chosen = np.array([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], np.uint8)
    replayed = np.array([[[1, 0], [2, 3]], [[4, 5], [6, 1]]], np.int16)
    differences = {"plain": np.array([0.1, -0.2]), "replayed": np.array([0.01, -0.02])}
    result = figures_of(
        Figures(
            differences,
            chosen,
            replayed,
            {"plain": [1.0], "replayed": [1.05]},
            {"plain": [2.0], "replayed": [2.0]},
        )
    )
    assert result["other_choices"] == 0.125 and result["other_tokens"] == 0.5 and result["token_bytes"] == 4
    assert result["mean_plain"] == pytest.approx((np.exp(0.1) - 1 + 1 - np.exp(-0.2)) / 2, rel=1e-3)
    assert result["max_share"] == pytest.approx(0.1) and result["max_replayed"] == 0.02
    assert [goal["key"] for goal in result["goals"] if goal["met"]] == [goal.key for goal in GOALS]
    assert "12.50%" in drawn(tables, result | {"machine": {"busy_percent": 0}})


def test_a_small_mixture_is_measured() -> None:
    options = Options(rounds=1, answers=2, tokens=4, layers=2, experts=4, top_k=2, hidden=64)
    result = figures_of(compute(options, lambda _: None))
    assert 0 < result["p99_replayed"] < 0.1 and result["token_bytes"] == 4
