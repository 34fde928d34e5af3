"""A line of ``events.jsonl``, as the readers of a run's folder have it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...actors.run_events import RunEvent
from ..monitoring.formatting import number
from .json_lines import event_from_json


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """``time``: Unix seconds; None for a line without. ``event``: None for a line with an unknown name, or that lacks
    a field."""

    time: float | None
    name: str
    event: RunEvent | None
    line: Mapping[str, Any]

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "LoggedEvent":
        """``line``: any object."""
        return cls(number(line.get("time")), str(line.get("event", "")), event_from_json(line), line)
