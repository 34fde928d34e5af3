"""Curves of a page: all values of short ones, and of long ones means with their bounds."""

import json

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.launch.monitoring.page.curves import Curve, Curves, points_of

from ...run_folder.records import FINITE


def curve_of(values: list[float]) -> Curve:
    curves = Curves()
    for step, value in enumerate(values, 1):
        curves.take(step, {"loss": value})
    return curves["loss"]


VALUES = st.one_of(
    FINITE,
    st.integers(-(10**400), 10**400),
    st.booleans(),
    st.none(),
    st.sampled_from([float("nan"), float("inf"), 1e301, "text", {"solver": 3, "judge": None}, [1]]),
)
LINES = st.dictionaries(st.sampled_from(["loss", "reward/a", "versions", "generated_by", "notes"]), VALUES)


@given(st.lists(st.tuples(st.integers(0, 5), LINES, st.integers(1, 20)), max_size=8), st.booleans())
def test_columns_of_many_lines_are_as_their_values_one_by_one(
    runs: list[tuple[int, dict[str, object], int]], reads: bool
) -> None:
    """Each part of ``runs``: where the steps begin again, counted from the last one back, a line, and how often."""
    columns, single, step = Curves(), Curves(), 0
    for back, line, count in runs:
        step = max(0, step - back)
        for _ in range(count):
            step += 1
            columns.take(step, dict(line))
            single.take(step, line)
            single.flush()
            assert not reads or columns["loss"].steps == single["loss"].steps
    assert columns.all_keys() == single.all_keys()
    for key in single.all_keys():
        assert columns[key].steps == single[key].steps and columns[key].values == single[key].values


@given(st.lists(FINITE, max_size=40), st.integers(2, 12))
def test_a_long_curve_keeps_its_extremes_and_its_last_step(values: list[float], points: int) -> None:
    thin = curve_of(values).thinned(points)
    assert len(thin["steps"]) == min(len(values), points)
    json.dumps(thin, allow_nan=False)
    if len(values) <= points:
        assert "low" not in thin
    else:
        assert thin["steps"][-1] == len(values)
        scale = max(map(abs, values))
        assert abs(min(thin["low"]) - min(values)) <= 1e-5 * scale
        assert abs(max(thin["high"]) - max(values)) <= 1e-5 * scale
        ordered = zip(thin["low"], thin["mean"], thin["high"], strict=True)
        assert all(low <= mean + 1e-5 * scale and mean <= high + 1e-5 * scale for low, mean, high in ordered)


def test_a_part_of_a_curve_is_thinned_by_itself() -> None:
    curve = curve_of([float(step) for step in range(1, 101)])
    assert curve.thinned(50, 11, 20) == {"steps": [*range(11, 21)], "mean": [*range(11, 21)]}


def test_a_repeated_step_replaces_it_and_all_later_ones() -> None:
    curves = Curves()
    for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 9.0)):
        curves.take(step, {"loss": value})
    assert curves["loss"].thinned(9) == {"steps": [1, 2], "mean": [1, 9]}


def test_numbers_of_a_line_are_those_that_can_be_drawn() -> None:
    line = {
        "tokens": 5, "loss/a": None, "kl/a": float("nan"), "note": "x", "flag": True, "big": 10**400,
        "versions": {"a": 2, "b": "x"}, "generated_by": [1],
    }  # fmt: skip
    curves = Curves()
    curves.take(3, line)
    assert {key: list(curves[key].values) for key in curves.all_keys()} == {
        "tokens": [5.0],
        "version/a": [2.0],
    }


def test_parameters_that_are_no_numbers_count_as_missing() -> None:
    curves = Curves()
    curves.take(1, {"loss/a": 0.5})
    for query in ({}, {"points": "x", "first": "-", "last": "9" * 40}, {"points": "0"}):
        assert points_of(curves, ["loss/a", "other"], query) == {
            "loss/a": {"steps": [1], "mean": [0.5]},
            "other": {"steps": [], "mean": []},
        }
    assert curves.names("loss") == ["a"] and "loss/a" in curves and "other" not in curves
