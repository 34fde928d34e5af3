"""The curves of a run's figures, by their keys in ``metrics.jsonl``: values by step, thinned for a screen. Pure."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, Final

import numpy as np

LIVE_POINTS: Final = 800
"""Points of a curve on a live page: about one for two pixels."""

Query = Mapping[str, str]
"""The parameters of a request."""

_VERSIONS: Final = {"versions": "version", "generated_by": "generated_by"}
_LIMIT: Final = 1e300
_NUMBERS: Final = frozenset({float, int})
_BLOCK: Final = 128
"""Lines that are put into the curves together."""

_FEW: Final = 8
"""For fewer lines columns take longer than single values."""

_UNIT_OF_PLACES: Final = 6
"""Digits of a value on the page."""


class Curve:
    """Values by ascending step. Arrays: a run of thousands of steps has hundreds of figures."""

    __slots__ = ("steps", "values")

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")

    def cut(self, step: int) -> None:
        """Forgets ``step`` and all later ones."""
        count = bisect_left(self.steps, step)
        del self.steps[count:], self.values[count:]

    def thinned(self, points: int, first: int | None = None, last: int | None = None) -> dict[str, Any]:
        """At most ``points`` points between two steps: ``steps`` and ``mean``; of a curve with more, each stands for
        neighbours, whose least and greatest values are ``low`` and ``high``."""
        shown = slice(
            0 if first is None else bisect_left(self.steps, first),
            len(self.steps) if last is None else bisect_right(self.steps, last),
        )
        steps, values = self.steps[shown], self.values[shown]
        count = len(steps)
        if count <= points:
            return {"steps": list(steps), "mean": [_short(value) for value in values]}
        edges = [place * count // points for place in range(points + 1)]
        parts = [values[begin:end] for begin, end in pairwise(edges)]
        return {
            "steps": [steps[right - 1] for right in edges[1:]],
            "mean": [_short(sum(part) / len(part)) for part in parts],
            "low": [_short(min(part)) for part in parts],
            "high": [_short(max(part)) for part in parts],
        }


class Curves:
    """The curves of one run, as its steps come."""

    def __init__(self) -> None:
        self._by_key: dict[str, Curve] = {}
        self._keys: tuple[str, ...] = ()
        self._steps: list[int] = []
        self._lines: list[Mapping[str, Any]] = []
        """Lines of ascending ``_steps``, all with ``_keys``, and in no curve yet: a run of thousands of steps has a
        million values, and columns of many lines take half the time of single values."""

    def __getitem__(self, key: str) -> Curve:
        """An empty one for a key without values."""
        self.flush()
        return self._by_key.get(key) or Curve()

    def __contains__(self, key: str) -> bool:
        self.flush()
        return bool(self._by_key.get(key) and self._by_key[key].steps)

    def all_keys(self) -> list[str]:
        """Those with values, in the order of their first ones."""
        self.flush()
        return [key for key, curve in self._by_key.items() if curve.steps]

    def take(self, step: int, line: Mapping[str, Any]) -> None:
        """Takes the figures of a line of ``metrics.jsonl``; versions have keys of their own. A step that is not later
        than the last one of a curve replaces it and all after it."""
        keys = tuple(line)
        if keys != self._keys or len(self._lines) == _BLOCK or (self._steps and step <= self._steps[-1]):
            self.flush()
            self._keys = keys
        self._steps.append(step)
        self._lines.append(line)

    def flush(self) -> None:
        """Puts the lines that were taken into the curves. All that reads curves does it first."""
        if not self._lines:
            return
        steps, lines = self._steps, self._lines
        self._steps, self._lines = [], []
        if not self._by_key.keys() >= set(self._keys):  # curves are in the order of their first values
            self._take(steps.pop(0), lines.pop(0))
        if not lines:
            return
        columns = [key for key, value in lines[0].items() if type(value) in _NUMBERS]
        if not columns or len(lines) < _FEW or not self._extend(columns, steps, lines):
            columns = []
        rest = set(self._keys).difference(columns)
        for step, line in zip(steps, lines, strict=True):
            self._take(step, {key: line[key] for key in line if key in rest} if columns else line)

    def _extend(
        self, columns: Sequence[str], steps: Sequence[int], lines: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Appends whole columns; False if that would not be the same as value by value: nothing has changed then."""
        cells = itemgetter(*columns) if len(columns) > 1 else lambda line: (line[columns[0]],)
        rows = [cells(line) for line in lines]
        if not all(_NUMBERS.issuperset(map(type, row)) for row in rows):
            return False
        try:
            table = np.array(rows, float)
        except OverflowError:
            return False
        if not (np.abs(table) < _LIMIT).all():
            return False
        curves = [self._by_key.get(key) for key in columns]
        if any(curve is not None and curve.steps and curve.steps[-1] >= steps[0] for curve in curves):
            return False
        step_bytes = np.array(steps, "q").tobytes()
        for key, values in zip(columns, np.ascontiguousarray(table.T), strict=True):
            curve = self._by_key.setdefault(key, Curve())
            curve.steps.frombytes(step_bytes)
            curve.values.frombytes(values.tobytes())
        return True

    def _take(self, step: int, line: Mapping[str, Any]) -> None:
        for key, value in line.items():
            kind = type(value)
            if (kind is float or kind is int) and -_LIMIT < value < _LIMIT:
                if (curve := self._by_key.get(key)) is None:
                    curve = self._by_key[key] = Curve()
                if curve.steps and step <= curve.steps[-1]:
                    curve.cut(step)
                curve.steps.append(step)
                curve.values.append(value)
            elif key in _VERSIONS and kind is dict:
                self._take(step, {f"{_VERSIONS[key]}/{policy}": version for policy, version in value.items()})

    def cut(self, step: int) -> None:
        """Forgets ``step`` and all later ones, of every curve."""
        self.flush()
        for curve in self._by_key.values():
            curve.cut(step)

    def names(self, figure: str) -> list[str]:
        """The names behind the slash of a figure's keys."""
        return [key.partition("/")[2] for key in self.all_keys() if key.startswith(f"{figure}/")]

    def replace(self, prefix: str, points: Mapping[int, Mapping[str, float]]) -> None:
        """Replaces the curves ``prefix/name`` by values by step and name."""
        self.flush()
        for key in [key for key in self._by_key if key.startswith(f"{prefix}/")]:
            del self._by_key[key]
        for step in sorted(points):
            self._take(step, {f"{prefix}/{name}": value for name, value in points[step].items()})


def points_of(curves: Curves, keys: Sequence[str], query: Query) -> dict[str, Any]:
    """The thinned curves of ``keys``. ``query``: ``points``, ``first`` and ``last``, each may be missing."""
    points = max(2, min(10_000, _whole(query.get("points")) or LIVE_POINTS))
    first, last = _whole(query.get("first")), _whole(query.get("last"))
    return {key: curves[key].thinned(points, first, last) for key in keys}


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and len(text) < 16 else None


def _short(value: float) -> float | int:
    shortened = float(f"{value:.{_UNIT_OF_PLACES}g}")
    return int(shortened) if shortened.is_integer() and abs(shortened) < 1e15 else shortened
