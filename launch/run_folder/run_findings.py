"""The findings about a run, from the files in its folder: of one that runs, or one that has ended."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ...actors.step_metrics import StepMetrics
from ..monitoring.slowness.evidence import WINDOW
from ..monitoring.slowness.finding import Finding
from ..monitoring.slowness.findings import findings
from .json_lines import last_lines, metrics_from_json, object_of
from .run_directory import RunDirectory


def run_findings(directory: RunDirectory, config: Mapping[str, Any]) -> list[Finding]:
    """The findings about the newest steps. ``config``: the run's, by dotted key. Costs the reading of ``WINDOW``
    steps, of which those that an earlier call has read are not parsed once more."""
    lines = last_lines(directory.metrics, WINDOW)
    steps = {step.step: step for step in map(_step_of, lines) if step is not None}
    return findings([steps[number] for number in sorted(steps)], config)


# A page that is open asks every few seconds: most lines are those of the time before.
@lru_cache(maxsize=4 * WINDOW)
def _step_of(line: bytes) -> StepMetrics | None:
    return metrics_from_json(object_of(line) or {})
