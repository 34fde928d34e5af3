"""Events of the launcher: into the run's file, and onto its display."""

from pathlib import Path

from ..actors.run_events import RunEvent
from .console.display import Display
from .json_lines import JsonLines, event_to_json


class EventLog:
    """Appends to ``events.jsonl`` and shows the same on ``display``."""

    def __init__(self, path: Path, display: Display) -> None:
        self.display = display
        self._lines = JsonLines(path)

    def write(self, event: RunEvent) -> None:
        """Raises OSError if the line can't be written; it is shown all the same."""
        self.display.event(event)
        self._lines.write(event_to_json(event))

    def close(self) -> None:
        self._lines.close()
