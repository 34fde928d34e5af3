"""The spans that a span is linked with: from a query's trajectory to the weights that it changed, and back.

    trajectory -> turn -> sample -> micro_batch -> optimizer -> publish -> install
                    └──> wait, generate                └──> step

Two spans are linked if the attributes that the relation names are equal (``actors/spans.py``).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from .stored_spans import StoredSpans

Array = np.ndarray[Any, Any]
Direction = Literal["before", "after"]

MOST_LINKS: Final = 300
"""Most links of a span in one direction. A micro-batch may have thousands of samples: the nearest in time are taken."""
SLACK_S: Final = 1.0
"""The clocks of two hosts may differ by so much, and spans of one time still overlap."""
_SAMPLE: Final = ("query", "step", "trajectory", "turn")


class Relation(NamedTuple):
    """A span of kind ``before`` leads to those of kind ``after`` that are equal in ``by``. ``steps``: the versions that
    the first one is behind. ``overlap``: they are at the same time too, as a query may be played by every
    evaluation."""

    before: str
    after: str
    by: tuple[str, ...]
    steps: int = 0
    overlap: bool = False


RELATIONS: Final = (
    Relation("trajectory", "turn", ("query", "step", "trajectory"), overlap=True),
    Relation("trajectory", "environment", ("query", "step", "trajectory"), overlap=True),
    Relation("turn", "wait", _SAMPLE, overlap=True),
    Relation("turn", "generate", _SAMPLE, overlap=True),
    Relation("turn", "sample", _SAMPLE),
    Relation("lease", "micro_batch", ("policy", "micro_batch")),
    Relation("sample", "micro_batch", ("policy", "micro_batch")),
    Relation("micro_batch", "optimizer", ("policy", "version"), steps=1),
    Relation("optimizer", "step", ("step",)),
    Relation("optimizer", "publish", ("policy", "version")),
    Relation("publish", "versions", ("policy", "version")),
    Relation("publish", "install", ("policy", "version")),
)


class Link(NamedTuple):
    """``relation``: ``before`` or ``after`` the span that was asked for."""

    id: int
    relation: Direction


def links_of(stored: StoredSpans, number: int) -> list[Link]:
    """The spans that lead to a span, and those that it leads to, each over several relations; at most ``MOST_LINKS`` in
    each direction."""
    return [
        Link(other, direction)
        for direction in ("before", "after")
        for other in _reach(stored, number, direction)
    ]


def _reach(stored: StoredSpans, number: int, direction: Direction) -> list[int]:
    """From relation to relation in one direction only: beside the span's own way there are those of all others."""
    [origin] = stored.spans([number])
    reached: dict[int, None] = {}
    frontier = [number]
    while frontier and len(reached) < MOST_LINKS:
        new = [
            other
            for other in _neighbours(stored, np.array(frontier), direction)
            if other != number and other not in reached
        ]
        new = _nearest(stored, new, origin.begin, MOST_LINKS - len(reached))
        reached |= dict.fromkeys(new)
        frontier = new
    return [*reached]


def _nearest(stored: StoredSpans, numbers: Sequence[int], at_s: float, most: int) -> list[int]:
    if len(numbers) <= most:
        return [*numbers]
    begins = np.array([span.begin for span in stored.spans(numbers)])
    return [numbers[place] for place in np.argsort(np.abs(begins - at_s), kind="stable")[:most]]


def _neighbours(stored: StoredSpans, seeds: Array, direction: Direction) -> Iterator[int]:
    """The spans one relation away from ``seeds``, which are ids."""
    seed_records = stored.records_of(seeds.tolist())
    lookups: list[tuple[Relation, int, Array, tuple[float, float]]] = []
    for relation in RELATIONS:
        near, far = (
            (relation.after, relation.before) if direction == "before" else (relation.before, relation.after)
        )
        steps = relation.steps if direction == "after" else -relation.steps
        near_entry, entry = stored.entry_of(near), stored.entry_of(far)
        if near_entry is None or entry is None:
            continue
        is_near = seed_records["kind"] == near_entry
        if is_near.any():
            origins = seed_records[is_near]
            keys = stored.keys(seeds[is_near], origins, relation.by, steps)
            lookups.append((relation, entry, keys, _window(relation, origins)))
    if not lookups:
        return
    for first, records in stored.records():
        for relation, entry, keys_sought, (begin_s, end_s) in lookups:
            places = np.flatnonzero(
                (records["kind"] == entry) & (records["begin"] <= end_s) & (records["end"] >= begin_s)
            )
            hits = np.isin(stored.keys(first + places, records[places], relation.by), keys_sought)
            yield from (first + places[hits]).tolist()


def _window(relation: Relation, origins: Array) -> tuple[float, float]:
    """The time in which the other spans of the relation lie."""
    if not relation.overlap:
        return -np.inf, np.inf
    return float(origins["begin"].min()) - SLACK_S, float(origins["end"].max()) + SLACK_S
