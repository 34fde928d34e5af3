"""Events of a run: into its file, and onto its display."""

from functools import partial
from pathlib import Path

from ...actors.run_events import RunEvent
from ..monitoring.console.display import Display
from .json_lines import event_to_json
from .line_writer import LineWriter


class EventLog:
    """Appends to ``events.jsonl`` and shows the same on ``display``. One for each life of a run."""

    def __init__(self, path: Path, display: Display) -> None:
        self.display = display
        self._lines = LineWriter(path, partial(display.warn, at_once=True))

    def write(self, event: RunEvent, time_s: float | None = None) -> None:
        """``time_s``: of the event, Unix seconds; None: now. A line that finds no space waits; it is shown all the
        same."""
        self.display.event(event)
        self._lines.write(event_to_json(event, time_s))

    def retry(self) -> None:
        """Writes the lines that wait, if they find space now."""
        self._lines.retry()

    def close(self) -> None:
        """Warns if events are missing in the file."""
        self._lines.close()
