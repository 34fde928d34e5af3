"""``scripts/bench/run slots explorations``: the figures of a run by hand, and short runs, measured to the end."""

from typing import Any

import pytest

from scripts.bench import slot_explorations
from scripts.bench.slot_explorations import figures, of_rounds, show

from ...bench_tables import drawn
from . import warm_runs

SAMPLES = {"samples/sorter": 4, "samples/checker": 4}
LINES: list[dict[str, Any]] = [
    {"step": 1, "tokens": 10, "explored_tokens": 40, "unlike_explorations": 1, **SAMPLES},
    {
        "step": 2, "tokens": 12, "explored_tokens": 44, "unlike_explorations": 1, **SAMPLES,
        "eval/accuracy": 0.5, "eval/reward/sorter": 0.25, "eval/reward/checker": 0.75,
    },
    {
        "step": 3, "tokens": 14, **SAMPLES,
        "eval/accuracy": 0.5, "eval/reward/sorter": 0.5, "eval/reward/checker": 0.75,
    },
]  # fmt: skip


def test_the_figures_of_a_run_are_those_until_it_has_learned() -> None:
    assert figures(LINES, 0.5) == {
        "step": 2, "full": 22, "explored": 84, "trained": 16, "unlike": 0.25, "reward": 0.625,
    }  # fmt: skip


def test_a_run_that_has_not_learned_counts_with_all_of_its_tokens() -> None:
    assert figures(LINES, 0.9) | {"unlike": 0} == {
        "step": 0, "full": 36, "explored": 84, "trained": 24, "unlike": 0, "reward": 0.625,
    }  # fmt: skip


def test_short_runs_of_all_arms_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_explorations, "run", warm_runs.run)
    result = of_rounds(0, 1, quick=True)(lambda part: None)
    assert result["few_explored"] == result["many_explored"] == 0 < result["explored_explored"]
    assert result["explored_trained"] == result["few_trained"] == pytest.approx(result["many_trained"] / 4)
    assert "a token in eight bits" in drawn(show, result)
