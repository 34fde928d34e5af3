"""The curves of a run's figures, by their keys in ``metrics.jsonl``: values by step, thinned for a screen. Pure."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

LIVE_POINTS: Final = 800
"""Points of a curve on a live page: about one for two pixels."""

Query = Mapping[str, str]
"""The parameters of a request."""

_VERSIONS: Final = {"versions": "version", "generated_by": "generated_by"}
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

    def __getitem__(self, key: str) -> Curve:
        """An empty one for a key without values."""
        return self._by_key.get(key) or Curve()

    def __contains__(self, key: str) -> bool:
        return bool(self._by_key.get(key) and self._by_key[key].steps)

    def all_keys(self) -> list[str]:
        """Those with values, in the order of their first ones."""
        return [key for key, curve in self._by_key.items() if curve.steps]

    def take(self, step: int, line: Mapping[str, Any]) -> None:
        """Takes the figures of a line of ``metrics.jsonl``; versions have keys of their own. A step that is not later
        than the last one of a curve replaces it and all after it."""
        # A loop without calls: a run of thousands of steps has a million values, and they are read before the first
        # screen.
        for key, value in line.items():
            kind = type(value)
            if (kind is float or kind is int) and -1e300 < value < 1e300:
                if (curve := self._by_key.get(key)) is None:
                    curve = self._by_key[key] = Curve()
                if curve.steps and step <= curve.steps[-1]:
                    curve.cut(step)
                curve.steps.append(step)
                curve.values.append(value)
            elif key in _VERSIONS and kind is dict:
                self.take(step, {f"{_VERSIONS[key]}/{policy}": version for policy, version in value.items()})

    def cut(self, step: int) -> None:
        """Forgets ``step`` and all later ones, of every curve."""
        for curve in self._by_key.values():
            curve.cut(step)

    def names(self, figure: str) -> list[str]:
        """The names behind the slash of a figure's keys."""
        return [key.partition("/")[2] for key in self.all_keys() if key.startswith(f"{figure}/")]

    def replace(self, prefix: str, points: Mapping[int, Mapping[str, float]]) -> None:
        """Replaces the curves ``prefix/name`` by values by step and name."""
        for key in [key for key in self._by_key if key.startswith(f"{prefix}/")]:
            del self._by_key[key]
        for step in sorted(points):
            self.take(step, {f"{prefix}/{name}": value for name, value in points[step].items()})


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
