"""The timeline of a run, as the page asks for it. Results are plain data, for JSON.

``view``: what is to be drawn of a window of time, at a width in pixels::

    {"begin": s, "end": s, "run_begin": s, "run_end": s,
     "lanes": [{"name", "role", "node"}, ...], "kinds": [...],
     "spans": [[lane, begin_s, end_s, kind, id, label], ...],          at least a pixel wide, in the order of drawing
     "dense": [[lane, begin_s, end_s, kind, busy_share], ...],         narrower ones, merged
     "marks": [[lane or null, at_s, kind, text], ...], "dropped": n}

``lane`` and ``kind`` are indexes. Spans of a lane may overlap: an instance generates several turns at once. The number
of entries is bounded by lanes and width, at any zoom. Times are seconds since 1970, by the clock of each lane's host.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np

from ...run_folder.run_directory import RunDirectory
from .labels import label_of
from .links import KEY_SETS, links_of
from .marks import Marks
from .pixels import PixelTimes, pieces
from .span_keys import SpanKeys
from .stored_spans import Array, StoredSpans

MOST_WIDTH: Final = 10_000
_ON_TOP: Final = "prefill"
_LABELLED_PIXELS: Final = 24
"""A narrower rectangle has no room for a word."""


class Timeline:
    """Reads a run's folder; each call first takes what the run has added. Not for several threads at once."""

    def __init__(self, directory: RunDirectory) -> None:
        self._spans = StoredSpans(directory.trace)
        self._keys = SpanKeys(self._spans, KEY_SETS)
        self._marks = Marks(directory.events)

    def refresh(self) -> bool:
        """Reads what is new; True if there are new spans. ``view`` and ``span`` do it themselves."""
        self._marks.refresh()
        return self._spans.refresh()

    def view(
        self, begin_s: float | None = None, end_s: float | None = None, width: int = 1000
    ) -> dict[str, Any]:
        """See above. None: from the run's begin, to its end. Raises ValueError if the window is empty or the width is
        not 1 to ``MOST_WIDTH``."""
        self.refresh()
        first_s, last_s = self._ends()
        begin_s = first_s if begin_s is None else begin_s
        end_s = max(last_s, begin_s + 1e-3) if end_s is None else end_s
        if not (np.isfinite(begin_s) and np.isfinite(end_s) and begin_s < end_s):
            raise ValueError(f"a window of time ends after its begin: {begin_s} to {end_s}")
        if not 1 <= width <= MOST_WIDTH:
            raise ValueError(f"the width is 1 to {MOST_WIDTH} pixels, not {width}")
        spans, dense = self._draw(begin_s, end_s, width)
        return {
            "begin": begin_s,
            "end": end_s,
            "run_begin": first_s,
            "run_end": last_s,
            "lanes": [lane._asdict() for lane in self._spans.lanes],
            "kinds": [*self._spans.kinds],
            "spans": spans,
            "dense": dense,
            "marks": self._shown_marks(begin_s, end_s, width),
            "dropped": self._spans.dropped,
        }

    def span(self, number: int) -> dict[str, Any]:
        """A span with its attributes, and the spans that it is linked with: those that led to it, and those that it
        leads to (``links.py``). Raises KeyError for an unknown id."""
        self.refresh()
        if not 0 <= number < self._spans.size:
            raise KeyError(number)
        links = links_of(self._spans, self._keys, number)
        linked = [self._describe(link.id) | {"relation": link.relation} for link in links]
        [span] = self._spans.spans([number])
        attributes = {
            name: value
            for name, value in span._asdict().items()
            if name not in ("lane", "kind", "begin", "end") and value not in ("", -1)
        }
        return self._describe(number) | {"attributes": attributes, "links": linked}

    def step(self, number: int) -> dict[str, Any]:
        """``begin`` and ``end`` of a step of the run, the last time that it ran, and ``steps``: the first and the last
        step with a span. Raises KeyError for a step without one."""
        self.refresh()
        ids = self._spans.ids_of("step")
        if not ids:
            raise KeyError(number)
        records = self._spans.records_of(ids)
        places = np.flatnonzero(records["step"] == number)
        if not len(places):
            raise KeyError(number)
        last, steps = records[places[-1]], records["step"]
        return {
            "begin": float(last["begin"]),
            "end": float(last["end"]),
            "steps": [int(steps.min()), int(steps.max())],
        }

    def _describe(self, number: int) -> dict[str, Any]:
        [span] = self._spans.spans([number])
        lane, kind = self._spans.shown(number)
        return {
            "id": number,
            "kind": kind,
            "lane": lane,
            "begin": span.begin,
            "end": span.end,
            "label": label_of(span),
        }

    # ------------------------------------------------------------------ drawing

    def _ends(self) -> tuple[float, float]:
        blocks = self._spans.blocks
        marks = [mark.at_s for mark in self._marks.all]
        first_s = min([*(block.first_s for block in blocks), *marks], default=0.0)
        last_s = max([*(block.last_s for block in blocks), *marks], default=0.0)
        return first_s, last_s

    def _draw(self, begin_s: float, end_s: float, width: int) -> tuple[list[Any], list[Any]]:
        if not self._spans.rows:
            return [], []
        times = PixelTimes(len(self._spans.rows), begin_s, end_s, width)
        lane_of = np.array([lane for lane, _ in self._spans.rows])
        kind_of = np.array([kind for _, kind in self._spans.rows])
        wide: list[tuple[Array, Array, Array, Array]] = []
        for number, block in enumerate(self._spans.blocks):
            if block.first_s < end_s and block.last_s >= begin_s:
                wide.append(self._split(number, times, begin_s, end_s))
        ids, rows, begins, ends = (
            map(np.concatenate, zip(*wide, strict=True)) if wide else [np.empty(0, "<i8")] * 4
        )
        kept = self._longest(lane_of[rows], ends - begins, width)
        times.add(rows[~kept], begins[~kept], ends[~kept])
        # Prompts last: among the turns that an instance decodes meanwhile they would be covered.
        on_top = np.array([kind == _ON_TOP for kind in self._spans.kinds])[kind_of[rows]]
        order = [*np.flatnonzero(kept & ~on_top), *np.flatnonzero(kept & on_top)]
        spans = self._list_spans(ids[order], rows[order], begins[order], ends[order], times.pixel_s)
        seconds = times.seconds()
        dense = [
            [
                lane,
                round(begin_s + start * times.pixel_s, 6),
                round(begin_s + stop * times.pixel_s, 6),
                kind,
                share,
            ]
            for lane in range(len(self._spans.lanes))
            if len(of_lane := np.flatnonzero(lane_of == lane))
            for start, stop, kind, share in pieces(seconds[of_lane], kind_of[of_lane], times.pixel_s)
        ]
        return spans, dense

    def _split(
        self, number: int, times: PixelTimes, begin_s: float, end_s: float
    ) -> tuple[Array, Array, Array, Array]:
        """Adds the narrow spans of a block to ``times``; returns id, row, begin and end of the wide ones."""
        block = self._spans.blocks[number]
        places = np.flatnonzero((block.begin < end_s) & (block.end >= begin_s) & block.is_whole)
        begin, end, row = block.begin[places], block.end[places], block.row[places]
        seconds = end - begin
        # One without a duration, such as a move, is a mark: it would vanish in a pixel.
        wide = (seconds >= times.pixel_s) | (seconds == 0)
        narrow = ~wide
        times.add(row[narrow], begin[narrow], end[narrow])
        return self._spans.first_of(number) + places[wide], row[wide], begin[wide], end[wide]

    @staticmethod
    def _longest(lanes: Array, seconds: Array, width: int) -> Array:
        """True for the ``width`` longest spans of each lane. Of many that overlap the others are merged too."""
        kept = np.ones(len(lanes), bool)
        for lane in np.flatnonzero(np.bincount(lanes.astype(np.intp)) > width) if len(lanes) else ():
            of_lane = np.flatnonzero(lanes == lane)
            kept[of_lane[np.argsort(-seconds[of_lane], kind="stable")[width:]]] = False
        return kept

    def _list_spans(self, ids: Array, rows: Array, begins: Array, ends: Array, pixel_s: float) -> list[Any]:
        labelled = np.flatnonzero((ends - begins >= _LABELLED_PIXELS * pixel_s) | (ends == begins))
        labels = [""] * len(ids)
        for place, span in zip(labelled.tolist(), self._spans.spans(ids[labelled].tolist()), strict=True):
            labels[place] = label_of(span)
        pairs = [self._spans.rows[row] for row in rows.tolist()]
        times = zip(np.round(begins, 6).tolist(), np.round(ends, 6).tolist(), strict=True)
        return [
            [lane, begin, end, kind, number, label]
            for (lane, kind), (begin, end), number, label in zip(
                pairs, times, ids.tolist(), labels, strict=True
            )
        ]

    def _shown_marks(self, begin_s: float, end_s: float, width: int) -> list[Any]:
        # An actor may have several: ``rollout-0 turns``.
        lanes: dict[str, int] = {}
        for number, lane in enumerate(self._spans.lanes):
            lanes.setdefault(lane.name.partition(" ")[0], number)
        return [
            [
                next((lanes[actor] for actor in mark.actors if actor in lanes), None),
                mark.at_s,
                mark.kind,
                mark.text,
            ]
            for mark in self._marks.between(begin_s, end_s, width)
        ]


def timeline(run_dir: Path) -> Timeline:
    """The timeline of the run in a folder; it may be running. Raises RunDirectoryError if it is not a run's."""
    return Timeline(RunDirectory.recorded(run_dir))
