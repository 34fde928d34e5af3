"""The display of a run for programs: one JSON object per line."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

from ....actors.run_events import RunEvent
from ....actors.step_metrics import StepMetrics
from ...run_folder.json_lines import event_to_json, metrics_to_json
from ...run_folder.line_writer import finite
from .display import Display
from .echo import json_line


class JsonDisplay(Display):
    """Writes to ``output`` at once all that happens, an object per line.

    ``{"time": 1712.5, "event": "step", ...}`` has the keys of a line of ``metrics.jsonl``; other events those of
    ``events.jsonl``. Two kinds are here alone: ``phase`` (``text``, ``done``, ``total``) and ``warning`` (``text``).
    """

    def __init__(self, output: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._output, self._clock = output, clock
        self._started_s = clock()
        self._ended_s: float | None = None
        self._phase: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended_s = self._clock() - self._started_s

    @property
    def wall_s(self) -> float:
        return self._clock() - self._started_s if self._ended_s is None else self._ended_s

    def step(self, metrics: StepMetrics) -> None:
        self._write("step", metrics_to_json(metrics))

    def phase(self, text: str, done: int | None = None, total: int | None = None) -> None:
        counts = {"done": done, "total": total}
        fields = {"text": text} | {key: n for key, n in counts.items() if n is not None}
        if fields != self._phase:  # the same one may be reported each second
            self._phase = fields
            self._write("phase", fields)

    def event(self, event: RunEvent) -> None:
        write_json(self._output, event_to_json(event))

    def warn(self, text: str, *, at_once: bool = False) -> None:
        self._write("warning", {"text": text})

    def note(self, text: str) -> None:
        """A program asks for the run's status."""

    def tick(self) -> None:
        """Nothing waits."""

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        write_json(self._output, {"time": round(time.time(), 3), "event": event} | fields)


def write_json(output: TextIO, record: dict[str, Any]) -> None:
    """Writes one line at once. Numbers that are not finite become null, values that JSON lacks their text."""
    output.write(json_line(finite(record), allow_nan=False, default=str) + "\n")
    output.flush()
