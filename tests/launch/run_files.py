"""The files of a run, as tests read them: its events and steps, and the samples that it has trained."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from .conftest import json_lines


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind, in their order."""
    return [line for line in json_lines(run / "events.jsonl") if line["event"] == kind]


def step_lines(run: Path) -> list[dict[str, Any]]:
    """The last line of each step: a run that continues from a checkpoint repeats those after it."""
    return [*{line["step"]: line for line in json_lines(run / "metrics.jsonl")}.values()]


def trained_by_version(run: Path, policy: str = "solver") -> dict[str, list[str]]:
    """The ids of the samples that a simulated policy has trained, by its version, as the newest checkpoint has them."""
    newest = max((run / "checkpoints").glob("step_*[0-9]"))
    trained: dict[str, list[str]] = json.loads((newest / policy / "simulated_policy.json").read_text())[
        "trained"
    ]
    return trained


def trained(run: Path, policy: str = "solver") -> Counter[str]:
    """The number of times that each sample was trained."""
    return Counter(name for names in trained_by_version(run, policy).values() for name in names)
