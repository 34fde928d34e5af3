"""Costs of kinds of work are found again from the seconds of their sums."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.launch.simulate.least_squares import fit_costs

COSTS = st.floats(1e-3, 10.0)
WORKS = ((1.0, 1e9), (1.0, 4e9), (2.0, 3e9), (5.0, 2e9), (1.0, 8e9))


@given(call_s=COSTS, work_s=COSTS)
def test_two_kinds_are_told_apart_however_different_their_units_are(call_s: float, work_s: float) -> None:
    seconds = [calls * call_s + work / 1e9 * work_s for calls, work in WORKS]
    costs = fit_costs(["call", "work"], WORKS, seconds)
    predicted = [calls * costs["call"] + work * costs["work"] for calls, work in WORKS]
    assert predicted == pytest.approx(seconds, rel=1e-6)


def test_a_kind_that_grows_with_another_is_left_out() -> None:
    alike = [(count, 1e9 * count * factor) for count, factor in ((1.0, 1.0), (2.0, 1.1), (3.0, 1.0))]
    assert set(fit_costs(["call", "work"], alike, [2.0, 4.0, 6.0])) == {"work"}


def test_no_cost_is_negative() -> None:
    assert fit_costs(["call", "work"], WORKS, [1.0, 4.0, 2.5, 1.0, 8.0])["call"] == 0.0


def test_of_kinds_that_explain_the_seconds_equally_the_later_is_taken_and_a_far_better_one_before_it() -> (
    None
):
    works = [(1.0, size, 10 * size**2) for size in (1.0, 2.0, 1.0, 2.0)]
    by_size = fit_costs(["call", "size", "work"], works, [12.0, 44.0, 12.0, 44.0])
    assert set(by_size) == {"size", "work"}
    works = [(1.0, 100.0 * size, size) for size in (1.0, 1.05, 4.0, 4.1)]
    assert set(fit_costs(["call", "size", "work"], works, [2.0, 2.05, 5.0, 5.1])) == {"call", "work"}
