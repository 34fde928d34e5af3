"""The findings about a run, from the files in its folder: of one that runs, or one that has ended."""

from collections.abc import Mapping
from typing import Any

from ..monitoring.slowness.evidence import WINDOW
from ..monitoring.slowness.finding import Finding
from ..monitoring.slowness.findings import findings
from .json_lines import last_lines, metrics_from_json, object_of
from .run_directory import RunDirectory


def run_findings(directory: RunDirectory, config: Mapping[str, Any]) -> list[Finding]:
    """The findings about the newest steps. ``config``: the run's, by dotted key. Costs the reading of ``WINDOW``
    steps."""
    lines = last_lines(directory.metrics, WINDOW)
    steps = {
        step.step: step for line in lines if (step := metrics_from_json(object_of(line) or {})) is not None
    }
    return findings([steps[number] for number in sorted(steps)], config)
