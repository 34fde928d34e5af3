"""The report's charts."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.launch.monitoring.report.charts import (
    NARROW,
    WIDE,
    Axes,
    Band,
    Line,
    column_chart,
    line_chart,
    same_as,
    smooth,
    thin,
    ticks,
)

from .records import FINITE

AXES = Axes(name="chart", title="A <title>", description="d & d", x_label="step", y_label="y")


@given(st.lists(st.tuples(st.integers(0, 10**6), FINITE), max_size=40), st.sampled_from([WIDE, NARROW]))
def test_curves_stay_inside_the_frame(points: list[tuple[int, float]], width: int) -> None:
    line = Line("<a&b>", sorted({x: (float(x), y) for x, y in points}.values()), 9)
    root = ElementTree.fromstring(line_chart(AXES, [line], width))
    assert [child.text for child in root if child.tag in ("title", "desc")] == ["A <title>", "d & d"]
    for polyline in root.iter("polyline"):
        for pair in (polyline.get("points") or "").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= width and 0 <= y <= 250


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=30))
def test_columns_stand_on_one_another(values: list[float]) -> None:
    edges = [float(index) for index in range(len(values) + 1)]
    bands = [Band("a", values, "c0"), Band("b", values, "c1")]
    root = ElementTree.fromstring(column_chart(AXES, edges, bands))
    groups = root.findall("g")
    assert len(groups) == len(values)
    for group in groups:
        rects = [(float(rect.get("y", "")), float(rect.get("height", ""))) for rect in group.findall("rect")]
        for (lower_y, _), (upper_y, upper_height) in pairwise(rects):
            assert upper_y + upper_height == pytest.approx(lower_y, abs=0.11)


@given(FINITE, st.floats(1e-6, 1e12), st.integers(1, 10))
def test_ticks_are_round_and_inside(low: float, span: float, wanted: int) -> None:
    high = low + span
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        return
    found = ticks(low, high, wanted)
    slack = 1e-6 * span + 1e-9 * abs(low)
    assert all(low - slack <= tick <= high + slack for tick in found)
    assert len(found) <= wanted + 1


@given(st.lists(FINITE, min_size=1, max_size=300), st.integers(4, 50))
def test_thinning_keeps_the_extremes_and_the_ends(values: list[float], limit: int) -> None:
    points = [(float(index), value) for index, value in enumerate(values)]
    kept = thin(points, limit)
    assert len(kept) <= max(limit, 4)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert max(y for _, y in kept) == max(values) and min(y for _, y in kept) == min(values)


def test_smoothing_is_a_running_mean() -> None:
    points = [(float(index), float(index * index)) for index in range(5)]
    assert smooth(points, 0) == points
    assert smooth(points, 1) == [(0, 0.5), (1, 5 / 3), (2, 14 / 3), (3, 29 / 3), (4, 12.5)]
    assert smooth([], 3) == []


def test_curves_that_lie_on_one_another_are_found_and_others_are_not() -> None:
    rising = [(float(x), x / 10) for x in range(10)]
    curves = {
        "a": rising,
        "b": [(x, 1.0 - y) for x, y in rising],
        "c": [(x, y + 1e-4) for x, y in rising],
        "d": rising[:-1],
        "e": [(x, 1.0 - y) for x, y in rising],
    }
    assert same_as(curves) == {"c": "a", "e": "b"}
    assert same_as({"flat": [(1.0, 0.0)], "other": [(1.0, 0.0)]}) == {"other": "flat"}
    assert same_as({}) == {}
