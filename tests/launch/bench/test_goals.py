"""A figure against its goal: alone, and as a multiple of another one."""

import pytest

from flexmarl.launch.bench.goals import Goal, judge

FAST = Goal("rate", "calls/s", 1000, at_most=False)
SHORT = Goal("took_s", "a call, s", 1.5, at_most=True, bare="bare_s")


@pytest.mark.parametrize(
    ("rate", "took_s", "met"),
    [(1000, 3.0, [True, True]), (999, 3.0, [False, True]), (1001, 3.1, [True, False])],
)
def test_a_bound_is_included(rate: float, took_s: float, met: list[bool]) -> None:
    verdicts = judge((FAST, SHORT), {"rate": rate, "took_s": took_s, "bare_s": 2.0})
    assert [verdict.met for verdict in verdicts] == met


def test_a_verdict_has_the_figure_its_ratio_and_the_goal_in_words() -> None:
    alone, multiple = judge((FAST, SHORT), {"rate": 1200.0, "took_s": 2.0, "bare_s": 3.0})
    assert (alone.measured, alone.bare, alone.ratio, alone.goal) == (1200.0, None, None, ">= 1,000")
    assert (multiple.measured, multiple.bare, multiple.ratio) == (2.0, 3.0, 0.667)
    assert multiple.goal == "<= 1.5x bare" and multiple.words == "a call, s"


def test_a_missing_figure_is_an_error() -> None:
    with pytest.raises(KeyError, match="bare_s"):
        judge((SHORT,), {"took_s": 1.0})
