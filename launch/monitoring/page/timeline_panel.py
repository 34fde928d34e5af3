"""The panel *Timeline*: the spans of the run's parts in a window of time, and one span with its links."""

from typing import Any, Final

from ..timeline.timeline import MOST_WIDTH
from .curves import Query
from .recorded_run import RecordedRun

_WIDTH: Final = 1000
_MOST_DIGITS: Final = 20


def view(run: RecordedRun, query: Query) -> dict[str, Any]:
    """``query``: ``span``, the id of one; ``step``, the number of one; else ``begin``, ``end`` and ``width``,
    each may be missing: see ``timeline.Timeline``."""
    with run.timeline() as timeline:
        if "span" in query:
            try:
                return timeline.span(int(query["span"]))
            except (KeyError, ValueError):
                return {"error": f"there is no span {query['span'][:_MOST_DIGITS]}"}
        if "step" in query:
            try:
                return timeline.step(int(query["step"]))
            except (KeyError, ValueError):
                return {"error": f"{run.name} has no span of step {query['step'][:_MOST_DIGITS]}"}
        width = query.get("width", "")
        try:
            begin, end = (float(query[name]) if query.get(name) else None for name in ("begin", "end"))
            pixels = max(1, min(MOST_WIDTH, int(width))) if width else _WIDTH
            return timeline.view(begin, end, pixels)
        except ValueError:  # of an address that was written by hand
            return timeline.view(width=_WIDTH)
