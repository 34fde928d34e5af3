"""The figures of ``scripts/bench/run replicas``, of made-up traffic; ``test_gang_over_hosts.py`` measures ranks."""

import pytest

from scripts.bench.replicas import GOALS, Options, Traffic, figures_of, tables

from ...bench_tables import drawn

OPTIONS = Options(forwards=(1, 4))
TRAFFIC = {
    "divided": Traffic(1000, {1: 8000.0, 4: 32000.0}, {1: 1.0, 4: 4.0}),
    "replicas": Traffic(1000, {1: 4000.0, 4: 4200.0}, {1: 0.8, 4: 2.0}),
}


def test_figures_are_for_each_parameter_and_replicas_over_divided() -> None:
    result = figures_of(OPTIONS, TRAFFIC)
    assert result["replicas_bytes"] == {1: 4.0, 4: 4.2} and result["divided_bytes"] == {1: 8.0, 4: 32.0}
    assert result["predicted_bytes"] == 4.0 and result["bytes_of_predicted"] == pytest.approx(1.05)
    assert result["bytes_growth"] == pytest.approx(1.05)
    assert result["bytes_share"] == pytest.approx(4.2 / 32, rel=1e-3) and result["time_share"] == 0.5
    assert [goal["key"] for goal in result["goals"] if goal["met"]] == [goal.key for goal in GOALS]
    assert "seconds, replicas" in drawn(tables, result | {"machine": {"busy_percent": 0}})
