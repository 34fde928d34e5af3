"""Events of a run as marks in its timeline."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ....actors.run_events import PolicyResumed, PolicySuspended, RunEnded, RunEvent, RunResumed, RunStarted
from ...run_folder.growing_file import GrowingFile
from ...run_folder.json_lines import event_from_json, object_of
from ..console.event_text import note_of, warning_of
from ..formatting import number

_ACTORS: Final = ("instance", "slot", "slots", "actor", "worker")
"""The fields of events that name an actor."""


class Mark(NamedTuple):
    """``actors``: those that it belongs to; empty: the run."""

    at_s: float
    kind: str
    text: str
    actors: tuple[str, ...]


class Marks:
    """The marks of a run, in the order of their times."""

    def __init__(self, events: Path) -> None:
        self._events = GrowingFile(events)
        self.all: list[Mark] = []

    def refresh(self) -> None:
        """Reads the events since the last call; all of them if the file is another one by now."""
        if self._events.is_replaced():
            self._events.rewind()
            self.all.clear()
        for line in map(object_of, self._events.lines()):
            if line is not None and (mark := mark_of(line)) is not None:
                self.all.append(mark)
        self.all.sort()  # by this host's clock, which may have been set back

    def between(self, begin_s: float, end_s: float, width: int) -> Iterator[Mark]:
        """The marks of a window; of those in one of its ``width`` parts the first, with the number of the others."""
        by_pixel: dict[int, list[Mark]] = {}
        for mark in self.all:
            if begin_s <= mark.at_s <= end_s:
                by_pixel.setdefault(int((mark.at_s - begin_s) / (end_s - begin_s) * width), []).append(mark)
        for first, *rest in by_pixel.values():
            yield first._replace(text=f"{first.text} (and {len(rest)} more)") if rest else first


def mark_of(line: Mapping[str, Any]) -> Mark | None:
    """The mark of a line of ``events.jsonl``; None for an event that has none."""
    event, at_s = event_from_json(line), number(line.get("time"))
    if event is None or at_s is None or (text := _text(event)) is None:
        return None
    return Mark(at_s, event.event, text, tuple(_actors(line)))


def _text(event: RunEvent) -> str | None:
    match event:
        case RunStarted():
            return "the run begins"
        case RunResumed():
            return f"the run continues from step {event.step}"
        case RunEnded():
            return f"the run ends: {event.error}" if event.error else "the run ends"
        case PolicySuspended():
            return f"{event.policy} leaves {event.slots}: {event.reason}"
        case PolicyResumed():
            return f"{event.policy} is on {event.slots}: {event.reason}"
    return warning_of(event) or note_of(event, 1)


def _actors(line: Mapping[str, Any]) -> Sequence[str]:
    return [name for field in _ACTORS for name in str(line.get(field, "")).split(", ") if name]
