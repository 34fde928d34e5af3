"""The result of a benchmark: figures, verdicts and the conditions of the measurement."""

from dataclasses import dataclass

from flexmarl.launch.bench.goals import Goal
from flexmarl.launch.bench.results import result_of


@dataclass(frozen=True, slots=True)
class Options:
    rounds: int = 3


def test_figures_are_rounded_and_judged_as_they_were_measured() -> None:
    goal = Goal("call_us", "a call, us", 12.3456, at_most=True)
    described = {"busy_percent": 4.0}
    result = result_of(Options(), {"call_us": 12.34567}, [goal], described, rounds=[12.34567])
    assert result["call_us"] == 12.35 and result["rounds"] == [12.34567]
    assert [(verdict["key"], verdict["met"]) for verdict in result["goals"]] == [("call_us", False)]
    assert result["machine"] == described and result["settings"] == {"rounds": 3}
    assert "flexmarl" in result["versions"]


def test_a_benchmark_without_goals_has_no_verdicts() -> None:
    assert result_of(Options(), {}).keys() == {"versions", "settings"}
