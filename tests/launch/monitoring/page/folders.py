"""Run folders for tests of the page."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexmarl.actors.names import Step
from flexmarl.actors.run_events import RunEnded, RunStarted
from flexmarl.launch.run_folder.json_lines import event_to_json

from ...run_folder.records import record

STARTED = event_to_json(RunStarted(Step(0), "3.12", "linux", 2, 17), 1_000_000.0)
ENDED = event_to_json(RunEnded(False, Step(3)), 1_000_100.0)


def step_line(step: int, figures: Mapping[str, Any]) -> dict[str, Any]:
    """A step with further figures, whose keys need not be words."""
    return {**record(step), **figures}


def lines_of(records: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def folder_of(
    folder: Path,
    metrics: Sequence[dict[str, Any]],
    events: Sequence[dict[str, Any]] = (STARTED,),
    config: str = "",
) -> Path:
    """A run's folder with these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config or "recipe: my/sort\nmode: strict\ntraining:\n  steps: 9\n")
    (folder / "metrics.jsonl").write_text(lines_of(metrics))
    (folder / "events.jsonl").write_text(lines_of(events))
    return folder
