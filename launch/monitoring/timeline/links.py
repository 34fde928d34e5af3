"""The spans that a span is linked with: from a query's trajectory to the weights that it changed, and back.

    trajectory -> turn -> sample -> micro_batch -> optimizer -> publish -> install
                    └──> wait, prefill, decode         └──> step

Two spans are linked if the attributes that the relation names are equal (``actors/spans.py``).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from ....actors.spans import GENERATING
from .span_keys import SpanKeys
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
    *(Relation("turn", kind, _SAMPLE, overlap=True) for kind in GENERATING),
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


KEY_SETS: Final = frozenset(
    (kind, relation.by) for relation in RELATIONS for kind in (relation.before, relation.after)
)
"""The sets of attributes that ``links_of`` looks up."""


def links_of(stored: StoredSpans, span_keys: SpanKeys, number: int) -> list[Link]:
    """The spans that lead to a span, and those that it leads to, each over several relations; at most ``MOST_LINKS`` in
    each direction. ``span_keys``: of ``stored`` and ``KEY_SETS``."""
    span_keys.refresh()
    return [
        Link(other, direction)
        for direction in ("before", "after")
        for other in _reach(stored, span_keys, number, direction)
    ]


def _reach(stored: StoredSpans, span_keys: SpanKeys, number: int, direction: Direction) -> list[int]:
    """From relation to relation in one direction only: beside the span's own way there are those of all others."""
    [begin_s] = stored.begins([number])
    reached: dict[int, None] = {}
    frontier = [number]
    while frontier and len(reached) < MOST_LINKS:
        neighbours = sorted({*_neighbours(stored, span_keys, np.array(frontier), direction)})
        new = [other for other in neighbours if other != number and other not in reached]
        new = _nearest(stored, new, begin_s, MOST_LINKS - len(reached))
        reached |= dict.fromkeys(new)
        frontier = new
    return [*reached]


def _nearest(stored: StoredSpans, numbers: Sequence[int], at_s: float, most: int) -> list[int]:
    if len(numbers) <= most:
        return [*numbers]
    begins = stored.begins(numbers)
    return [numbers[place] for place in np.argsort(np.abs(begins - at_s), kind="stable")[:most]]


def _neighbours(
    stored: StoredSpans, span_keys: SpanKeys, seeds: Array, direction: Direction
) -> Iterator[int]:
    """The spans one relation away from ``seeds``, which are ids."""
    records = stored.records_of(seeds.tolist())
    for relation in RELATIONS:
        near, far = (
            (relation.after, relation.before) if direction == "before" else (relation.before, relation.after)
        )
        steps = relation.steps if direction == "after" else -relation.steps
        entry = stored.entry_of(near)
        is_near = records["kind"] == (-1 if entry is None else entry)
        if is_near.any():
            origins = records[is_near]
            sought = np.unique(stored.keys(seeds[is_near], origins, relation.by, steps))
            yield from span_keys.find(far, relation.by, sought, *_window(relation, origins))


def _window(relation: Relation, origins: Array) -> tuple[float, float]:
    """The time in which the other spans of the relation lie."""
    if not relation.overlap:
        return -np.inf, np.inf
    return float(origins["begin"].min()) - SLACK_S, float(origins["end"].max()) + SLACK_S
