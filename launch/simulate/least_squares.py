"""A fit of seconds by a few kinds of work, each with a cost that is not negative. Pure.

    seconds = cost[0] * work[0] + cost[1] * work[1] + ...

The squares are those of relative errors, so that a short step of a small model says as much as a long one of a large
one. A measurement that is far from the others, as of a moment in which a machine did something else, counts less: its
weight falls with its error (Huber 1964), counted in the median of all errors.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float64]

_ROUNDS: Final = 20
_NEAR: Final = 1.5
"""Errors below so many medians count in full."""
_LEAST_ERROR: Final = 1e-9
_CLEARLY: Final = 0.5
_APART: Final = 0.1
"""The least singular value, by the largest, of kinds that are distinct: below it their costs follow the noise. Two
kinds whose ratio differs by a factor of 1.5 between the measurements have 0.1."""


def fit_costs(
    kinds: Sequence[str], works: Sequence[Sequence[float]], seconds: Sequence[float]
) -> dict[str, float]:
    """The cost of each kind of work that is distinct from the others, 0 or more; the last kind is always there.

    ``works``: a row for each measurement, a column for each kind. ``seconds``: of each measurement, above 0. Of the
    sets of distinct kinds it takes one of the largest, of these the one with the later kinds, unless
    another has half of its error."""
    rows = np.array(works, float) / np.array(seconds, float)[:, None]
    # Else a kind counted in operations, of which there are 1e14, would leave nothing of one that is counted in calls.
    sizes = np.linalg.norm(rows, axis=0)
    rows = rows / np.where(sizes > 0, sizes, 1.0)
    *optional, last = range(len(kinds))
    for count in range(len(optional), -1, -1):
        sets = [[*chosen, last] for chosen in combinations(optional, count)]
        fits = [
            (columns, _robust_costs(rows[:, columns]))
            for columns in reversed(sets)
            if count == 0 or _are_apart(rows[:, columns])
        ]
        if fits:
            best, *rest = fits
            for fit in rest:
                is_better = _error(rows, *fit) + _LEAST_ERROR < _CLEARLY * _error(rows, *best)
                best = fit if is_better else best
            return {kinds[column]: float(cost / sizes[column]) for column, cost in zip(*best, strict=True)}
    raise AssertionError("the last kind alone is always apart")


def _error(rows: Rows, columns: Sequence[int], costs: Rows) -> float:
    return float(np.median(np.abs(rows[:, columns] @ costs - 1.0)))


def _are_apart(rows: Rows) -> bool:
    values = np.linalg.svd(rows, compute_uv=False)
    return len(values) == rows.shape[1] and bool(values[-1] >= _APART * values[0])


def _robust_costs(rows: Rows) -> Rows:
    weights = np.ones(len(rows))
    costs = np.zeros(rows.shape[1])
    for _ in range(_ROUNDS):
        costs = _least_squares(rows, weights)
        errors = np.abs(rows @ costs - 1.0)
        near = _NEAR * max(float(np.median(errors)), _LEAST_ERROR)
        weights = np.minimum(1.0, near / np.maximum(errors, _LEAST_ERROR))
    return costs


def _least_squares(rows: Rows, weights: Rows) -> Rows:
    """The best of the solutions with some costs at 0 and all others above it: the least squares under this bound are
    one of these. There are few kinds, so that all sets of them are tried."""
    best, costs = np.inf, np.zeros(rows.shape[1])
    roots = np.sqrt(weights)[:, None]
    for count in range(1, rows.shape[1] + 1):
        for columns in map(list, combinations(range(rows.shape[1]), count)):
            part, *_ = np.linalg.lstsq(rows[:, columns] * roots, roots[:, 0], rcond=None)
            error = float(np.sum(weights * (rows[:, columns] @ part - 1.0) ** 2))
            if np.all(part >= 0) and error < best:
                best, costs = error, np.zeros(rows.shape[1])
                costs[columns] = part
    return costs
