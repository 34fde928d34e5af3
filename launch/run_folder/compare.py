"""Runs side by side: the keys of their configs that differ, and their final figures; of several seeds, their means."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .stored_run import StoredRun

MISSING: Final = object()
"""The value of a key that a run's config lacks."""
PRESENT: Final = "(present)"
"""The value of an agent or policy that other runs lack."""
_PARTS: Final = ("agents.", "policies.")
_SEED: Final = "seed"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tables of the differing keys and of the figures, by name. A row has one value for each run, in the order of the
    runs; the value of a figure that a run lacks is None."""

    config: Mapping[str, tuple[Any, ...]]
    figures: Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over seeds. ``count``: the runs that have it."""

    mean: float
    least: float
    greatest: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """``values``: at least one."""
        return cls(math.fsum(values) / len(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class SeedComparison:
    """Runs that differ in their seeds alone, as one. ``groups``: the runs of each, in the order of their first one.
    ``config``, ``figures``: as of a ``Comparison``, with one value for each group; a figure that is a number is a
    ``Spread``."""

    groups: tuple[tuple[StoredRun, ...], ...]
    config: Mapping[str, tuple[Any, ...]]
    figures: Mapping[str, tuple[Any, ...]]


def compare_seeds(runs: Sequence[StoredRun]) -> SeedComparison | None:
    """None if no two of ``runs`` differ in their seeds alone."""
    by_config: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        settings = {key: value for key, value in run.config.items() if key != _SEED}
        by_config.setdefault(repr(sorted(settings.items())), []).append(place)
    if len(by_config) == len(runs):
        return None
    places = list(by_config.values())
    groups = tuple(tuple(runs[place] for place in group) for group in places)
    differing = dict(compare([group[0] for group in groups]).config)
    seeds = [", ".join(str(run.config.get(_SEED, "?")) for run in group) for group in groups]
    rows = compare(runs).figures
    figures = {
        name: tuple(_join([values[place] for place in group]) for group in places)
        for name, values in rows.items()
    }
    return SeedComparison(groups, {**differing, _SEED: tuple(seeds)}, figures)


def _join(values: Sequence[Any]) -> Any:
    """The values of a figure over seeds as one."""
    numbers = [value for value in values if type(value) in (int, float)]
    if numbers:
        return Spread.of(numbers)
    words = Counter(str(value) for value in values if value is not None)
    if not words:
        return None
    return next(iter(words)) if len(words) == 1 else ", ".join(f"{n} {word}" for word, n in words.items())


def compare(runs: Sequence[StoredRun]) -> Comparison:
    """The keys whose values differ between ``runs``, and all figures, differing or not. A key that one run lacks
    differs: its value there is ``MISSING``. An agent or policy that one run lacks is one key, not one for each of its
    settings."""
    values: dict[str, tuple[Any, ...]] = {}
    for key in dict.fromkeys(key for run in runs for key in run.config):
        part = ".".join(key.split(".")[:2])
        if part != key and part.startswith(_PARTS) and not all(_has(run, part) for run in runs):
            values[part] = tuple(PRESENT if _has(run, part) else MISSING for run in runs)
        else:
            values[key] = tuple(run.config.get(key, MISSING) for run in runs)
    differing = {key: row for key, row in values.items() if any(value != row[0] for value in row)}
    return Comparison(differing, {**_progress(runs), **_outcome(runs)})


def _has(run: StoredRun, part: str) -> bool:
    return any(key.startswith(f"{part}.") for key in run.config)


def _progress(runs: Sequence[StoredRun]) -> dict[str, tuple[Any, ...]]:
    return {
        "state": tuple(run.state for run in runs),
        "steps": tuple(run.step for run in runs),
        "wall_s": tuple(round(run.wall_s, 1) for run in runs),
        "evaluated_step": tuple(run.evaluated_step for run in runs),
    }


def _outcome(runs: Sequence[StoredRun]) -> dict[str, tuple[Any, ...]]:
    rows: dict[str, tuple[Any, ...]] = {}
    for prefix, figures in (
        ("eval/", [run.evaluation for run in runs]),
        ("", [run.rewards for run in runs]),
    ):
        names = dict.fromkeys(name for figures_of_run in figures for name in figures_of_run)
        rows |= {f"{prefix}{name}": tuple(of_run.get(name) for of_run in figures) for name in names}
    return rows
