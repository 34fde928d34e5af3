"""Merges spans that are too narrow to be drawn into the pixels of their lanes. Pure."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]

SHADES: Final = 16
"""Neighbouring pixels of one kind are one piece if their shares are the same in so many steps."""


class PixelTimes:
    """Seconds of spans in each pixel of each row, between ``begin_s`` and ``end_s``. A row is of one lane and one
    kind."""

    def __init__(self, rows: int, begin_s: float, end_s: float, width: int) -> None:
        """``end_s`` is greater than ``begin_s``; ``rows`` and ``width`` are at least 1."""
        self._begin_s, self._end_s, self.width = begin_s, end_s, width
        self.pixel_s = (end_s - begin_s) / width
        self._seconds = np.zeros(rows * width)
        self._whole = np.zeros(rows * (width + 1))
        """Changes, from pixel to pixel, of the number of spans that fill a pixel."""

    def add(self, row: Array, begin: Array, end: Array) -> None:
        """Adds spans that lie in the window, at least in part."""
        start = np.clip(begin - self._begin_s, 0, None)
        stop = np.clip(end - self._begin_s, None, self._end_s - self._begin_s)
        first = self._pixel(start)
        last = self._pixel(stop)
        place = row.astype(np.intp) * self.width
        is_one = first == last
        in_first = np.where(is_one, stop, (first + 1) * self.pixel_s) - start
        self._count(self._seconds, place + first, in_first)
        if not is_one.all():
            several = ~is_one
            row, first, last = row[several].astype(np.intp), first[several], last[several]
            self._count(self._seconds, place[several] + last, stop[several] - last * self.pixel_s)
            place = row * (self.width + 1)
            self._count(self._whole, place + first + 1, np.ones(len(row)))
            self._count(self._whole, place + last, -np.ones(len(row)))

    def _pixel(self, seconds: Array) -> Array:
        return np.clip(seconds / self.pixel_s, 0, self.width - 1).astype(np.intp)

    @staticmethod
    def _count(totals: Array, places: Array, weights: Array) -> None:
        totals += np.bincount(places, weights, minlength=len(totals))

    def seconds(self) -> Array:
        """By row and pixel."""
        whole = self._whole.reshape(-1, self.width + 1).cumsum(axis=1)[:, :-1]
        return np.maximum(self._seconds.reshape(-1, self.width) + whole * self.pixel_s, 0.0)


def pieces(times: Array, kinds: Array, pixel_s: float) -> Iterator[tuple[int, int, int, float]]:
    """The pieces of one lane: first pixel, the one after the last, kind, and the share of time that was busy, at most
    1. ``times``: seconds by row of the lane and pixel; ``kinds``: of its rows. The kind of a pixel is that with the
    most time."""
    total = times.sum(axis=0)
    kind = kinds[times.argmax(axis=0)]
    share = np.minimum(total / pixel_s, 1.0)
    shade = np.ceil(share * SHADES).astype(np.intp)
    key = np.where(shade > 0, kind.astype(np.intp) * (SHADES + 1) + shade, -1)
    bounds = np.flatnonzero(np.diff(key)) + 1
    starts = np.concatenate(([0], bounds))
    stops = np.concatenate((bounds, [len(key)]))
    means = np.add.reduceat(share, starts) / (stops - starts)
    shown = key[starts] >= 0
    yield from zip(
        starts[shown].tolist(),
        stops[shown].tolist(),
        kind[starts[shown]].tolist(),
        np.round(means[shown], 3).tolist(),
        strict=True,
    )
