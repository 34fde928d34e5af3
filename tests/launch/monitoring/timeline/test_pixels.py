"""Merging into pixels: no time is lost or made, wherever spans begin and end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.launch.monitoring.timeline.pixels import PixelTimes, pieces

TIMES = st.floats(-20.0, 130.0)
SPANS = st.lists(st.tuples(st.integers(0, 2), TIMES, st.floats(0.0, 60.0)), max_size=30)


@given(SPANS, st.integers(1, 40))
def test_the_time_of_all_spans_in_the_window_is_conserved_row_by_row(
    spans: list[tuple[int, float, float]], width: int
) -> None:
    inside = [(row, begin, begin + s) for row, begin, s in spans if begin < 100.0 and begin + s >= 0.0]
    times = PixelTimes(3, 0.0, 100.0, width)
    for part in (inside[::2], inside[1::2]):
        row, begin, end = (
            (np.array(column) for column in zip(*part, strict=True)) if part else (np.empty(0),) * 3
        )
        times.add(row, begin, end)
    for number, seconds in enumerate(times.seconds()):
        clipped = sum(
            min(stop, 100.0) - max(start, 0.0) for of_row, start, stop in inside if of_row == number
        )
        assert seconds.sum() == pytest.approx(clipped, abs=1e-6)
        assert (seconds >= 0).all()


@given(st.floats(0.0, 99.0), st.floats(0.001, 60.0), st.integers(1, 40))
def test_a_span_fills_the_pixels_that_it_covers_and_no_other(
    begin: float, duration: float, width: int
) -> None:
    times = PixelTimes(1, 0.0, 100.0, width)
    end = begin + duration
    times.add(np.array([0]), np.array([begin]), np.array([end]))
    [seconds] = times.seconds()
    for pixel in range(width):
        low, high = pixel * times.pixel_s, (pixel + 1) * times.pixel_s
        assert seconds[pixel] == pytest.approx(max(0.0, min(end, high) - max(begin, low)), abs=1e-6)


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2)), min_size=1, max_size=50))
def test_pieces_cover_all_busy_pixels_once_with_the_kind_of_most_time(
    columns: list[tuple[float, float]],
) -> None:
    times = np.array(columns).T
    seen = np.zeros(len(columns))
    for start, stop, kind, share in pieces(times, np.array([7, 9]), 1.0):
        seen[start:stop] += 1
        part = times[:, start:stop]
        assert all(part[(7, 9).index(kind)] >= part.max(axis=0))
        assert share == pytest.approx(np.minimum(part.sum(axis=0), 1.0).mean(), abs=1e-3)
    assert (seen == (times.sum(axis=0) > 0)).all()


def test_neighbours_of_one_kind_and_shade_are_one_piece() -> None:
    times = np.array([[0.5, 0.5, 0.5, 0.0, 1.0, 1.0]])
    assert [*pieces(times, np.array([3]), 1.0)] == [(0, 3, 3, 0.5), (4, 6, 3, 1.0)]
